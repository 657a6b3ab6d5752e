"""What a run will read: the selected rows of a version, as arrays."""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fsmount.errors import FormatError, FsmountError, PlanError
from fsmount.formats import manifest, sample
from fsmount.model import Partition
from fsmount.select import ManifestData, read_ahead, read_columns, rows_of_keys, rows_where
from fsmount_loader.cache import cached
from fsmount_loader.decode import Layout, describe_difference
from fsmount_loader.options import Options
from fsmount_loader.order import Int64s
from fsmount_loader.selected import Rows, Selected
from fsmount_loader.version import VersionFiles

_COLUMNS = ("__shard__", "__offset__", "__size__", "__raw_size__", "__checksum__", "__schema__")
_CACHED_FROM = 64  # partitions; a plan of fewer is made as fast as it is found
_PLAIN = (str, bytes, bool, int, float, type(None), decimal.Decimal, datetime.date, datetime.time,
          datetime.datetime, datetime.timedelta)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """The selected rows, and all that is needed to read them. Immutable, can be pickled."""

    files: VersionFiles
    selected: Selected
    shards: tuple[str, ...]  # paths
    layout: Layout
    columns: dict[str, Any]  # values of the selected rows: a NumPy array, or pyarrow's

    @property
    def rows(self) -> Rows:
        """The selected rows."""
        return self.selected.rows

    def key(self, row: int) -> str:
        """A selected row's key, read from its manifest: for messages, not for batches."""
        place = self.selected.shard_partition[self.rows.shard[row]]
        partition = self.files.partitions[place]
        try:
            keys = manifest.decode(self.files.manifest(partition), ["__key__"]).table.column(0)
        except FsmountError:
            return f"row {self.rows.number[row]} of partition {partition.id}"
        return str(keys[int(self.rows.number[row])].as_py())


def make_plan(files: VersionFiles, options: Options) -> Plan:
    """Select rows and read where they lie, or find that in this node's cache.

    Raises PlanError if nothing is selected, an option names what is not there, or the selected
    samples have different schemas; FormatError or IntegrityError for a manifest that is not right.
    """
    name = _cache_name(files, options)
    make = partial(_select_rows, files, options)
    selected = make(None) if name is None else cached(name, make)
    schemas = [sample.read_schema(header) for header in selected.headers]
    layout = Layout.of(schemas, options.fields)
    _check_names(layout, options)
    plan = Plan(
        files=files,
        selected=selected,
        shards=tuple(files.path(shard) for shard in selected.shards),
        layout=layout,
        columns=_columns(files, options, selected),
    )
    _check_one_layout(plan, schemas)
    return plan


def _cache_name(files: VersionFiles, options: Options) -> str | None:
    """What the selected rows depend on, hashed; None where they are not worth keeping."""
    params = options.params
    values = list(params.values() if isinstance(params, dict) else params or ())
    if files.document.totals.partitions < _CACHED_FROM or not all(
        type(value) in _PLAIN for value in values
    ):
        return None
    names = list(params) if isinstance(params, dict) else None
    keyset = None if options.keyset is None else files.keyset_digest(options.keyset)
    about = [
        files.document.table.digest,  # a content revision leaves open where the payloads lie
        [options.where, names, [[type(value).__name__, repr(value)] for value in values]],
        duckdb.__version__ if options.where is not None else None,
        keyset,
    ]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def selection_digest(selected: Iterable[tuple[Partition, Int64s]]) -> str:
    """Name selected rows by content: docs/loading.md, "State", has the bytes that are hashed."""
    digest = hashlib.sha256(b"fsmount selection 1\n")
    for partition, rows in selected:
        if len(rows):
            name = partition.id.encode()
            digest.update(len(name).to_bytes(4, "little") + name)
            digest.update(bytes.fromhex(partition.data_revision))
            digest.update(len(rows).to_bytes(8, "little") + rows.astype("<i8").tobytes())
    return digest.hexdigest()


class _Selection:
    """The ascending selected row numbers of each partition."""

    def __init__(self, partitions: Sequence[Partition], chosen: Sequence[Int64s] | None) -> None:
        self._partitions = partitions
        self._chosen = chosen  # None: all of them
        sizes = [p.samples for p in partitions] if chosen is None else [len(c) for c in chosen]
        self.counts = np.array(sizes, np.int64)

    def __iter__(self) -> Iterator[Int64s]:
        if self._chosen is not None:
            return iter(self._chosen)
        return (np.arange(part.samples) for part in self._partitions)


def _select(files: VersionFiles, options: Options) -> _Selection:
    """Select rows; PlanError if there are none."""
    readers = [partial(files.manifest, part) for part in files.partitions]
    chosen: list[Int64s] | None = None
    named = []
    if options.where is not None:
        chosen = list(rows_where(readers, options.where, options.params))
        named.append(f"where={options.where!r}")
    if options.keyset is not None:
        keyed = _rows_of_keyset(files, readers, options.keyset)
        both = zip(keyed if chosen is None else chosen, keyed, strict=True)
        chosen = [np.intersect1d(a, b, True) for a, b in both]
        named.append(f"keyset={options.keyset!r}")
    selection = _Selection(files.partitions, chosen)
    if not selection.counts.any():
        raise PlanError(f"no sample is selected by {' and '.join(named) or 'an empty version'}")
    return selection


def _rows_of_keyset(files: VersionFiles, readers: Sequence[Any], name: str) -> list[Int64s]:
    try:
        return list(rows_of_keys(readers, files.keyset(name)))
    except PlanError as error:
        raise PlanError(f"keyset {name!r}: {error}") from error


def _select_rows(files: VersionFiles, options: Options, file: str | None) -> Selected:
    """Select rows and read where they lie, into a new file if one is given."""
    partitions = files.partitions
    selection = _select(files, options)
    rows = Rows.empty(int(selection.counts.sum()), file)
    shard_counts = [len(part.shards) for part in partitions]
    first_shards = np.cumsum([0, *shard_counts]).tolist()
    schemas = _Schemas()
    start = 0
    for place, found in _found(files, selection):
        part = slice(start, start + len(found.offset))
        rows.shard[part] = found.shard
        rows.shard[part] += first_shards[place]
        rows.offset[part], rows.size[part] = found.offset, found.size
        rows.checksum[part], rows.number[part] = found.checksum, found.number
        rows.schema[part] = schemas.places(found)
        start = part.stop
    return Selected(
        rows=rows,
        shards=tuple(
            files.shard(part, shard) for part in partitions for shard in range(len(part.shards))
        ),
        shard_partition=np.repeat(np.arange(len(partitions), dtype=np.int32), shard_counts),
        rows_per_shard=_bincount(rows.shard, first_shards[-1]),
        headers=tuple(schemas.headers),
        digest=selection_digest(zip(partitions, selection, strict=True)),
    )


def _bincount(values: npt.NDArray[np.int32], count: int) -> Int64s:
    """How often each of 0 … count - 1 stands in `values`, which are ascending."""
    return np.diff(np.searchsorted(values, np.arange(count + 1)))


@dataclass(frozen=True, slots=True)
class _Found:
    """The selected rows of one manifest."""

    partition: str
    shard: npt.NDArray[np.int32]  # place in the partition's shards
    offset: Int64s
    size: Int64s
    raw_size: Int64s
    checksum: npt.NDArray[np.uint64]
    schema: npt.NDArray[np.int32]  # place in `headers`
    number: Int64s
    headers: tuple[bytes, ...]


def _found(files: VersionFiles, selection: _Selection) -> Iterator[tuple[int, _Found]]:
    """The partitions with selected rows in turn."""
    wanted = [(place, rows) for place, rows in enumerate(selection) if len(rows)]
    read = read_ahead([partial(files.manifest, files.partitions[place]) for place, _ in wanted])
    for (place, rows), data in zip(wanted, read, strict=True):
        yield place, _decode_rows(data, files.partitions[place], rows)


def _decode_rows(data: ManifestData, partition: Partition, rows: Int64s) -> _Found:
    """Decode one manifest, which must be the partition's."""
    try:
        found = manifest.decode(data, _COLUMNS)
        if found.table.num_rows != partition.samples:
            raise FormatError(f"{found.table.num_rows} rows for {partition.samples} samples")
        columns = [found.table.column(name).to_numpy() for name in _COLUMNS]
        if np.any(columns[0][1:] < columns[0][:-1]):
            raise FormatError("its rows are not in shard order")
    except FormatError as error:
        raise type(error)(f"manifest of partition {partition.id!r}: {error}") from error
    found.meta.check_belongs(partition)
    if len(rows) != partition.samples:
        columns = [column[rows] for column in columns]
    shard, offset, size, raw_size, checksum, schema = columns
    headers = found.meta.schemas
    return _Found(partition.id, shard, offset, size, raw_size, checksum, schema, rows, headers)


class _Schemas:
    """The distinct schemas met so far; equal headers are one."""

    def __init__(self) -> None:
        self.headers: list[bytes] = []
        self._sizes: list[int] = []
        self._place: dict[bytes, int] = {}

    def places(self, found: _Found) -> npt.NDArray[np.int32]:
        """The place of each row's schema; FormatError if a row's size is not its schema's."""
        local = np.zeros(1, np.int32) if len(found.headers) == 1 else np.unique(found.schema)
        places = np.zeros(len(found.headers), np.int32)
        places[local] = [self._place_of(found.headers[schema]) for schema in local.tolist()]
        schema = places[found.schema]
        if np.any(found.raw_size != np.array(self._sizes, np.int64)[schema]):
            raise FormatError(f"manifest of partition {found.partition!r}: a wrong raw size")
        return schema

    def _place_of(self, header: bytes) -> int:
        if header not in self._place:
            self._sizes.append(sample.read_schema(header).raw_size)
            self._place[header] = len(self.headers)
            self.headers.append(header)
        return self._place[header]


def _columns(files: VersionFiles, options: Options, selected: Selected) -> dict[str, Any]:
    names = [*(["__key__"] if options.keys else []), *options.columns]
    if not names:
        return {}
    readers = [partial(files.manifest, part) for part in files.partitions]
    partition = np.repeat(selected.shard_partition, selected.rows_per_shard)
    ends = np.cumsum(_bincount(partition, len(readers)))
    chosen = np.split(selected.rows.number, ends[:-1])
    table = read_columns(readers, names, chosen).combine_chunks()
    return {name: _values(table.column(name)) for name in names}


def _values(column: pa.ChunkedArray) -> Any:
    """A NumPy array for numbers without nulls, else the column itself."""
    kind = column.type
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return column.to_numpy() if number and not column.null_count else column


def _check_one_layout(plan: Plan, schemas: Sequence[sample.Schema]) -> None:
    for place, schema in enumerate(schemas):
        difference = describe_difference(schemas[0], schema)
        if difference:
            first, other = (int(np.argmax(plan.rows.schema == n)) for n in (0, place))
            raise PlanError(
                f"samples {plan.key(first)!r} and {plan.key(other)!r} can't be in one batch: "
                f"{difference}"
            )


def _check_names(layout: Layout, options: Options) -> None:
    taken = {field.name for field in layout.fields} | {"__valid__"}
    if options.keys:
        taken.add("__key__")
    both = sorted(taken.intersection(options.columns))
    if both:
        raise PlanError(f"columns: {both[0]!r} is in every batch already")
