"""What a run will read: the selected rows of a version, as arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fsmount.errors import FormatError, FsmountError, PlanError
from fsmount.formats import manifest, sample
from fsmount.model import Partition
from fsmount.select import read_columns, rows_of_keys, rows_where
from fsmount_loader.decode import Layout, describe_difference
from fsmount_loader.options import Options
from fsmount_loader.order import Int64s
from fsmount_loader.version import VersionFiles

_COLUMNS = ("__shard__", "__offset__", "__size__", "__raw_size__", "__checksum__", "__schema__")
_READERS = 8  # manifests read at once


@dataclass(frozen=True, slots=True)
class Rows:
    """One entry a selected row, in the manifests' order. Offsets and sizes are bytes."""

    shard: npt.NDArray[np.int32]  # place in the plan's shards; ascending
    offset: Int64s  # of the payload in its shard
    size: Int64s  # of the payload
    checksum: npt.NDArray[np.uint64]  # of the payload
    schema: npt.NDArray[np.int32]  # place in the layout's headers
    number: Int64s  # of the row in its manifest

    def __len__(self) -> int:
        return len(self.shard)


@dataclass(frozen=True, slots=True)
class Plan:
    """The selected rows, and all that is needed to read them. Immutable, can be pickled."""

    files: VersionFiles
    shards: tuple[str, ...]  # paths
    shard_partition: npt.NDArray[np.int32]  # place of each shard's partition in files.partitions
    rows: Rows
    layout: Layout
    columns: dict[str, Any]  # values of the selected rows: a NumPy array, or pyarrow's
    digest: str  # names the selected rows by their content

    def rows_per_shard(self) -> Int64s:
        """The number of selected rows in each shard."""
        return np.bincount(self.rows.shard, minlength=len(self.shards)).astype(np.int64)

    def key(self, row: int) -> str:
        """A selected row's key, read from its manifest: for messages, not for batches."""
        partition = self.files.partitions[self.shard_partition[self.rows.shard[row]]]
        try:
            keys = manifest.decode(self.files.manifest(partition), ["__key__"]).table.column(0)
        except FsmountError:
            return f"row {self.rows.number[row]} of partition {partition.id}"
        return str(keys[int(self.rows.number[row])].as_py())


def make_plan(files: VersionFiles, options: Options) -> Plan:
    """Select rows and read where they lie.

    Raises PlanError if nothing is selected, an option names what is not there, or the selected
    samples have different schemas; FormatError or IntegrityError for a manifest that is not right.
    """
    chosen = _select(files, options)
    shard_counts = [len(part.shards) for part in files.partitions]
    schemas = _Schemas()
    first_shard = np.cumsum([0, *shard_counts])
    parts = [
        _rows(found, rows, int(first_shard[place]), schemas)
        for place, (found, rows) in enumerate(zip(_manifests(files), chosen, strict=True))
    ]
    rows = Rows(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    layout = Layout.of(schemas.all, options.fields)
    _check_names(layout, options)
    plan = Plan(
        files=files,
        shards=tuple(
            files.shard_path(part, shard)
            for part in files.partitions
            for shard in range(len(part.shards))
        ),
        shard_partition=np.repeat(np.arange(len(shard_counts), dtype=np.int32), shard_counts),
        rows=rows,
        layout=layout,
        columns=_columns(files, options, chosen),
        digest=selection_digest(zip(files.partitions, chosen, strict=True)),
    )
    _check_one_layout(plan, schemas.all)
    return plan


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


def _select(files: VersionFiles, options: Options) -> list[Int64s]:
    """The ascending selected row numbers of each partition; PlanError if there are none."""
    readers = [partial(files.manifest, part) for part in files.partitions]
    chosen: list[Int64s] = [np.arange(part.samples) for part in files.partitions]
    named = []
    if options.where is not None:
        chosen = list(rows_where(readers, options.where, options.params))
        named.append(f"where={options.where!r}")
    if options.keyset is not None:
        keyed = _rows_of_keyset(files, readers, options.keyset)
        chosen = [np.intersect1d(a, b, True) for a, b in zip(chosen, keyed, strict=True)]
        named.append(f"keyset={options.keyset!r}")
    if not any(map(len, chosen)):
        raise PlanError(f"no sample is selected by {' and '.join(named) or 'an empty version'}")
    return chosen


def _rows_of_keyset(files: VersionFiles, readers: Sequence[Any], name: str) -> list[Int64s]:
    try:
        return list(rows_of_keys(readers, files.keyset(name)))
    except PlanError as error:
        raise PlanError(f"keyset {name!r}: {error}") from error


def _manifests(files: VersionFiles) -> Iterable[manifest.Manifest]:
    """The manifests in turn, a few read ahead, each checked to belong to its partition."""
    with ThreadPoolExecutor(_READERS) as pool:
        for start in range(0, len(files.partitions), _READERS * 4):
            some = files.partitions[start : start + _READERS * 4]
            yield from pool.map(partial(_manifest, files), some)


def _manifest(files: VersionFiles, partition: Partition) -> manifest.Manifest:
    try:
        found = manifest.decode(files.manifest(partition), _COLUMNS)
        if found.table.num_rows != partition.samples:
            raise FormatError(f"{found.table.num_rows} rows for {partition.samples} samples")
        if np.any(np.diff(found.table.column("__shard__").to_numpy()) < 0):
            raise FormatError("its rows are not in shard order")
    except FormatError as error:
        raise type(error)(f"manifest of partition {partition.id!r}: {error}") from error
    found.meta.check_belongs(partition)
    return found


class _Schemas:
    """The distinct schemas met so far; equal headers are one."""

    def __init__(self) -> None:
        self.all: list[sample.Schema] = []
        self._place: dict[bytes, int] = {}

    def places(self, headers: Sequence[bytes]) -> npt.NDArray[np.int32]:
        for header in headers:
            if header not in self._place:
                self._place[header] = len(self.all)
                self.all.append(sample.read_schema(header))
        return np.array([self._place[header] for header in headers], np.int32)


def _rows(
    found: manifest.Manifest, rows: Int64s, first_shard: int, schemas: _Schemas
) -> tuple[Any, ...]:
    """The fields of Rows for the selected rows of one manifest."""
    shard, offset, size, raw_size, checksum, schema = (
        found.table.column(name).to_numpy()[rows] for name in _COLUMNS
    )
    used, schema = np.unique(schema, return_inverse=True)
    places = schemas.places([found.meta.schemas[int(place)] for place in used])
    expected = np.array([schemas.all[place].raw_size for place in places], np.int64)
    if np.any(raw_size != expected[schema]):
        raise FormatError(f"manifest of partition {found.meta.partition!r}: a wrong raw size")
    shard = (shard + first_shard).astype(np.int32)
    return shard, offset, size, checksum, places[schema], rows


def _columns(files: VersionFiles, options: Options, chosen: list[Int64s]) -> dict[str, Any]:
    names = [*(["__key__"] if options.keys else []), *options.columns]
    if not names:
        return {}
    readers = [partial(files.manifest, part) for part in files.partitions]
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
