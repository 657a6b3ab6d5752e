"""Archives that are larger than they look: bounded before memory or time is spent on them."""

from __future__ import annotations

import io
import os
import struct
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from npz_tree import Content, content, npy, read_version, run_pack, write_sample, write_zip

from fsmount.errors import SidecarError, SourceError
from fsmount.pack.npz import read_npz

MIB = 1 << 20
METHODS = [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]


def bomb(method: int, size: int) -> bytes:
    """An archive of one array of `size` zero bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method, compresslevel=1) as archive:
        archive.writestr("x.npy", npy("'|u1'", (size,), bytes(size)))
    return file.getvalue()


def lying(data: bytes, size: int) -> bytes:
    """The archive whose directory says that its member has `size` bytes."""
    at = data.rindex(b"PK\1\2") + 24
    return data[:at] + struct.pack("<I", size) + data[at + 4 :]


def peak_of(data: bytes, limit: int) -> tuple[str, int]:
    """The error of reading `data`, and the most memory that it took."""
    tracemalloc.start()
    try:
        with pytest.raises(SourceError) as caught:
            read_npz(io.BytesIO(data), limit)
        return str(caught.value), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("method", METHODS)
def test_what_inflates_beyond_the_bound_is_not_inflated(method: int) -> None:
    data = bomb(method, 32 * MIB)
    assert len(data) < 256 * 1024
    text, peak = peak_of(data, 16 * MIB)
    assert "33,554,560 bytes, more than the 16,777,216" in text
    assert "--max-sample-size" in text
    assert peak < MIB


@pytest.mark.parametrize("method", METHODS)
def test_what_inflates_to_more_than_the_archive_says_is_bounded_all_the_same(method: int) -> None:
    """The npy header agrees with the directory; the gigabytes come after."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method, compresslevel=1) as archive:
        archive.writestr("x.npy", npy("'|u1'", (72,), bytes(32 * MIB)))
    text, peak = peak_of(lying(file.getvalue(), 200), 16 * MIB)
    assert "the archive says 200 bytes, but" in text
    assert peak < 8 * MIB


def test_a_directory_of_gigabytes_is_not_read() -> None:
    data = bytearray(bomb(zipfile.ZIP_DEFLATED, 100))
    at = data.rindex(b"PK\5\6")
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, 20 * MIB, 0, 0)
    padded = bytes(20 * MIB) + data[:at] + end
    text, peak = peak_of(padded, 1 << 30)
    assert "a directory of 20971520 bytes" in text
    assert peak < 8 * MIB


def test_a_dictionary_of_gigabytes_is_not_made() -> None:
    """LZMA's properties in front of the data ask for four of them."""
    data = bytearray(bomb(zipfile.ZIP_LZMA, 1000))
    at = data.index(b"x.npy") + 5 + 4 + 1
    data[at : at + 4] = b"\xff\xff\xff\xff"
    tracemalloc.start()
    found = read_npz(io.BytesIO(data), MIB).tensors["x"]
    assert found.tobytes() == bytes(1000)
    assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    tracemalloc.stop()


def test_a_sparse_giant_is_refused_unread(tmp_path: Path) -> None:
    write_sample(tmp_path / "source", "good", {"x": np.zeros(3)})
    for name, kind in (("big.npz", SourceError), ("good.json", SidecarError)):
        path = tmp_path / "source" / name
        with path.open("wb") as file:
            file.truncate(50 << 30)
        with pytest.raises(kind, match=rf"{path}: the file has 53,687,091,200 bytes"):
            run_pack(tmp_path / "source", tmp_path / "store")
        path.unlink()


def test_the_bound_counts_all_arrays_of_a_sample(tmp_path: Path) -> None:
    arrays = {f"a{i}": np.zeros(1000, "u1") for i in range(3)}
    expected = {"s": write_sample(tmp_path / "source", "s", arrays)}
    with pytest.raises(SourceError, match="3,384 bytes, more than the 3,383 that"):
        run_pack(tmp_path / "source", tmp_path / "store", max_sample_bytes=3383)
    run_pack(tmp_path / "source", tmp_path / "store", max_sample_bytes=3384)
    assert read_version(tmp_path / "store", "v1") == expected


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_larger_than_a_piece_come_back(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inflated piece by piece to their place, whatever their byte and memory order."""
    monkeypatch.setattr("fsmount.pack.unzip.PIECE", 1000)
    monkeypatch.setattr("fsmount.pack.source._WHOLE", 0)
    rng = np.random.default_rng(0)
    arrays = {
        name: np.asarray(rng.integers(0, 255, (30, 40, 3)).astype(dtype), order=order)  # type: ignore[call-overload]
        for name, dtype in (("a", ">c16"), ("b", "<f4"), ("c", ">i2"), ("d", "|u1"))
    }
    expected: dict[str, Content] = {"plain": write_sample(tmp_path / "source", "plain", arrays)}
    for method in METHODS:
        members = []
        for name, array in arrays.items():
            file = io.BytesIO()
            np.save(file, array)
            members.append((f"{name}.npy", file.getvalue()))
        write_zip(tmp_path / "source" / f"m{method}.npz", members, method)
        expected[f"m{method}"] = content(arrays)
    run_pack(tmp_path / "source", tmp_path / "store")
    assert read_version(tmp_path / "store", "v1") == expected


def test_memory_is_near_one_copy_of_the_sample(tmp_path: Path) -> None:
    """Of the largest process of a pack, against one that packs a small sample."""
    size = 192 * MIB
    peaks = []
    for name, length in (("small", 1000), ("large", size)):
        (tmp_path / name).mkdir()
        with zipfile.ZipFile(
            tmp_path / name / "x.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1
        ) as archive:
            header = npy("'|u1'", (length,))
            with archive.open("x.npy", "w") as member:
                member.write(header)
                for _ in range(length // 1000):
                    member.write(bytes(1000))
                member.write(bytes(length % 1000))
        command = [
            *(sys.executable, "-m", "fsmount_cli.main", "pack", "--quiet", "--workers", "1"),
            *(str(tmp_path / name), str(tmp_path / f"{name}-store"), "--tag", "v1"),
        ]
        child = os.posix_spawn(sys.executable, command, os.environ)
        _, status, used = os.wait4(child, 0)
        assert status == 0
        peaks.append(used.ru_maxrss * 1024)
    assert peaks[1] - peaks[0] < 1.25 * size


NESTED = {
    "parentheses": "(" * 4000 + ")" * 4000,
    "lists": "[" * 4000 + "]" * 4000,
    "signs": "-" * 9000 + "1",
    "a structure": "[" + ", ".join(f"('field{i}', '<f4')" for i in range(400)) + "]",
}


@pytest.mark.parametrize("name", NESTED)
def test_headers_nested_deep_are_errors_that_can_be_read(name: str, tmp_path: Path) -> None:
    write_zip(tmp_path / "x.npz", [("a.npy", npy(NESTED[name], (2,), bytes(8)))])
    with pytest.raises(SourceError, match=r"x\.npz: array 'a': ") as caught:
        run_pack(tmp_path, tmp_path / "store")
    assert len(str(caught.value)) < len(str(tmp_path)) + 500


def long_header() -> bytes:
    descr = "[" + ", ".join(f"('f{i}', '<f4')" for i in range(3500)) + "]"
    return npy(descr, (1,), bytes(4))


REFUSED = {
    "a header of 60,000 bytes": ("a", long_header(), r"an npy header of \d{5} bytes.*each of its"),
    "bfloat16": ("a", npy("'<V2'", (3,), bytes(6)), r"bare bytes.*bfloat16.*view\(numpy.uint8\)"),
    "float8": ("a", npy("'|V1'", (3,), bytes(3)), r"bare bytes.*float8.*view\(numpy.uint8\)"),
    "a name of 300 bytes": ("n" * 300, npy("'<f4'", (), bytes(4)), "over 255 bytes.*rename"),
    "a text of 20 MiB": ("a", npy("'|S20971520'", (), b"x" * 20971520), "0-d text of up to 16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_packed_says_what_to_do(name: str, tmp_path: Path) -> None:
    array, data, message = REFUSED[name]
    write_zip(tmp_path / "x.npz", [(f"{array}.npy", data)])
    with pytest.raises(SourceError, match=rf"x\.npz: array .*{message}") as caught:
        run_pack(tmp_path, tmp_path / "store")
    assert "pickle" not in str(caught.value)
    assert "1_0" not in str(caught.value)


def test_an_npy_of_version_3_is_read_as_numpy_reads_it(tmp_path: Path) -> None:
    file = io.BytesIO()
    array = np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3))
    np.lib.format.write_array(file, array, version=(3, 0))
    assert file.getvalue()[6:8] == b"\3\0"
    write_zip(tmp_path / "source" / "x.npz", [("a.npy", file.getvalue())])
    run_pack(tmp_path / "source", tmp_path / "store")
    assert read_version(tmp_path / "store", "v1") == {"x": content({"a": array})}
