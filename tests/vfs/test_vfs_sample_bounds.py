"""What a hostile manifest says of a sample, and how much memory samples take together."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np
import pyarrow as pa
import pytest
from lists import list_of, sample_of
from looking import find, read

from fsmount.errors import FormatError, IntegrityError, LoadError
from fsmount.formats import sample as samples
from fsmount.model import Partition, Version, VersionDocument
from fsmount.store import Store
from fsmount.testing import tiny
from fsmount.vfs import npz, sample_data, unpack
from fsmount.vfs.decoding import Decoding
from fsmount.vfs.filesystem import Owner
from fsmount.vfs.form import Form
from fsmount.vfs.memory_file import MemoryFile
from fsmount.vfs.parted import Look
from fsmount.vfs.reads import ObjectHandle, ObjectReader
from fsmount.vfs.sample_data import SampleData
from fsmount.vfs.sample_list import SampleList
from fsmount.vfs.version import VersionTree

SIZE = 1 << 20  # bytes of a sample's array
BUDGET = 5 * SIZE // 2


class Counting:
    """A Decoder that notes what it decoded."""

    def __init__(self) -> None:
        self._real = Decoding()
        self.made: list[tuple[int, Form]] = []

    def partitions(self, store: str, document: VersionDocument) -> tuple[Partition, ...]:
        return self._real.partitions(store, document)

    def samples(self, manifest: ObjectHandle, partition: Partition) -> SampleList:
        return self._real.samples(manifest, partition)

    def unpack(self, shard: ObjectHandle, found: SampleList, row: int, form: Form) -> MemoryFile:
        self.made.append((row, form))
        return self._real.unpack(shard, found, row, form)


def tree_of(
    store: Store, version: Version, decoder: Counting, file_bytes: int = BUDGET
) -> VersionTree:
    reader = ObjectReader(store.objects)
    data = SampleData(decoder, reader, file_bytes=file_bytes)
    return VersionTree(
        version,
        store.keysets_of(version.document.table.digest),
        reader,
        Look(Owner(1, 2)),
        samples=data,
    )


@pytest.fixture
def five(store: Store) -> Version:
    noise = np.random.default_rng(1)
    content = [
        tiny.Sample(f"d/{n}", {"x": noise.integers(0, 256, SIZE, np.uint8)}) for n in range(5)
    ]
    return tiny.publish(store, "v1", {"d": content})


def memory_files() -> int:
    """Bytes of memory files that this process has open."""
    sizes = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:fsmount"):
                found = os.stat(f"/proc/self/fd/{fd}")
                sizes[found.st_ino] = found.st_size
        except FileNotFoundError:
            continue
    return sum(sizes.values())


def test_all_open_files_of_one_sample_have_one_copy(store: Store, five: Version) -> None:
    decoder = Counting()
    tree = tree_of(store, five, decoder)
    node = find(tree, "samples/d/2.safetensors")
    before = memory_files()
    handles = [tree.open(node) for _ in range(60)]
    expected = handles[0].read(2 * SIZE, 0)
    assert all(handle.read(2 * SIZE, 0) == expected for handle in handles)
    assert len(decoder.made) == 1
    assert memory_files() - before < 2 * SIZE


def test_open_files_take_no_more_memory_than_closed_ones(store: Store, five: Version) -> None:
    expected = {n: read(tree_of(store, five, Counting()), f"samples/d/{n}.npz") for n in range(5)}
    tree = tree_of(store, five, Counting())
    before = memory_files()
    handles = {n: tree.open(find(tree, f"samples/d/{n}.npz")) for n in range(5)}
    for offset in range(0, SIZE, SIZE // 4):
        for n, handle in handles.items():
            assert handle.read(1000, offset) == expected[n][offset:][:1000]
            assert memory_files() - before < BUDGET + SIZE // 2


def test_one_that_was_decoded_once_is_opened_without_decoding(store: Store, five: Version) -> None:
    decoder = Counting()
    tree = tree_of(store, five, decoder, file_bytes=1)
    nodes = [find(tree, f"samples/d/{n}.safetensors") for n in range(5)]
    for node in (*nodes, *nodes):
        assert tree.ready(node) is (len(decoder.made) == 5)
        tree.open(node)
    assert len(decoder.made) == 5


def test_a_sample_over_the_bound_is_refused_before_it_is_decoded(
    store: Store, five: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_data, "LARGEST", SIZE)
    decoder = Counting()
    tree = tree_of(store, five, decoder)
    for form in ("safetensors", "npz"):
        node = find(tree, f"samples/d/1.{form}")
        with pytest.raises(LoadError, match=r"sample 'd/1' in shards/d/.*from their shards only"):
            tree.open(node)
    assert not decoder.made


def listed(descrs: Sequence[str | None], texts: Sequence[str | None]) -> SampleList:
    """A list of samples that have nothing but the text array `t`."""
    told = [None if descr is None else json.dumps({"t": descr}) for descr in descrs]
    keys = [f"p/{n}" for n in range(len(descrs))]
    raw_size = pa.array([len(samples.encode({}))] * len(descrs))
    return list_of(keys, "p", __text__=pa.array(told), __raw_size__=raw_size, t=pa.array(texts))


@pytest.mark.parametrize(
    "descr", ["|O", "<U400000000", "V64", "nonsense", "<U0", "<f4", "|S5, (9,)", "<U99999999999"]
)
def test_a_text_of_another_dtype_is_refused_by_name(descr: str) -> None:
    found = listed([descr, None, "<U3"], ["x", None, "x"])
    with pytest.raises(FormatError, match="text array 't'"):
        found.npz_size(0)
    assert found.npz_size(1) > 0
    assert found.npz_size(2) == found.npz_size(1) + len(npy_member("t", "<U3"))


def npy_member(name: str, descr: str) -> bytes:
    """As many bytes as a text array takes in an npz."""
    name_bytes = 2 * len(f"{name}.npy")
    return bytes(30 + 20 + 46 + name_bytes + 128 + np.dtype(descr).itemsize)


@pytest.mark.parametrize(("descr", "text"), [("<U2", "xyz"), ("|S2", "é!"), ("|S1", "\0x")])
def test_a_text_that_its_dtype_cannot_hold_is_refused(descr: str, text: str) -> None:
    found = listed([descr], [text])
    [(name, told, value)] = found.texts(0)
    with pytest.raises(FormatError, match=r"text array 't': a text that .* can't hold"):
        npz.text_bytes(name, told, value)


def test_a_text_that_is_not_there_is_an_error_of_its_sample() -> None:
    found = listed(["<U3", "<U3"], [None, "x"])
    with pytest.raises(FormatError, match="text array 't': '<U3' is no dtype of its text"):
        found.npz_size(0)
    assert found.npz_size(1) > 0


def test_a_size_that_lies_is_an_error_of_its_sample() -> None:
    arrays = {"x": np.arange(4)}
    header = samples.read_schema(samples.encode(arrays)).header
    size = len(samples.encode(arrays))
    found = list_of(
        ["p/a", "p/b"], "p", (header,), __raw_size__=pa.array([size, size + 1], pa.int64())
    )
    assert found.npz_size(0) > 0
    with pytest.raises(FormatError, match="size is not the one that its schema has"):
        found.npz_size(1)


@pytest.mark.parametrize("make", [unpack.member, unpack.archive])
def test_a_header_other_than_the_manifest_says_is_refused(
    make: Callable[[ObjectHandle, SampleList, int], int],
) -> None:
    lying = samples.read_schema(samples.encode({"x": np.arange(4, dtype="<i4")})).header
    shard, found = sample_of(samples.encode({"x": np.arange(4, dtype="<f4")}), lying)
    with closing(shard), pytest.raises(IntegrityError, match="header is not the one in the"):
        make(shard, found, 0)


@pytest.mark.parametrize("size", [100, 9 << 20])
def test_large_members_are_decoded_in_pieces_to_the_same_bytes(size: int) -> None:
    noise = np.random.default_rng(1).integers(0, 9, size, np.uint8)
    member = samples.encode({"x": noise, "y": noise[:99].reshape(9, 11).T, "z": np.ones(3, ">i8")})
    shard, found = sample_of(member)
    with closing(shard):
        made = MemoryFile(unpack.member(shard, found, 0))
        assert made.read(made.size, 0) == member
        archive = MemoryFile(unpack.archive(shard, found, 0))
    assert archive.size == found.npz_size(0)
    with np.load(io.BytesIO(archive.read(archive.size, 0))) as loaded:
        assert np.array_equal(loaded["x"], noise)
        assert np.array_equal(loaded["y"], noise[:99].reshape(9, 11).T)
        assert loaded["y"].flags.f_contiguous
        assert loaded["z"].dtype == np.dtype(">i8")


@pytest.mark.parametrize("size", [100, 9 << 20])
def test_a_payload_that_is_no_whole_frame_is_refused(size: int) -> None:
    member = samples.encode({"x": np.random.default_rng(1).integers(0, 9, size, np.uint8)})
    payload = samples.compress(member, 1)
    for wrong in (payload[:-5], payload + b"x", payload[: len(payload) // 2]):
        shard, found = sample_of(member, payload=wrong)
        with closing(shard), pytest.raises(IntegrityError):
            unpack.member(shard, found, 0)
    shard, found = sample_of(member, payload=samples.compress(member + b"x", 1))
    with closing(shard), pytest.raises(IntegrityError, match="does not hold"):
        unpack.member(shard, found, 0)
