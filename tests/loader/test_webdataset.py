"""The webdataset library's pipelines over our stream, and its own reader over the same shards."""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
from collections.abc import Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import torch
import webdataset as wds
from small_versions import Sample, build, damage, numbered
from test_dataset import ALL
from torch.utils.data import DataLoader

from fsmount.errors import IntegrityError, LoadError, PlanError
from fsmount.formats import sample as members
from fsmount_loader import ShardDataset, ShardLoader
from fsmount_loader.webdataset import ShardSamples, decoder, spread, tensor_decoder

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

MEMBER = "safetensors.zst"
ODD = {
    "big": np.arange(3, dtype=">i4"),
    "fortran": np.asfortranarray(np.arange(6, dtype="<f8").reshape(2, 3)),
    "both": np.asfortranarray(np.arange(6, dtype=">u2").reshape(3, 2)),
    "scalar": np.array(-0.0, np.float32),
    "nan": np.array([0x7FF4000000000001], np.uint64).view(np.float64),
    "empty": np.zeros((0, 4), np.float16),
    "complex": np.array([1 + 2j], np.complex128),
    "when": np.array(["2020-02-29", "NaT"], ">M8[D]"),
    "flags": np.array([True, False]),
}


def ranks(root: Path, count: int = 2, **options: Any) -> list[ShardSamples]:
    given: dict[str, Any] = {"batch_size": 3, "max_pad_fraction": 0.2, **options}
    return [ShardSamples(root, rank=rank, world_size=count, **given) for rank in range(count)]


def plain(root: Path, *filters: Any) -> list[Any]:
    """What the library reads by itself, through its filters."""
    shards = sorted(map(str, root.glob("shards/**/*.tar")))
    read = wds.WebDataset(shards, shardshuffle=False, empty_check=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves files to the collector
        found = list(read)
        del read
        gc.collect()
    return list(wds.DataPipeline(lambda: iter(found), *filters))


def number(arrays: Any) -> int:
    return int(arrays["x"][0])


def numbers(samples: Iterable[Any]) -> list[int]:
    """The samples by number, padding left out."""
    return [number(one[MEMBER]) for one in samples if one["__valid__"]]


def keys(samples: Iterable[Any]) -> list[str]:
    return [one["__key__"] for one in samples]


def is_valid(one: Any) -> bool:
    return bool(one["__valid__"])


def test_samples_are_what_the_library_reads_but_for_the_key(tmp_path: Path) -> None:
    partitions = {"p.q": ["a.b.c", "100%", "plain"], "__r__": ["UPPER.npz", "s/t"]}
    samples = {
        partition: [[Sample(name, {"x": np.arange(n)}, {"n": n} if n else None)]
                    for n, name in enumerate(names)]
        for partition, names in partitions.items()
    }  # fmt: skip
    root = build(tmp_path / "v", samples)
    ours = {one["__key__"]: one for one in ShardSamples(root, batch_size=1)}
    theirs = {unquote(one["__key__"]): one for one in plain(root)}
    expected = {f"{partition}/{name}" for partition, names in partitions.items() for name in names}
    assert ours.keys() == theirs.keys() == expected
    for key, one in ours.items():
        assert theirs[key].keys() - one.keys() == {"__local_path__"}
        assert one.keys() - theirs[key].keys() - {"json"} == {"__valid__"}
        assert all(one[name] == theirs[key][name] for name in ("__url__", MEMBER))
    assert {ours[key].get("json") for key in expected} == {None, b'{"n": 1}', b'{"n": 2}'}


def test_plain_webdataset_delivers_the_same_set(larger: Path) -> None:
    ours = [one for rank in ranks(larger, evaluate=True) for one in rank]
    pairs = sorted((one["__key__"], one[MEMBER]) for one in ours)
    assert pairs == sorted((one["__key__"], one[MEMBER]) for one in plain(larger))


def told(array: Any) -> Any:
    """All that makes an array what it is."""
    order = array.flags.f_contiguous, array.flags.c_contiguous
    return array.dtype, array.shape, order, array.tobytes()


def test_arrays_are_decoded_bit_for_bit_and_can_be_written(tmp_path: Path) -> None:
    root = build(tmp_path / "v", {"a": [[Sample("odd", ODD)]]})
    source = ShardSamples(root, batch_size=1)
    for (one,) in (
        list(source.decode()),
        list(wds.DataPipeline(source, wds.decode(decoder))),
        plain(root, wds.decode(decoder)),
    ):
        assert one[MEMBER].keys() == ODD.keys()
        for name, array in one[MEMBER].items():
            assert told(array) == told(ODD[name]), name
            assert array.flags.writeable


def test_tensors_are_those_of_the_batches(tmp_path: Path) -> None:
    root = build(tmp_path / "v", {"a": [[Sample("odd", ODD)]]})
    (one,) = ShardSamples(root, batch_size=1).decode(tensor_decoder)
    (batch,) = ShardDataset(root, batch_size=1)
    assert one[MEMBER].keys() == ODD.keys()
    for name, tensor in one[MEMBER].items():
        expected = batch[name][0]
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert tensor.numpy().tobytes() == expected.contiguous().numpy().tobytes()


def test_without_the_decoder_the_library_leaves_members_as_they_are(small: Path) -> None:
    source = ShardSamples(small, batch_size=18)
    for one in wds.DataPipeline(source, wds.decode()):
        assert isinstance(one[MEMBER], bytes)
        assert isinstance(one["json"]["n"], int)
    assert all(isinstance(one[MEMBER], bytes) for one in plain(small, wds.decode()))


def test_samples_may_have_different_arrays(tmp_path: Path) -> None:
    cloud = [Sample(str(n), {f"points{n}": np.zeros((n, 3))}) for n in range(4)]
    root = build(tmp_path / "v", {"a": [cloud]})
    found = {one["__key__"]: one[MEMBER] for one in ShardSamples(root, batch_size=1).decode()}
    assert found["a/3"]["points3"].shape == (3, 3)
    assert len(found) == 4


def test_columns_are_a_dict_of_plain_values(tmp_path: Path) -> None:
    root = build(tmp_path / "v", {"a": [numbered(2, name="Ulm")]})
    names = ["n", "name", "__index__"]
    for one in ShardSamples(root, batch_size=1, columns=names).decode():
        columns = one["__columns__"]
        assert columns == {"n": one["json"]["n"], "name": "Ulm", "__index__": one["json"]["n"]}
        assert type(columns["n"]) is type(columns["__index__"]) is int


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_of_the_source_s_size_are_those_of_a_shard_dataset(
    larger: Path, workers: int
) -> None:
    for rank in range(2):
        options: dict[str, Any] = {"batch_size": 5, "seed": 3, "rank": rank, "world_size": 2}
        source = ShardSamples(larger, **options)
        stream = source.decode(tensor_decoder).map(spread).to_tuple("x", "__valid__").batched(5)
        made = list(DataLoader(stream, batch_size=None, num_workers=workers))
        expected = list(ShardDataset(larger, **options))
        assert len(made) == len(expected) == 11
        for (x, valid), batch in zip(made, expected, strict=True):
            assert torch.equal(x, batch["x"])
            assert valid.tolist() == batch["__valid__"].tolist()


def test_two_runs_are_equal_and_epochs_differ(larger: Path) -> None:
    one, other = (ShardSamples(larger, batch_size=4) for _ in range(2))
    first, second = list(one), list(one)
    assert list(other) == first
    assert keys(first) != keys(second)
    assert sorted(keys(first[:103])) == sorted(keys(second[:103]))
    stream = one.shuffle(10, seed=5)
    one.set_epoch(0)
    shuffled = list(stream)
    one.set_epoch(0)
    assert list(stream) == shuffled != first


def test_padding_is_marked_left_out_or_dropped(larger: Path) -> None:
    padded = ranks(larger)
    assert [len(rank) for rank in padded] == [54, 54]
    found = [list(rank) for rank in padded]
    assert [len(samples) for samples in found] == [54, 54]
    assert sorted(keys(filter(is_valid, chain(*found)))) == sorted(keys(plain(larger)))
    assert sum(not is_valid(one) for one in chain(*found)) == 5

    for shuffle in (False, True):
        once = ranks(larger, evaluate=True, shuffle=shuffle)
        counts = [len(rank) for rank in once]
        found = [list(rank) for rank in once]
        assert [len(samples) for samples in found] == counts
        assert all(map(is_valid, chain(*found)))
        assert sorted(keys(chain(*found))) == sorted(keys(plain(larger)))

    dropped = ranks(larger, drop_last=True)
    assert [len(rank) for rank in dropped] == [len(list(rank)) for rank in dropped] == [51, 51]


@pytest.mark.parametrize("world", [1, 2])
def test_resuming_after_every_batch_continues_the_epoch(small: Path, world: int) -> None:
    whole = [list(rank) for rank in ranks(small, batch_size=3)]
    for batches in range(4):
        (first, *_) = sources = ranks(small, batch_size=3)
        seen = [
            one["__key__"]
            for source in sources
            for one in wds.DataPipeline(source, wds.slice(3 * batches))
        ]
        state = first.state_after(batches) if batches else first.next_state()
        resumed = ranks(small, world, batch_size=3)
        for source in resumed:
            source.load_state_dict(state)
            source.set_epoch(0)
        rest = [list(source) for source in resumed]
        assert sorted(seen + keys(filter(is_valid, chain(*rest)))) == sorted(keys(plain(small)))
        if world == 2:
            assert rest == [samples[3 * batches :] for samples in whole]


def test_a_state_is_a_shard_dataset_s(small: Path) -> None:
    batches = ShardDataset(small, batch_size=6)
    next(iter(batches))
    source = ShardSamples(small, batch_size=1)
    source.load_state_dict(batches.state_after(1))
    assert len(source) == 12
    seen = numbers(DataLoader(source.decode(), batch_size=None, num_workers=2))
    batches.set_epoch(0)
    whole = list(batches)
    assert seen == [int(n) for batch in whole[1:] for n in batch["x"][:, 0]]
    assert source.state_after(12) == batches.state_after(3)


def flipped(root: Path) -> Path:
    """The version with a flipped bit in the payload of d/0003."""
    plan = ShardSamples(root, batch_size=1, where="n = 2003")._plan
    damage(root / "shards" / "d" / "000000.tar", int(plan.rows.offset[0]) + 5)
    return root


def test_a_flipped_bit_is_an_error_or_left_out(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flipped(small)
    source = partial(ShardSamples, small, batch_size=3, retries=0)
    with pytest.raises(IntegrityError, match=r"shards/d/000000\.tar: sample 'd/0003' at offset"):
        list(source().decode())
    with pytest.raises(LoadError, match="more than max_skipped=0"):
        list(source(on_error="skip", max_skipped=0))
    for workers in (0, 2):
        skipping = source(on_error="skip")
        loader: Any = DataLoader(skipping.decode(), batch_size=None, num_workers=workers)
        assert sorted(numbers(loader)) == [n for n in ALL if n != 2003]
        assert skipping.skipped == 1
    assert any("skipped: " in line and "'d/0003'" in line for line in caplog.messages)


def test_the_library_s_handlers_see_what_its_filters_raise(small: Path) -> None:
    flipped(small)
    with pytest.raises(wds.DecodingError) as caught:
        plain(small, wds.decode(decoder))
    assert isinstance(caught.value.__cause__, IntegrityError)
    left = plain(small, wds.decode(decoder, handler=wds.ignore_and_continue))
    assert sorted(number(one[MEMBER]) for one in left) == [n for n in ALL if n != 2003]
    source = ShardSamples(small, batch_size=1, where="n < 9")

    def refuse(one: Any) -> Any:
        raise ValueError(one["__key__"])

    assert list(source.map(refuse, handler=wds.ignore_and_continue)) == []
    assert list(source.map(refuse, handler=wds.ignore_and_stop)) == []
    with pytest.raises(ValueError, match="a/000"):
        list(source.map(refuse))


@pytest.mark.parametrize("data", [b"", b"no frame", members.compress(b"no member", 3)[:-1]])
def test_what_is_no_member_is_an_integrity_error(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="payload"):
        decoder("." + MEMBER, data)
    assert decoder(".json", data) is tensor_decoder(".zst", data) is None


@pytest.mark.parametrize(
    "options",
    [{"fields": ["x"]}, {"transform": lambda b, g: b}, {"contiguous": True}, {"shapes": "list"}],
)
def test_options_of_batches_are_refused_by_name(small: Path, options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=next(iter(options))):
        ShardSamples(small, batch_size=1, **options)


def test_a_shard_loader_refuses_samples(small: Path) -> None:
    with pytest.raises(PlanError, match="DataLoader"):
        iter(ShardLoader(ShardSamples(small, batch_size=1)))


def test_the_library_missing_is_told_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "webdataset", None)
    monkeypatch.delitem(sys.modules, "fsmount_loader.webdataset")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fsmount\[webdataset\]'"):
        importlib.import_module("fsmount_loader.webdataset")
