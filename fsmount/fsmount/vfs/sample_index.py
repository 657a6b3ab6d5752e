"""From a manifest to the flat file of its samples; see `sample_list` for what stands in that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fsmount.errors import FormatError
from fsmount.formats import manifest as manifests
from fsmount.formats import sample as samples
from fsmount.formats.manifest import (
    TEXT_PADDING_MAX,
    Manifest,
    descrs_of,
    no_dtype_of_text,
    text_room,
)
from fsmount.model import Partition
from fsmount.vfs import memory_file, npz, sample_list
from fsmount.vfs.sample_list import SLASH

_Numbers = NDArray[np.int64]


def decode(data: bytes | pa.Buffer, partition: Partition) -> int:
    """A memory file with the samples of the manifest in `data`, and its descriptor.

    FormatError or IntegrityError unless the manifest is this partition's.
    """
    manifest = manifests.decode(data)
    manifest.meta.check_belongs(partition)
    return encode(manifest, partition.id)


def encode(manifest: Manifest, partition: str) -> int:
    """A memory file with the samples of `manifest`, and its descriptor."""
    table = manifest.table.combine_chunks()
    rests, inside = _rests(table, partition)
    order = pc.sort_indices(rests).to_numpy().astype(np.int64)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    texts, text = _texts(table)
    npz_size, faults = _npz_sizes(manifest, texts, text)
    sidecars = table.column("__sidecar__")
    numbers = {
        **{name: _column(table, name) for name in ("shard", "offset", "size", "raw_size")},
        "checksum": table.column("__checksum__").to_numpy().view(np.int64),
        "schema": _column(table, "schema"),
        "text": text,
        "npz_size": npz_size,
        "inside": inside,
        "bare": pc.is_null(sidecars).to_numpy().astype(np.int64),
        "order": order,
        "place": place,
    }
    sections: list[tuple[str, Any]] = [
        (name, np.ascontiguousarray(numbers[name])) for name in sample_list.NUMBERS
    ]
    sections += _bytes_sections("paths", rests.take(pa.array(order)))
    sections += _bytes_sections("sidecars", sidecars)
    columns = {}
    for number, name in enumerate(sorted({n for t in texts for n in _descrs(t)})):
        if name in table.column_names:
            columns[name] = (number, name in manifest.meta.json_columns)
            sections += _bytes_sections(f"text {number}", table.column(name))
    told = {
        "rows": len(order),
        "schemas": [header[8:].rstrip(b" ").decode() for header in manifest.meta.schemas],
        "texts": texts,
        "columns": columns,
        "faults": faults,
    }
    return _write(told, sections)


def _column(table: pa.Table, name: str) -> _Numbers:
    return np.asarray(table.column(f"__{name}__").to_numpy(), np.int64)


def _rests(table: pa.Table, partition: str) -> tuple[pa.Array, _Numbers]:
    """The keys behind the partition's id, as they are sorted, and which keys lie inside of it.

    The rest is the whole key where the key does not lie in the directory that the id names.
    """
    keys = _flat(table.column("__key__"))
    prefix = f"{partition}/".encode()
    inside = pc.starts_with(keys, prefix)
    rests = pc.if_else(inside, pc.replace_substring(keys, prefix, b"", max_replacements=1), keys)
    return pc.replace_substring(rests, b"/", SLASH), inside.to_numpy(False).astype(np.int64)


def _flat(column: pa.ChunkedArray) -> pa.Array:
    """A column of texts or bytes as one array of bytes, empty where it is null."""
    found = pc.fill_null(column.cast(pa.large_binary()), b"")
    return pa.concat_arrays(found.chunks) if found.num_chunks else pa.array([], pa.large_binary())


def _texts(table: pa.Table) -> tuple[list[str], _Numbers]:
    """The different values of `__text__`, and which of them each row has; -1 for none."""
    column = table.column("__text__")
    try:
        values: list[str] = pc.unique(pc.drop_null(column)).to_pylist()
    except UnicodeDecodeError as error:
        raise FormatError(f"manifest: {error}") from error
    found = pc.index_in(column, pa.array(values, pa.string()))
    return values, pc.fill_null(found, -1).to_numpy().astype(np.int64)


def _descrs(text: str) -> dict[str, str]:
    """Name to dtype descriptor, as far as those are texts'."""
    try:
        descrs = descrs_of(text)
        for name, descr in descrs.items():
            text_room(name, descr)
    except FormatError:
        return {}
    return descrs


def _npz_sizes(manifest: Manifest, texts: list[str], text: _Numbers) -> tuple[_Numbers, list[str]]:
    """The size of each row's npz, and why some rows have none: those have -1 less its number."""
    schema = _column(manifest.table, "schema")
    raw_size = _column(manifest.table, "raw_size")
    pairs, which = np.unique(np.stack([schema, text]), axis=1, return_inverse=True)
    which = which.reshape(-1)
    sizes, raw_sizes, faults = [], [], []
    for number, chosen in pairs.T.tolist():
        try:
            known = samples.read_schema(manifest.meta.schemas[number])
            descrs = descrs_of(texts[chosen]) if chosen >= 0 else {}
            _check_names(manifest.table, descrs)
            sizes.append(npz.size(known.fields, descrs))
            raw_sizes.append(known.raw_size)
        except FormatError as error:
            faults.append(str(error))
            sizes.append(-len(faults))
            raw_sizes.append(-1)
    found = np.array(sizes, np.int64)[which] if sizes else np.zeros(0, np.int64)
    expected = np.array(raw_sizes, np.int64)[which] if sizes else np.zeros(0, np.int64)
    wrong = {"the member's size is not the one that its schema has": expected != raw_size}
    wrong |= _unfit(manifest, texts, text)
    for fault, where in wrong.items():
        if where[found >= 0].any():
            faults.append(fault)
            found[where & (found >= 0)] = -len(faults)
    return found, faults


def _unfit(manifest: Manifest, texts: list[str], text: _Numbers) -> dict[str, NDArray[np.bool_]]:
    """The rows whose text arrays don't fit their dtypes, by what is to be said of them."""
    table = manifest.table
    unfit: dict[str, NDArray[np.bool_]] = {}
    for number, told in enumerate(texts):
        for name, descr in _descrs(told).items():
            if name in table.column_names and table.schema.field(name).type == pa.string():
                fault, where = _fits(table.column(name), name, descr)
                unfit[fault] = unfit.get(fault, np.False_) | (~where & (text == number))
    return unfit


def _fits(column: pa.ChunkedArray, name: str, descr: str) -> tuple[str, NDArray[np.bool_]]:
    """What is to be said of rows whose text does not fit, and which rows' texts fit.

    Where the column is JSON text, that is a bit longer than what it stands for.
    """
    length = pc.utf8_length if descr[1:2] == "U" else pc.binary_length
    lengths = pc.fill_null(length(column), -1).to_numpy()
    spare = text_room(name, descr) - lengths
    return str(no_dtype_of_text(name, descr)), (lengths >= 0) & (spare <= TEXT_PADDING_MAX)


def _check_names(table: pa.Table, descrs: dict[str, str]) -> None:
    for name in descrs:
        if name not in table.column_names or table.schema.field(name).type != pa.string():
            raise FormatError(f"text array {name!r} has no column of texts")


def _bytes_sections(name: str, column: pa.ChunkedArray | pa.Array) -> list[tuple[str, Any]]:
    """What stands in `column`, one after the other, and where each begins."""
    found = column if isinstance(column, pa.Array) else _flat(column)
    if not len(found):
        return [(f"{name} at", np.zeros(1, np.int64)), (name, b"")]
    _, offsets, data = found.buffers()
    at = np.frombuffer(offsets, np.int64)[found.offset : found.offset + len(found) + 1]
    texts = b"" if data is None else memoryview(data)[int(at[0]) : int(at[-1])]
    return [(f"{name} at", at - at[0]), (name, texts)]


def _write(told: dict[str, Any], sections: list[tuple[str, Any]]) -> int:
    views = [(name, memoryview(part)) for name, part in sections]
    lengths = {name: view.nbytes for name, view in views}
    fd = memory_file.create()
    data = sample_list.head(told, lengths)
    memory_file.write(fd, data, 0)
    at = len(data)
    for _, view in views:
        memory_file.write(fd, view.cast("B"), at)
        at += view.nbytes
    memory_file.seal(fd)
    return fd
