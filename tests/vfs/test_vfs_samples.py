"""`samples/`: each sample as plain files."""

from __future__ import annotations

import io
import json
import os
import zipfile
from contextlib import closing

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from lists import list_of, sample_of
from looking import Show, find, read, walk
from numpy.typing import NDArray

from fsmount.errors import FormatError, FsmountError, IntegrityError
from fsmount.formats import sample as samples
from fsmount.formats.manifest import Text
from fsmount.model import DepthRule, Partition, RegexRule, Version
from fsmount.store import Store
from fsmount.testing import tiny
from fsmount.testing.tiny import Sample
from fsmount.vfs import unpack
from fsmount.vfs.filesystem import Kind
from fsmount.vfs.memory_file import MemoryFile
from fsmount.vfs.sample_list import SampleList

ARRAYS: dict[str, NDArray[np.generic]] = {
    "big-endian": np.arange(6, dtype=">i4").reshape(2, 3),
    "complex": np.array([1 + 2j, complex("nan")]),
    "empty": np.zeros((0, 3), np.float16),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "scalar": np.array(-0.0),
    "time": np.array(["2024-01-02"], "M8[D]"),
    "ünïcode": np.array([True, False]),
}
TEXTS = (Text("bytes", "|S5", "abc"), Text("text", "<U12", "hällo"))


def same(one: NDArray[np.generic], other: NDArray[np.generic]) -> bool:
    layout = one.flags.f_contiguous == other.flags.f_contiguous
    return (one.dtype, one.shape, one.tobytes()) == (
        other.dtype,
        other.shape,
        other.tobytes(),
    ) and layout


def paths(version: Version, show: Show) -> set[str]:
    """What is listed below `samples/`."""
    found = walk(show(version, list_samples=True))
    return {
        p.removeprefix("samples/")
        for p, e in found
        if p.startswith("samples/") and e.kind is Kind.FILE
    }


def test_the_three_forms_of_a_sample(store: Store, show: Show) -> None:
    sidecar = b'{"b": 1,\r\n "a": "\\u00e9"}  '
    one = Sample("d/one", ARRAYS, TEXTS, sidecar)
    version = tiny.publish(store, "v1", {"d": [one, Sample("d/bare", {"x": np.array(1)})]})
    tree = show(version)
    assert read(tree, "samples/d/one.json") == sidecar
    assert read(tree, "samples/d/one.safetensors") == samples.encode(ARRAYS)
    with np.load(io.BytesIO(read(tree, "samples/d/one.npz"))) as found:
        assert found.files == sorted([*ARRAYS, "bytes", "text"])
        assert all(same(found[name], array) for name, array in ARRAYS.items())
        assert found["text"].dtype == np.dtype("<U12")
        assert found["text"] == "hällo"
        assert found["bytes"] == b"abc"
    assert read(tree, "samples/d/one.npz") == read(show(version), "samples/d/one.npz")
    with pytest.raises(FileNotFoundError):
        find(tree, "samples/d/bare.json")


def test_they_are_listed_only_when_asked_but_always_found(version: Version, show: Show) -> None:
    assert not any(path.startswith("samples") for path, _ in walk(show(version)))
    listed = paths(version, show)
    assert listed == {
        "root_/top.one.json", "root_/top.one.npz", "root_/top.one.safetensors",
        "a/x.json", "a/x.npz", "a/x.safetensors",
        *(f"a/b/{n}{suffix}" for n in range(7) for suffix in (".npz", ".safetensors")),
        *(f"a/b/{n}.json" for n in range(0, 7, 2)),
        "new\nline/y.npz", "new\nline/y.safetensors",
    }  # fmt: skip
    tree = show(version)
    for path in listed:
        read(tree, f"samples/{path}")
    for name in ("top.npz", "top.one", ".npz", "top.one.tar", "top.one.npz.npz", "a"):
        with pytest.raises(FileNotFoundError):
            find(tree, f"samples/root_/{name}")


def test_the_rest_of_a_key_may_have_directories(store: Store, show: Show) -> None:
    keys = ["s/1/u/x", "s/1/u/y", "s/1/z", "s/2/u/x", "q"]
    content = {
        "s": [Sample(key, {"a": np.array(1)}) for key in keys[:4]],
        "root_": [Sample("q", {"a": np.array(1)})],
    }
    version = tiny.publish(store, "v1", content, rule=DepthRule(1))
    assert paths(version, show) == {
        f"{key if key != 'q' else 'root_/q'}{suffix}"
        for key in keys
        for suffix in (".npz", ".safetensors")
    }


def test_a_key_outside_of_its_partition_is_shown_whole(store: Store, show: Show) -> None:
    content = {
        "p": [Sample("x/p-1", {"a": np.array(1)}), Sample("p/2", {"a": np.array(1)})],
        "p/q": [Sample("p/q/3", {"a": np.array(1)}), Sample("y", {"a": np.array(1)})],
    }
    version = tiny.publish(store, "v1", content, rule=RegexRule("(.)"))
    stems = ("p/x/p-1", "p/2", "p/q/3", "p/q/y")
    assert paths(version, show) == {
        f"{stem}{s}" for stem in stems for s in (".npz", ".safetensors")
    }


def test_two_samples_that_want_one_path_are_an_error_there(store: Store, show: Show) -> None:
    content = {
        "p": [Sample(key, {"a": np.array(1)}) for key in ("p/x", "x", "p/q/x", "z")],
        "p/q": [Sample("p/q/x", {"a": np.array(1)})],
    }
    tree = show(tiny.publish(store, "v1", content, rule=RegexRule("(.)")))
    with pytest.raises(FsmountError, match=r"is wanted by .* and ") as caught:
        find(tree, "samples/p/x.npz")
    assert "'p/x'" in str(caught.value)
    with pytest.raises(FsmountError, match=r"samples/p/q/x.safetensors: is wanted by"):
        find(tree, "samples/p/q/x.safetensors")
    read(tree, "samples/p/z.npz")


def test_a_directory_hides_a_file_of_its_name(store: Store, show: Show) -> None:
    content = {"p": [Sample(key, {"a": np.array(1)}) for key in ("p/x", "p/x.npz/y")]}
    version = tiny.publish(store, "v1", content, rule=DepthRule(1))
    assert paths(version, show) == {"p/x.safetensors", "p/x.npz/y.npz", "p/x.npz/y.safetensors"}
    read(show(version), "samples/p/x.npz/y.npz")


def test_a_damaged_payload_is_an_error_on_its_sample_alone(
    store: Store, version: Version, show: Show
) -> None:
    tree = show(version)
    partition = next(p for p in version.partitions if p.id == "a/b")
    path = store.objects.path(partition.shards[0].digest)
    os.chmod(path, 0o644)
    with open(path, "r+b") as file:
        file.seek(700)  # in the first payload
        byte = file.read(1)
        file.seek(700)
        file.write(bytes([byte[0] ^ 1]))
    outcomes = {}
    for n in range(7):
        try:
            read(tree, f"samples/a/b/{n}.npz")
        except IntegrityError as error:
            outcomes[n] = str(error)
    [[n, message]] = outcomes.items()
    assert message.startswith(
        f"samples: sample 'a/b/{n}' in shards/a/b/000000.tar at byte 512: object "
    )
    assert "wrong checksum" in message


def test_a_damaged_manifest_is_an_error_on_its_partition_alone(
    store: Store, version: Version, show: Show
) -> None:
    partition = next(p for p in version.partitions if p.id == "a/b")
    path = store.objects.path(partition.manifest.digest)
    os.chmod(path, 0o644)
    with open(path, "r+b") as file:
        file.write(b"x")
    tree = show(version)
    with pytest.raises(IntegrityError, match=r"manifests/a/b.parquet: object .* is damaged"):
        find(tree, "samples/a/b/1.npz")
    read(tree, "samples/a/x.npz")


def test_a_manifest_of_another_partition_is_refused(
    store: Store, version: Version, show: Show
) -> None:
    by_id = {p.id: p for p in version.partitions}
    swapped = tuple(
        Partition(
            p.id, p.data_revision, p.metadata_revision, p.samples, p.raw_bytes,
            by_id["a"].manifest if p.id == "root_" else p.manifest, p.shards, "",
        )
        for p in version.partitions
    )  # fmt: skip
    with pytest.raises(FormatError, match=r"manifests/root_.parquet: .*belongs to 'a'"):
        find(show(Version(version.document, swapped)), "samples/root_/x.npz")


dtypes = st.sampled_from([np.dtype(c) for c in ("?", "<i2", ">f4", "<f8", "<c16", "M8[us]")])
arrays = st.builds(
    np.zeros, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4), dtypes
)
array_names = st.text(
    st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=9
)


@given(st.dictionaries(array_names.map("a".__add__), arrays, max_size=4), st.booleans())
def test_the_size_of_an_npz_is_known_before_it_is_built(
    found: dict[str, NDArray[np.generic]], fortran: bool
) -> None:
    content = {n: np.asfortranarray(a) if fortran else a for n, a in found.items()}
    built, found = npz_of(content)
    assert built == as_zipfile_writes_it(content)
    assert len(built) == found.npz_size(0)
    with np.load(io.BytesIO(built)) as loaded:
        assert all(same(loaded[name], array) for name, array in content.items())


def as_zipfile_writes_it(arrays: dict[str, NDArray[np.generic]]) -> bytes:
    """The npz of `arrays` and TEXTS, by the standard library and numpy."""
    texts = {"bytes": np.array(b"abc", "S5"), "text": np.array("hällo", "<U12")}
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        for name, array in sorted({**arrays, **texts}.items()):
            info = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            with archive.open(info, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, (1, 0), allow_pickle=False)
    return sink.getvalue()


def npz_of(arrays: dict[str, NDArray[np.generic]]) -> tuple[bytes, SampleList]:
    """The npz that is shown of a sample of `arrays` and TEXTS, and the list it stands in."""
    texts = {text.name: text.descr for text in TEXTS}
    shard, found = sample_of(
        samples.encode(arrays),
        __text__=pa.array([json.dumps(texts)]),
        **{text.name: pa.array([text.value]) for text in TEXTS},
    )
    with closing(shard):
        built = MemoryFile(unpack.archive(shard, found, 0))
    return built.read(built.size, 0), found


key_parts = st.text("ab\x01é.", min_size=1, max_size=2).filter(lambda p: p not in (".", ".."))
keys_in = st.lists(
    st.lists(key_parts, min_size=1, max_size=4).map("/".join), min_size=1, unique=True
)


@given(keys_in, st.sampled_from(["a", "a/b", "zz"]))
def test_an_index_holds_what_a_dictionary_holds(keys: list[str], partition: str) -> None:
    index = list_of(keys, partition)
    rests = [key.removeprefix(f"{partition}/") for key in keys]
    directories = {""} | {r[:at] for r in rests for at, char in enumerate(r) if char == "/"}
    for row, rest in enumerate(rests):
        assert index.rest(row) == rest
        assert sorted(index.find(rest)) == [n for n, other in enumerate(rests) if other == rest]
        assert index.sidecar_size(row) == (row if row % 3 == 0 else None)
    for directory in directories:
        prefix = f"{directory}/" if directory else ""
        inside = [r.removeprefix(prefix) for r in rests if r.startswith(prefix)]
        children = list(index.children(directory))
        assert {n for n, row in children if row is None} == {
            i.partition("/")[0] for i in inside if "/" in i
        }
        assert sorted(n for n, row in children if row is not None) == sorted(
            i for i in inside if "/" not in i
        )
        first = index.first_below(directory)
        assert first is not None
        assert rests[first].startswith(prefix)
    assert index.first_below("none") is None
    assert index.find("none") == []
