"""What the manifests say of the selected rows beside where they lie: columns, keys, lengths."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fsmount.errors import FormatError, FsmountError, PlanError
from fsmount.formats import manifest
from fsmount.paths import partition_of
from fsmount.select import read_columns
from fsmount_loader.order import Int32s
from fsmount_loader.selected import Selected, bincount
from fsmount_loader.version import VersionFiles


def columns_of(files: VersionFiles, names: Sequence[str], selected: Selected) -> dict[str, Any]:
    """Columns by name: a NumPy array for numbers and booleans without nulls, else pyarrow's.

    Raises PlanError listing the columns for a name that is none.
    """
    if not names:
        return {}
    table = _read(files, names, selected)
    if "__key__" in names and pc.count_distinct(table.column("__key__")).as_py() < len(table):
        raise FormatError(described_twice(files))
    return {name: _values(table.column(name)) for name in names}


def described_twice(files: VersionFiles) -> str:
    """Which key stands in two manifests of a version in which one does."""
    seen: dict[str, str] = {}
    for part in files.partitions:
        for key in manifest.decode(files.manifest(part), ["__key__"]).table.column(0).to_pylist():
            if key in seen:
                return (
                    f"manifest of partition {part.id!r}: key {key!r} is in the manifest of "
                    f"partition {seen[key]!r} too"
                )
            seen[key] = part.id
    return "a key stands in the manifests twice"


@contextmanager
def naming_manifests(files: VersionFiles, columns: Sequence[str]) -> Iterator[None]:
    """Have a FormatError of any manifest, of which these columns were read, say which one it is."""
    try:
        yield
    except FormatError as error:
        for part in files.partitions:
            data = files.manifest(part)
            try:
                manifest.decode(data, columns)
            except FormatError as found:
                if str(found) == str(error):
                    of = f"manifest of partition {part.id!r}"
                    raise type(found)(f"{of}: {found}") from error
        raise


def key_of(files: VersionFiles, selected: Selected, row: int) -> str:
    """A selected row's key, read from its manifest: for messages, not for batches."""
    shard, number = int(selected.rows.shard[row]), int(selected.rows.number[row])
    try:
        partition = files.partitions[selected.shard_partition[shard]]
        keys = manifest.decode(files.manifest(partition), ["__key__"]).table.column(0)
    except FsmountError:
        return f"row {number} of partition {partition_of(selected.shards[shard])}"
    return str(keys[number].as_py())


def ranked_lengths(
    files: VersionFiles, name: str, selected: Selected, raw_size: Sequence[int]
) -> Int32s:
    """The rank of each selected row's length, a column of numbers, among the distinct lengths.

    `raw_size` is that of each schema. Raises PlanError naming `bucket_by` if there is no such
    column, it is not of numbers, or a row has none.
    """
    if name == "__raw_size__":
        values: npt.NDArray[Any] = np.array(raw_size, np.int64)[selected.rows.schema]
    else:
        values = _numbers(files, name, selected)
    ranks: Int32s = np.unique(values, return_inverse=True)[1].astype(np.int32)
    return ranks


def lengths_digest(ranks: Int32s) -> str:
    """Name lengths by their order: docs/loading.md, "State", has the bytes that are hashed."""
    return hashlib.sha256(b"fsmount lengths 1\n" + ranks.astype("<i4").tobytes()).hexdigest()


def _numbers(files: VersionFiles, name: str, selected: Selected) -> npt.NDArray[Any]:
    try:
        column = _read(files, [name], selected).column(name)
    except PlanError as error:
        raise PlanError(f"bucket_by: {error}") from error
    if not _numeric(column.type):
        raise PlanError(f"bucket_by={name!r} is no number but {column.type}")
    if column.null_count:
        first = int(np.argmax(column.is_null().to_numpy()))
        raise PlanError(f"bucket_by={name!r}: sample {key_of(files, selected, first)!r} has none")
    return np.asarray(column.to_numpy())


def _read(files: VersionFiles, names: Sequence[str], selected: Selected) -> pa.Table:
    readers = [partial(files.manifest, part) for part in files.partitions]
    partition = np.repeat(selected.shard_partition, selected.rows_per_shard)
    ends = np.cumsum(bincount(partition, len(readers)))
    chosen = np.split(selected.rows.number, ends[:-1])
    with naming_manifests(files, [name for name in names if name in manifest.OWN_COLUMNS]):
        return read_columns(readers, names, chosen).combine_chunks()


def _values(column: pa.ChunkedArray) -> Any:
    plain = _numeric(column.type) or pa.types.is_boolean(column.type)
    return column.to_numpy() if plain and not column.null_count else column


def _numeric(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))
