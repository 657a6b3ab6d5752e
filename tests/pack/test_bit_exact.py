"""What is in a version is what was in the source, bit for bit, by our reader and by another."""

from __future__ import annotations

import io
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from npz_tree import (
    check_nothing_left,
    content,
    partitions,
    read_tensors,
    read_version,
    run_pack,
    write_numbered,
    write_sample,
)

from fsmount.errors import IntegrityError
from fsmount.formats import manifest, sample
from fsmount.formats.cuts import cut
from fsmount.formats.shard import key_of, member_hash
from fsmount.pack import npz, shards
from fsmount.pack.npz import read_npz
from fsmount.store import Store

DTYPES = [
    *("|b1", "|i1", "|u1", "<i2", ">i2", "<u2", ">u2", "<i4", ">i4", "<u4", ">u4", "<i8", ">i8"),
    *("<u8", ">u8", "<f2", ">f2", "<f4", ">f4", "<f8", ">f8", "<c8", ">c8", "<c16", ">c16"),
    *("<M8[ns]", ">M8[D]", "<M8[25us]", "<M8", "<m8[s]", ">m8[7h]"),
]


def patterned(dtype: str, shape: tuple[int, ...], order: Any = "C") -> np.ndarray:
    """Bytes that make NaN payloads, odd booleans, NaT and negative zeros."""
    kind = np.dtype(dtype)
    pattern = bytes.fromhex("010000000000f07f ff7f000000000080 0000000000000080 fffffffffffff7ff")
    size = int(np.prod(shape, dtype=int)) * kind.itemsize
    return np.ndarray(shape, kind, bytearray((pattern * (size // 32 + 1))[:size]), order=order)


ODD = {
    "dtypes": {f"x{dtype}": patterned(dtype, (2, 3)) for dtype in DTYPES},
    "fortran": {f"x{dtype}": patterned(dtype, (2, 3), "F") for dtype in DTYPES},
    "scalars": {f"x{dtype}": patterned(dtype, ()) for dtype in DTYPES},
    "empty": {f"x{dtype}": patterned(dtype, (3, 0, 2)) for dtype in DTYPES},
    "shapes": {str(shape): np.ones(shape) for shape in [(1,) * 32, (0,), (1, 5, 1), (7, 1)]},
    "nothing": {},
    "a/b/names": {n: np.arange(3) for n in [" ", "a/b", "é", "a.b", "x\ny", "numpy.a", "x.npy"]},
    "texts": {
        "one": np.array("é\0日"),
        "big endian": np.array("hié", ">U5"),
        "padded": np.array("x", "<U9"),
        "empty": np.array(""),
        "bytes": np.array(b"ab\0c", "|S9"),
        "utf-8": np.array("é".encode()),
    },
    "big": {"x": np.arange(100_000), "y": np.zeros((64, 64), ">f4", order="F")},
}  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("odd")
    for key, arrays in ODD.items():
        write_sample(root / "source", key, arrays)
    run_pack(root / "source", root / "store")
    return root


def test_every_sample_comes_back(packed: Path) -> None:
    """`read_version` decodes with our decoder and with one that shares no code with it."""
    assert read_version(packed / "store", "v1") == {k: content(a) for k, a in ODD.items()}
    check_nothing_left(packed / "store")


def test_numpy_agrees_about_the_source(packed: Path) -> None:
    found = read_version(packed / "store", "v1")
    for key in ODD:
        with np.load(packed / "source" / f"{key}.npz") as loaded:
            assert content(dict(loaded)) == found[key]


def test_text_arrays_can_be_made_again_from_the_manifest(packed: Path) -> None:
    texts = read_version(packed / "store", "v1")["texts"].texts
    assert [text.name for text in texts] == sorted(ODD["texts"])
    for text in texts:
        value = text.value.encode() if "S" in text.descr else text.value
        again, original = np.array(value, text.descr), ODD["texts"][text.name]
        assert (again.dtype.str, again.tobytes()) == (original.dtype.str, original.tobytes())


def test_plain_tools_agree_with_the_manifest(packed: Path, tmp_path: Path) -> None:
    """tar finds each payload, `zstd -dc` decodes it, and its SHA-256 is the manifest's."""
    store = Store.open(str(packed / "store"))
    for part in partitions(packed / "store", "v1").values():
        rows = manifest.decode(store.objects.read(part.manifest)).rows()
        for number, ref in enumerate(part.shards):
            subprocess.run(["tar", "-xf", store.objects.path(ref.digest)], cwd=tmp_path, check=True)
            with tarfile.open(store.objects.path(ref.digest)) as tar:
                names = tar.getnames()
            mine = [row for row in rows if row.shard == number]
            assert [key_of(name) for name in names] == [row.key for row in mine]
            for name, row in zip(names, mine, strict=True):
                member = zstandard.ZstdDecompressor().decompress((tmp_path / name).read_bytes())
                assert len(member) == row.raw_size
                assert sorted(read_tensors(member)) == sorted(sample.decode(member))


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.data())
@settings(max_examples=50)
def test_any_bytes_survive(dtype: str, shape: list[int], data: st.DataObject) -> None:
    """From the bytes of an .npz, through the reader and the member, to equal bytes."""
    size = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
    raw = data.draw(st.binary(min_size=size, max_size=size))
    array = np.ndarray(tuple(shape), dtype, bytearray(raw), order=data.draw(st.sampled_from("CF")))
    file = io.BytesIO()
    np.savez(file, x=array)
    found = read_npz(file, 1 << 20)
    assert bytes(found.member) == sample.encode({"x": array})
    assert content(found.tensors) == content({"x": array})


def test_shards_are_cut_by_raw_bytes(tmp_path: Path) -> None:
    """Never by what a compressor makes of them; a sample too big for any shard has its own."""
    source = tmp_path / "source"
    for i in range(10):
        write_sample(source, f"p/{i}", {"x": np.zeros(1000 if i else 9000, "|u1")})
    raw = len(sample.encode({"x": np.zeros(1000, "|u1")}))
    run_pack(source, tmp_path / "store", shard_bytes=3 * raw)
    part = partitions(tmp_path / "store", "v1")["p"]
    assert len(read_version(tmp_path / "store", "v1")) == part.samples == 10
    rows = manifest.decode(Store.open(str(tmp_path / "store")).objects.read(part.manifest)).rows()
    sizes = [[row.raw_size for row in rows if row.shard == n] for n in range(len(part.shards))]
    assert all(sum(sizes_here) <= 3 * raw or len(sizes_here) == 1 for sizes_here in sizes)
    assert list(map(len, sizes)) == cut(
        [(member_hash(r.key, 0), r.raw_size) for r in rows], 3 * raw
    )


@pytest.mark.parametrize("how", ["payload", "member", "foreign", "extra"])
def test_a_shard_that_does_not_read_back_is_not_published(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong between encoding and the disk is seen before anything is published."""
    write_numbered(tmp_path / "source", {f"p/{i}": i for i in range(3)})
    compress, header = sample.compress, shards.shard.member_header
    damage = {
        "payload": ("compress", lambda m, level: compress(m, level)[:-1] + b"\0"),
        "member": ("compress", lambda m, level: compress(bytes(m[:-1]) + b"\0", level)),
        "foreign": ("member_header", lambda name, size: header(f"x{name}", size)),
        "extra": ("member_header", lambda name, size: header("x", 0) + header(name, size)),
    }
    name, function = damage[how]
    monkeypatch.setattr(sample if name == "compress" else shards.shard, name, function)
    with pytest.raises(IntegrityError):
        run_pack(tmp_path / "source", tmp_path / "store")
    monkeypatch.undo()
    assert Store.open(str(tmp_path / "store")).versions() == ()
    check_nothing_left(tmp_path / "store")
    assert run_pack(tmp_path / "source", tmp_path / "store").samples_read == 3


def big(field: Any) -> np.dtype[Any]:
    return np.dtype(field.dtype.newbyteorder(">"))


def test_an_encoding_that_changes_an_array_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the writer of members does wrong, in names, shapes, dtypes or bytes."""
    real, portable = sample.schema_of, npz._make_portable
    write_numbered(tmp_path / "source", {"p/1": 1})

    def wrong_bytes(data: memoryview, field: Any) -> None:
        portable(data, field)
        data[-1] ^= 1

    changes: list[tuple[Any, str, Any]] = [
        (sample, "schema_of", lambda fs: real(tuple(replace(f, dtype=big(f)) for f in fs))),
        (sample, "schema_of", lambda fs: real(tuple(replace(f, shape=(*f.shape, 1)) for f in fs))),
        (sample, "schema_of", lambda fs: real(fs[:1])),
        (npz, "_make_portable", wrong_bytes),
    ]
    for module, name, change in changes:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, change)
            with pytest.raises(IntegrityError, match=r"p/1\.npz"):
                run_pack(tmp_path / "source", tmp_path / "store")
    assert Store.open(str(tmp_path / "store")).versions() == ()
