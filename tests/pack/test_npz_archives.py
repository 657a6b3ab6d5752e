"""Archives nobody vouches for: never unpickled, never half believed, errors that name the array."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from npz_tree import check_nothing_published, npy, numbered, run_pack, write_numbered, write_zip

from fsmount.errors import SourceError
from fsmount.pack import npz
from fsmount.pack.npz import Arrays

F4 = "'<f4'"
GOOD = npy(F4, (2,), bytes(8))
LIMIT = 1 << 31


def read_npz(data: bytes, limit: int = LIMIT) -> Arrays:
    return npz.read_npz(io.BytesIO(data), limit)


def archive(*members: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as zipped:
        for name, data in members:
            zipped.writestr(zipfile.ZipInfo(name), data, compression)
    return file.getvalue()


def one(data: bytes) -> bytes:
    return archive(("good.npy", GOOD), ("bad.npy", data))


def twice() -> bytes:
    """Two members of one name, which `zipfile` itself only warns of."""
    data = archive(("bad.npy", GOOD), ("dab.npy", GOOD))
    return data.replace(b"dab.npy", b"bad.npy")


def patched(offset: int, value: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """The archive with `value` in the directory entry of `bad.npy`, at `offset` from its start."""
    data = archive(("bad.npy", npy(F4, (4,), bytes(16))), compression=compression)
    at = data.rindex(b"PK\1\2") + offset
    return data[:at] + value + data[at + len(value) :]


class Evil:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, ("unpickled",)


def pickled() -> bytes:
    file = io.BytesIO()
    np.savez(file, good=np.zeros(2), bad=np.array([Evil()], object))
    return file.getvalue()


def objects_in_disguise() -> bytes:
    """An object array that claims to be numbers of the same size."""
    data = pickled()
    return data.replace(b"'|O'", b"'<i8'"[:4])


TOO_BIG = struct.pack("<I", 1 << 30)
HOSTILE = {
    "object": (pickled(), "an object array"),
    "structured": (one(npy("[('a', '<f4')]", (2,), bytes(8))), "dtype"),
    "nested objects": (one(npy("[('a', '|O')]", (1,), bytes(8))), "object array"),
    "subarray": (one(npy("('<f4', (2,))", (1,), bytes(8))), "can't|dtype|header"),
    "void": (one(npy("'|V8'", (1,), bytes(8))), "dtype"),
    "float128": (one(npy("'<f16'", (1,), bytes(16))), "dtype float128"),
    "complex256": (one(npy("'<c32'", (1,), bytes(32))), "dtype complex256"),
    "texts": (one(npy("'<U2'", (2,), bytes(16))), r"text array <U2 \(2,\)"),
    "bytes": (one(npy("'|S2'", (1,), bytes(2))), "text array"),
    "empty texts": (one(npy("'<U2'", (0,))), "text array"),
    "no text": (one(npy("'<U0'", ())), "text array"),
    "surrogate": (one(npy("'<U1'", (), b"\0\xd8\0\0")), "not Unicode"),
    "beyond unicode": (one(npy("'<U1'", (), b"\xff\xff\xff\x7f")), "not Unicode"),
    "latin": (one(npy("'|S1'", (), b"\xe9")), "not Unicode"),
    "shape too big": (one(npy(F4, (3,), bytes(8))), "8 bytes follow"),
    "shape too small": (one(npy(F4, (1,), bytes(8))), "8 bytes follow"),
    "shape huge": (one(npy(F4, (1 << 62,), bytes(8))), "8 bytes follow"),
    "shape huge and empty": (one(npy(F4, (0, 1 << 70))), "0 bytes follow"),
    "shape overflows": (one(npy(F4, (0, 1 << 32, 1 << 32))), "0 bytes follow"),
    "too many dimensions": (one(npy(F4, (1,) * 65, bytes(4))), "4 bytes follow"),
    "shape negative": (one(npy(F4, (-2, -1), bytes(8))), "8 bytes follow"),
    "shape no tuple": (one(npy(F4, 2, bytes(8))), "header"),
    "shape a truth": (one(npy(F4, "(True,)", bytes(4))), "header"),
    "shape a float": (one(npy(F4, "(2.0,)", bytes(8))), "header"),
    "order no bool": (one(npy(F4, (2,), bytes(8), fortran=2)), "header"),
    "dtype unknown": (one(npy("'<q7'", (2,), bytes(8))), "header"),
    "dtype a call": (one(npy("__import__('os')", (2,), bytes(8))), "header"),
    "header open": (one(npy("'<f4", (2,), bytes(8))), "header"),
    "header with a tab": (one(npy("'<f4'\n\t", "(2,", bytes(8))), "header"),
    "header nested": (one(npy("(" * 900, (2,), bytes(8))), "header"),
    "header long": (one(npy(f"'<f4'{' ' * 20_000}", (2,), bytes(8))), "header"),
    "keys no text": (one(npy("'<f4', 1: 2", (2,), bytes(8))), "header"),
    "magic": (one(b"\x93NUMPX" + GOOD[6:]), "header"),
    "version": (one(b"\x93NUMPY\4\0" + GOOD[8:]), "header"),
    "header cut": (one(GOOD[:20]), "header"),
    "no bytes": (one(b""), "header"),
    "data cut": (one(GOOD[:-1]), "7 bytes follow"),
    "data long": (one(GOOD + b"\0"), "9 bytes follow"),
    "twice": (twice(), "in the archive twice"),
    "encrypted": (patched(8, b"\1\0"), "is encrypted"),
    "strongly encrypted": (patched(8, b"\x41\0"), "is encrypted"),
    "no npy": (archive(("good.npy", GOOD), ("bad", b"text")), "member 'bad' is not an array"),
    "no name": (archive((".npy", GOOD)), "member '.npy' is not an array"),
    "directory": (archive(("bad/", b"")), "member 'bad/' is not an array"),
    "name upwards": (archive(("../bad.npy", GOOD)), "'../bad' has a name that can't be"),
    "name absolute": (archive(("/bad.npy", GOOD)), "'/bad' has a name that can't be"),
    "reserved": (archive(("__metadata__.npy", GOOD)), "'__metadata__' has a reserved name"),
    "directory says more": (patched(24, TOO_BIG), "archive says 1073741824 bytes, but 144"),
    "directory says less": (patched(24, struct.pack("<I", 100)), "says 100 bytes, but 144"),
    "directory of a compressed member says more": (
        patched(24, TOO_BIG, zipfile.ZIP_DEFLATED),
        "but 1073741696 bytes follow",
    ),
    "stored says more": (patched(20, TOO_BIG), "archive says 144 bytes"),
    "checksum": (patched(16, b"\0\0\0\0"), "can't be read"),
    "method unknown": (patched(10, b"\x63\0"), "can't be read"),
    "method wrong": (patched(10, b"\x08\0"), "can't be read|header"),
    "place wrong": (patched(42, TOO_BIG), "can't be read"),
    "version of zip": (patched(6, b"\xff\0"), "not a readable"),
    "no zip": (b"text" * 100, "not a readable zip"),
    "empty": (b"", "not a readable zip"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archives_are_source_errors_that_name_the_array(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data, message = HOSTILE[name]
    with pytest.raises(SourceError, match=message) as caught:
        read_npz(data)
    text = str(caught.value)
    assert "\n" not in text
    assert "'bad'" in text or "not a readable" in message or message.split("'")[1] in text
    assert os.listdir(tmp_path) == []


def test_what_would_be_run_if_it_were_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above proves something: numpy, told to, runs the payload."""
    monkeypatch.chdir(tmp_path)
    with np.load(io.BytesIO(pickled()), allow_pickle=True) as loaded:
        assert loaded["bad"].shape == (1,)
    assert os.listdir(tmp_path) == ["unpickled"]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_cut_anywhere_is_refused(method: int) -> None:
    data = archive(("a.npy", GOOD), ("b.npy", npy(F4, (30,), bytes(120))), compression=method)
    assert set(read_npz(data).tensors) == {"a", "b"}
    for length in range(len(data)):
        with pytest.raises(SourceError):
            read_npz(data[:length])


def test_every_compression_of_zip_is_read() -> None:
    data = bytes(range(200)) * 2
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        packed = archive(("a.npy", npy(F4, (100,), data)), compression=method)
        assert read_npz(packed).tensors["a"].tobytes() == data


def edits(data: bytes) -> st.SearchStrategy[bytes]:
    place = st.integers(0, len(data) - 1)
    return st.lists(st.tuples(place, st.integers(0, 255)), min_size=1, max_size=3).map(
        lambda changes: bytes(dict(changes).get(i, byte) for i, byte in enumerate(data))
    )


MIXED = [
    archive(
        ("a.npy", GOOD),
        ("t.npy", npy("'<U2'", (), "hi".encode("utf-32-le"))),
        ("b.npy", npy("'>c16'", (2, 2), bytes(range(64)), fortran=True)),
        compression=method,
    )
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
]


@given(st.sampled_from(MIXED).flatmap(edits))
@settings(max_examples=500)
def test_damaged_archives_are_source_errors_or_arrays(data: bytes) -> None:
    try:
        found = read_npz(data)
    except SourceError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert len(found.tensors) + len(found.texts) <= 3


@given(st.binary(max_size=60), st.sampled_from([1, 2, 3]))
@settings(max_examples=300)
def test_any_npy_header_is_an_array_or_a_source_error(text: bytes, version: int) -> None:
    length = struct.pack("<H" if version == 1 else "<I", len(text) + 1)
    data = b"\x93NUMPY" + bytes([version, 0]) + length + text + b"\n"
    with pytest.raises(SourceError, match="array 'bad'"):
        read_npz(one(data))


def test_headers_of_python_2_are_read() -> None:
    found = read_npz(one(npy(F4, "(2L,)", bytes(8)))).tensors["bad"]
    assert found.shape == (2,)


def test_headers_of_version_2_are_read() -> None:
    data = npy(F4, (2,), bytes(8))
    (length,) = struct.unpack("<H", data[8:10])
    second = b"\x93NUMPY\2\0" + struct.pack("<I", length) + data[10:]
    assert read_npz(one(second)).tensors["bad"].shape == (2,)


@pytest.mark.parametrize("name", ["object", "structured", "encrypted", "twice", "shape too big"])
@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_is_published_of_a_tree_with_one_hostile_archive(
    name: str, workers: int, tmp_path: Path
) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    write_numbered(source, {f"{p}/{i}": i for p in "ab" for i in range(3)})
    bad = source / "b" / "1.npz"
    bad.write_bytes(HOSTILE[name][0])
    with pytest.raises(SourceError, match=HOSTILE[name][1]) as caught:
        run_pack(source, store, workers=workers)
    assert str(bad) in str(caught.value)
    assert "'bad'" in str(caught.value)
    check_nothing_published(store)
    write_numbered(source, {"b/1": 1})
    assert run_pack(source, store).document.totals.samples == 6


@pytest.mark.parametrize("compressed", [False, True])
def test_a_truncated_file_is_an_error_of_one_line(compressed: bool, tmp_path: Path) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    write = np.savez_compressed if compressed else np.savez
    source.mkdir()
    write(source / "x.npz", **numbered(1))
    whole = (source / "x.npz").read_bytes()
    (source / "x.npz").write_bytes(whole[:-10])
    command = [sys.executable, "-m", "fsmount_cli.main", "pack", str(source), str(store)]
    done = subprocess.run(
        [*command, "--tag", "v1", "--quiet"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {source}/x.npz: not a readable zip archive")
    check_nothing_published(store)


def test_write_zip_writes_what_numpy_reads(tmp_path: Path) -> None:
    """The archives above are hostile in what they say, not in how they are written."""
    write_zip(tmp_path / "x.npz", [("a.npy", GOOD)])
    with np.load(tmp_path / "x.npz") as loaded:
        assert loaded["a"].tolist() == [0, 0]
