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

from fsmount.errors import FormatError, PlanError
from fsmount.formats import manifest
from fsmount.model import Partition
from fsmount.paths import partition_of
from fsmount.select import ManifestData, no_such, read_ahead, rows_of_keys, rows_where
from fsmount_loader.cache import cached
from fsmount_loader.decode import Layout
from fsmount_loader.options import Options
from fsmount_loader.order import Int32s, Int64s
from fsmount_loader.schema_reading import SchemaReading
from fsmount_loader.schemas import Schemas, describe_difference
from fsmount_loader.selected import Rows, Selected, bincount
from fsmount_loader.shapes import Varied
from fsmount_loader.values import (
    columns_of,
    described_twice,
    key_of,
    naming_manifests,
    ranked_lengths,
)
from fsmount_loader.version import VersionFiles

_COLUMNS = ("__shard__", "__offset__", "__size__", "__raw_size__", "__checksum__", "__schema__")
MOST_ZSTD_SAVES = 15  # bits: four bytes of a frame hold at most 128 KiB
_MOST_ZSTD_ADDS = 2  # bits: a block of one byte takes four
_FRAME_MAX = 32  # bytes of a frame beside its blocks
_PLAIN = (str, bytes, bool, int, float, type(None), decimal.Decimal, datetime.date, datetime.time,
          datetime.datetime, datetime.timedelta)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """The selected rows, and all that is needed to read them. Immutable, can be pickled."""

    files: VersionFiles
    selected: Selected
    shards: tuple[str, ...]  # paths
    layout: Layout
    varied: Varied | None  # where samples differ in shape
    columns: dict[str, Any]  # values of the selected rows: a NumPy array, or pyarrow's
    lengths: Int32s | None  # of the selected rows, to sort by; only their order matters

    @property
    def rows(self) -> Rows:
        """The selected rows."""
        return self.selected.rows

    def key(self, row: int) -> str:
        """A selected row's key, read from its manifest: for messages, not for batches."""
        return key_of(self.files, self.selected, row)

    def partition(self, row: int) -> str:
        """The id of a selected row's partition: for messages too."""
        shard = int(self.selected.rows.shard[row])
        return str(partition_of(self.selected.shards[shard]))


def make_plan(files: VersionFiles, options: Options, *, alike: bool = True) -> Plan:
    """Select rows and read where they lie, or find that in this node's cache.

    Without `alike` samples may have any schemas; they can be read then, but not put into batches.
    Raises PlanError if nothing is selected, an option names what is not there, or the selected
    samples have different schemas; FormatError or IntegrityError for a manifest that is not right.
    """
    name = _cache_name(files, options)
    make = partial(_select_rows, files, options)
    selected = make(None) if name is None else cached(name, make)
    if alike:
        layout, varied = _layout(files, selected, options)
        _check_names(layout, varied, options)
    else:
        layout, varied = Layout.of(selected.schemas, ()), None
    names = [*(["__key__"] if options.keys else []), *options.columns]
    by = options.bucket_by
    return Plan(
        files=files,
        selected=selected,
        shards=tuple(files.path(shard) for shard in selected.shards),
        layout=layout,
        varied=varied,
        columns=columns_of(files, names, selected),
        lengths=None if by is None else ranked_lengths(files, by, selected, layout.raw_size),
    )


def _cache_name(files: VersionFiles, options: Options) -> str | None:
    """What the selected rows depend on, hashed; None where they can't be told apart."""
    params = options.params
    values = list(params.values() if isinstance(params, dict) else params or ())
    if not all(type(value) in _PLAIN for value in values):
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


def _rows_of_keyset(files: VersionFiles, readers: Sequence[Any], name: str) -> list[Int64s]:
    keys = files.keyset(name)
    try:
        with naming_manifests(files, ["__key__"]):
            rows = list(rows_of_keys(readers, keys))
    except PlanError as error:
        raise PlanError(f"keyset {name!r}: {error}") from error
    if sum(map(len, rows)) > len(keys):
        raise FormatError(described_twice(files))
    return rows


def _select_rows(files: VersionFiles, options: Options, file: str | None) -> Selected:
    """Select rows and read where they lie, into a new file if one is given."""
    partitions = files.partitions
    shard_counts = [len(part.shards) for part in partitions]
    first_shards = np.cumsum([0, *shard_counts]).tolist()
    rows = Rows.empty(sum(part.samples for part in partitions), file)
    counts = np.zeros(len(partitions), np.int64)
    schemas = SchemaReading()
    start = 0
    for place, found in _found(files, options):
        part = slice(start, start + len(found.number))
        rows.shard[part] = found.shard
        rows.shard[part] += first_shards[place]
        rows.offset[part], rows.size[part] = found.offset, found.size
        rows.checksum[part], rows.number[part] = found.checksum, found.number
        rows.schema[part] = _schema_places(schemas, found)
        counts[place] = len(found.number)
        start = part.stop
    if not start:
        by = [f"{n}={v!r}" for n in ("where", "keyset") if (v := getattr(options, n)) is not None]
        raise PlanError(f"no sample is selected by {' and '.join(by) or 'an empty version'}")
    rows = rows.first(start)
    numbers = np.split(rows.number, np.cumsum(counts)[:-1])
    return Selected(
        rows=rows,
        shards=tuple(
            files.shard(part, shard) for part in partitions for shard in range(len(part.shards))
        ),
        shard_partition=np.repeat(np.arange(len(partitions), dtype=np.int32), shard_counts),
        rows_per_shard=bincount(rows.shard, first_shards[-1]),
        schemas=schemas.schemas(),
        digest=selection_digest(zip(partitions, numbers, strict=True)),
    )


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


def _found(files: VersionFiles, options: Options) -> Iterator[tuple[int, _Found]]:
    """The partitions with selected rows, by place."""
    partitions = files.partitions
    readers = [partial(files.manifest, part) for part in partitions]
    keyed = None if options.keyset is None else _rows_of_keyset(files, readers, options.keyset)
    if options.where is not None:
        matched = rows_where(readers, options.where, options.params, _COLUMNS)
        with naming_manifests(files, [*_COLUMNS, "__key__"]):
            for place, (rows, found) in enumerate(matched):
                both = rows if keyed is None else np.intersect1d(rows, keyed[place], True)
                chosen_rows = _rows_of(found, partitions[place], both)
                if len(both):
                    yield place, chosen_rows
        return
    chosen = keyed or (np.arange(part.samples) for part in partitions)
    wanted = [(place, rows) for place, rows in enumerate(chosen) if len(rows)]
    read = read_ahead([readers[place] for place, _ in wanted])
    for (place, rows), data in zip(wanted, read, strict=True):
        yield place, _rows_of(_decoded(data, partitions[place]), partitions[place], rows)


def _decoded(data: ManifestData, partition: Partition) -> manifest.Manifest:
    try:
        return manifest.decode(data, _COLUMNS)
    except FormatError as error:
        raise type(error)(f"manifest of partition {partition.id!r}: {error}") from error


def _rows_of(found: manifest.Manifest, partition: Partition, rows: Int64s) -> _Found:
    """Rows of a manifest, which must be the partition's."""
    of = f"manifest of partition {partition.id!r}"
    if found.table.num_rows != partition.samples:
        raise FormatError(f"{of}: {found.table.num_rows} rows for {partition.samples} samples")
    columns = [found.table.column(name).to_numpy() for name in _COLUMNS]
    if np.any(columns[0][1:] < columns[0][:-1]):
        raise FormatError(f"{of}: its rows are not in shard order")
    found.meta.check_belongs(partition)
    if len(rows) != partition.samples:
        columns = [column[rows] for column in columns]
    shard, offset, size, raw_size, checksum, schema = columns
    headers = found.meta.schemas
    return _Found(partition.id, shard, offset, size, raw_size, checksum, schema, rows, headers)


def _schema_places(reading: SchemaReading, found: _Found) -> npt.NDArray[np.int32]:
    """The place of each row's schema; FormatError if a row's size is not its schema's."""
    of = f"manifest of partition {found.partition!r}"
    local = np.zeros(1, np.int32) if len(found.headers) == 1 else np.unique(found.schema)
    try:
        met = reading.places(found.headers[schema] for schema in local.tolist())
    except FormatError as error:
        raise FormatError(f"{of}: {error}") from error
    places = np.zeros(len(found.headers), np.int32)
    places[local] = met
    raw_size = np.zeros(len(found.headers), np.int64)
    raw_size[local] = reading.raw_sizes(met)
    sizes = raw_size[found.schema]
    if np.any((found.raw_size != sizes) | (sizes >> MOST_ZSTD_SAVES > found.size)):
        raise FormatError(f"{of}: a wrong raw size")
    if np.any(found.size >> _MOST_ZSTD_ADDS > sizes + _FRAME_MAX):
        raise FormatError(f"{of}: a wrong size")
    return places[found.schema]


def _layout(
    files: VersionFiles, selected: Selected, options: Options
) -> tuple[Layout, Varied | None]:
    """How to decode the samples; PlanError naming two that can't be in one batch."""
    schemas, wanted, strict = selected.schemas, options.fields, options.shapes == "error"
    _check_fields(schemas, wanted)
    odd = schemas.first_unlike(wanted, sizes=strict)
    if odd is not None:
        ours, theirs = schemas.schema(0), schemas.schema(odd)
        difference = describe_difference(ours, theirs, sizes=strict, wanted=wanted)
        if not describe_difference(ours, theirs, sizes=False, wanted=wanted):
            difference += "; shapes='pad' and shapes='list' allow for that"
        rows = (int(np.argmax(selected.rows.schema == n)) for n in (0, odd))
        first, other = (key_of(files, selected, row) for row in rows)
        raise PlanError(f"samples {first!r} and {other!r} can't be in one batch: {difference}")
    if schemas.first_unlike(None) is None:
        return Layout.of(schemas, wanted), None
    return Varied.of(schemas, wanted, "list" if options.shapes == "list" else "pad")


def _check_fields(schemas: Schemas, wanted: Sequence[str] | None) -> None:
    known = {field.name for kind in schemas.kinds() for field in kind.fields}
    for name in wanted or ():
        if name not in known:
            raise PlanError(f"fields: {no_such(name, known)}")


def _check_names(layout: Layout, varied: Varied | None, options: Options) -> None:
    taken = {"__valid__", *(["__key__"] if options.keys else []), *(varied.sized if varied else ())}
    for field in layout.fields:
        if field.name in taken:
            raise PlanError(
                f"fields: {field.name!r} is the name of an entry of our own; leave it out"
            )
    taken |= {field.name for field in layout.fields}
    both = sorted(taken.intersection(options.columns))
    if both:
        raise PlanError(f"columns: {both[0]!r} is in every batch already")
