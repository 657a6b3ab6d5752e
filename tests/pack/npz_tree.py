"""Small source trees, good and hostile, and readers of what was packed from them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import tarfile
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from fsmount.formats import manifest, sample
from fsmount.formats.manifest import Row, Text
from fsmount.formats.shard import member_name
from fsmount.model import Partition, Recipe, TagRef, parse_ref
from fsmount.pack import PackOptions, PackReport, Silent, pack
from fsmount.pack.memory import Memory
from fsmount.pack.plan import group
from fsmount.pack.source import NpzTree
from fsmount.pack.task import Context, Task
from fsmount.store import Store
from fsmount.testing.settled import settle

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Content:
    """A sample as a version has it, in values that compare by every bit."""

    arrays: tuple[tuple[str, str, tuple[int, ...], bool, bytes], ...]
    texts: tuple[Text, ...]
    sidecar: bytes | None


def content(arrays: Arrays, sidecar: bytes | None = None) -> Content:
    """What a sample with `arrays` must be in a version; 0-d text arrays are told apart."""
    tensors = {n: a for n, a in arrays.items() if a.dtype.kind not in "US"}
    texts = {n: a for n, a in arrays.items() if a.dtype.kind in "US"}
    return Content(
        tuple(
            (n, a.dtype.str, a.shape, bool(a.flags.fnc), a.tobytes())
            for n, a in sorted(tensors.items())
        ),
        tuple(Text(n, a.dtype.str, _text(a)) for n, a in sorted(texts.items())),
        sidecar,
    )


def _text(array: NDArray[Any]) -> str:
    value = array.item()
    return value.decode() if isinstance(value, bytes) else value


def write_sample(root: Path, key: str, arrays: Arrays, sidecar: bytes | None = None) -> Content:
    path = root / f"{key}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)  # type: ignore[arg-type]
    if sidecar is not None:
        (root / f"{key}.json").write_bytes(sidecar)
    return content(arrays, sidecar)


def numbered(number: int, size: int = 10) -> dict[str, NDArray[Any]]:
    values = np.random.default_rng(number).standard_normal(size).astype("<f4")
    return {"label": np.array(number), "values": values}


def write_numbered(root: Path, keys: Mapping[str, int], size: int = 10) -> dict[str, Content]:
    """Samples told by their number; every other one has a sidecar."""
    return {
        key: write_sample(
            root, key, numbered(n, size), b'{"number": %d}\n' % n if n % 2 == 0 else None
        )
        for key, n in keys.items()
    }


def run_pack(source: Path, store: Path, tag: str = "v1", **options: Any) -> PackReport:
    settle(source)
    return pack(str(source), str(store), PackOptions(tag, **options), Silent())


def partitions(store: Path, ref: str) -> dict[str, Partition]:
    found = Store.open(str(store)).version(parse_ref(ref)).partitions
    return {part.id: part for part in found}


def objects(store: Path, ref: str) -> dict[str, tuple[str, ...]]:
    """The digests of each partition's manifest and shards."""
    return {
        name: tuple(ref.digest for ref in part.objects())
        for name, part in partitions(store, ref).items()
    }


def read_version(store: Path, ref: str) -> dict[str, Content]:
    """Every sample of a version by key, everything checked on the way."""
    opened = Store.open(str(store))
    found: dict[str, Content] = {}
    for part in partitions(store, ref).values():
        meta = manifest.decode(opened.objects.read(part.manifest))
        meta.meta.check_belongs(part)
        shards = [opened.objects.read(shard) for shard in part.shards]
        members = {(i, m.name): m for i, data in enumerate(shards) for m in _members(data)}
        rows = meta.rows()
        assert len(rows) == len(members) == part.samples
        for row in rows:
            member = members[row.shard, next(n for i, n in members if (i, n) and _is(row, i, n))]
            assert (member.offset_data, member.size) == (row.offset, row.size)
            assert row.key not in found
            found[row.key] = _sample(row, shards[row.shard][row.offset :][: row.size])
    return found


def _is(row: Row, shard: int, name: str) -> bool:
    return shard == row.shard and name == member_name(row.key)


def _members(data: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return tar.getmembers()


def _sample(row: Row, payload: bytes) -> Content:
    member = sample.decompress(payload, row.raw_size)
    assert sample.checksum(payload) == row.checksum
    assert hashlib.sha256(member).digest() == row.sha256
    found = content(sample.decode(member), row.sidecar)
    assert found == content(read_tensors(member), row.sidecar)
    return Content(found.arrays, row.texts, row.sidecar)


def read_tensors(member: bytes) -> dict[str, NDArray[Any]]:
    """A reader of tensor members that shares no code with fsmount: json, struct, numpy."""
    (length,) = struct.unpack("<Q", member[:8])
    header = json.loads(member[8 : 8 + length])
    notes = header.pop("__metadata__", {})
    kinds = {"BOOL": "?", "F": "f", "I": "i", "U": "u"}
    arrays = {}
    for name, entry in header.items():
        note = json.loads(notes.get(f"numpy.{name}", "{}"))
        stored = entry["dtype"]
        plain = "?" if stored == "BOOL" else f"<{kinds[stored[0]]}{int(stored[1:]) // 8}"
        dtype = np.dtype(note.get("descr", plain))
        shape = entry["shape"][:-1] if dtype.kind == "c" else entry["shape"]
        begin, end = entry["data_offsets"]
        little = np.ndarray(shape, dtype.newbyteorder("<"), member[8 + length :][begin:end])
        array = np.empty(shape, dtype, "F" if note.get("fortran_order") else "C")
        raw = little.byteswap() if dtype.byteorder == ">" else little
        array[...] = raw.view(dtype) if array.ndim else raw.view(dtype)[()]
        assert array.nbytes == end - begin
        arrays[name] = array
    return arrays


def decompress(payload: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(payload)


def npy(descr: str, shape: object, data: bytes = b"", *, fortran: object = False) -> bytes:
    """An npy file, version 1.0, with whatever header it is told to have."""
    text = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()
    text += b" " * (-(10 + len(text) + 1) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + data


def write_zip(
    path: Path, members: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, compression)


def snapshot(store: Path) -> dict[str, bytes]:
    """What the versions of a store rest on, by path."""
    roots = [store / name for name in ("objects", "versions", "keysets", "latest.json")]
    files = [path for root in roots for path in [root, *root.rglob("*")] if path.is_file()]
    return {str(path.relative_to(store)): path.read_bytes() for path in files}


def check_nothing_published(store: Path) -> None:
    if store.exists():
        assert Store.open(str(store)).versions() == ()
        check_nothing_left(store)


def check_nothing_left(store: Path) -> None:
    """No work in progress and no lease is left behind."""
    assert os.listdir(store / "staging") == []
    assert [name for name in os.listdir(store / "leases") if name.endswith(".json")] == []


def tags(store: Path) -> list[str | None]:
    opened = Store.open(str(store))
    for document in opened.versions():
        opened.version(TagRef(str(document.tag)))
    return [document.tag for document in opened.versions()]


def task_of(tree: NpzTree, target: Store, store: Path, name: str) -> tuple[Task, Context]:
    """The task of a partition whose state in v1 is what it may be equal to."""
    document = target.resolve(TagRef("v1"))
    memory = Memory.of(target.path, document.source_namespace, document.rule, document.recipe)
    samples = group(tree.scan(skip=str(store)).samples, document.rule)[name]
    context = Context(tree, Recipe(), target.objects, memory, time.time_ns(), "", False)
    found = memory.partition(name)
    return Task(name, 0, samples, None if found is None else found.partition), context
