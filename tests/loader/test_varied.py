"""Samples that differ in shape: padded or in lists, bit for bit, in every kind of worker."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from small_versions import Arrays, Sample, build, damage
from torch.utils.data import DataLoader

from fsmount.errors import IntegrityError, PlanError
from fsmount_loader import Batch, ShardDataset, ShardLoader, per_sample
from fsmount_loader.batch import Parts
from fsmount_loader.options import Options
from fsmount_loader.plan import make_plan
from fsmount_loader.version import VersionFiles

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

DTYPES = ["?", "i1", ">i2", "u4", "f2", ">f4", "f8", "c8", "c16", "M8[s]", "i8"]


def array(text: str, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[Any]:
    """An array of random bytes, in one memory order or the other."""
    dtype = np.dtype(text)
    data = random.bytes(int(np.prod(shape, dtype=int)) * dtype.itemsize)
    flat = np.frombuffer(data, np.uint8) % 2 if text == "?" else np.frombuffer(data, dtype)
    order: Any = "F" if random.random() < 0.5 else "C"
    return np.array(flat.astype(dtype).reshape(shape), order=order)


def made(number: int) -> Arrays:
    """Tensors of a sample of 0 to 12 frames; two of them have one shape in all samples."""
    random = np.random.Generator(np.random.PCG64(number))
    frames, boxes = number * 5 % 13, number % 3
    vary = {f"{text} frames": array(text, (frames, 3), random) for text in DTYPES}
    both = array("f4", (2, boxes, frames), random)
    return {**vary, "boxes": both, "same": array("f8", (2, 2), random), "n": np.array(number)}


SAMPLES = [made(number) for number in range(23)]
EMPTY_6 = [{n: np.zeros_like(a) for n, a in SAMPLES[6].items()}, *SAMPLES[1:]]  # as number 0


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 samples of many shapes in two partitions."""
    named = [
        Sample(f"{n:04d}", arrays, {"frames": n * 5 % 13, "half": n / 2, "word": str(n)})
        for n, arrays in enumerate(SAMPLES)
    ]
    root = tmp_path_factory.mktemp("varied") / "v"
    return build(root, {"a": [named[:9], named[9:14]], "b": [named[14:]]})


def native(value: NDArray[Any]) -> NDArray[Any]:
    plain = value.astype(value.dtype.newbyteorder("="), "C")
    return plain.view(np.int64) if plain.dtype.kind == "M" else plain


def padded(values: list[NDArray[Any]]) -> NDArray[Any]:
    shape = np.array([value.shape for value in values]).max(axis=0)
    joined = np.zeros((len(values), *shape), values[0].dtype)
    for place, value in enumerate(values):
        within: Any = (place, *map(slice, value.shape))
        joined[within] = value
    return joined


def same(tensor: torch.Tensor, wanted: NDArray[Any]) -> bool:
    found = tensor.numpy()
    return (found.dtype, found.shape, found.tobytes()) == (
        wanted.dtype,
        wanted.shape,
        wanted.tobytes(),
    )


def check(batch: Batch, *, listed: bool, samples: list[Arrays] = SAMPLES) -> list[int]:
    """Compare a batch with its sources; returns the numbers of its samples."""
    chosen = [samples[number] for number in batch["n"].tolist()]
    varying = [name for name in samples[0] if name not in ("same", "n")]
    shapes = [] if listed else [f"__shape__.{name}" for name in sorted(varying)]
    assert list(batch)[: len(samples[0]) + 1 + len(shapes)] == [
        *sorted(samples[0]),
        "__valid__",
        *shapes,
    ]
    for name in samples[0]:
        values = [native(arrays[name]) for arrays in chosen]
        if name in varying and listed:
            assert type(batch[name]) is list
            assert all(same(t, v) for t, v in zip(batch[name], values, strict=True)), name
        else:
            assert same(batch[name], padded(values)), name
        if name in varying and not listed:
            sizes = batch[f"__shape__.{name}"]
            assert sizes.dtype == torch.int64
            assert sizes.tolist() == [list(value.shape) for value in values]
            mask = torch.arange(batch[name].shape[1]) < sizes[:, :1]
            assert mask.sum(1).tolist() == [len(value) for value in values]
    numbers: list[int] = batch["n"][batch["__valid__"]].tolist()
    return numbers


def storages(batch: Batch) -> set[int]:
    """The addresses of the memory of a batch's tensors."""
    flat = [t for v in batch.values() for t in (v if isinstance(v, list) else [v])]
    return {t.untyped_storage().data_ptr() for t in flat if isinstance(t, torch.Tensor)}


def loaders(data: ShardDataset) -> Iterable[Iterable[Batch]]:
    yield data
    yield ShardLoader(data, 2)
    yield DataLoader(data, batch_size=None, num_workers=2)


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("shapes", ["pad", "list"])
def test_values_are_the_sources_whoever_builds_them(
    version: Path, shapes: Any, contiguous: bool
) -> None:
    data = ShardDataset(
        version,
        batch_size=4,
        shapes=shapes,
        contiguous=contiguous,
        max_pad_fraction=1,
        keys=True,
        columns=["frames", "word"],
    )
    for loader in loaders(data):
        data.set_epoch(0)
        seen = []
        kept = list(loader)  # blocks are used again, but not while a tensor is there
        for batch in kept:
            seen += check(batch, listed=shapes == "list")
            assert batch["word"] == list(map(str, batch["n"].tolist()))
            assert batch["frames"].tolist() == (batch["n"] * 5 % 13).tolist()
            assert [int(key[-4:]) for key in batch["__key__"]] == batch["n"].tolist()
            assert len(storages(batch)) == 1
        assert sorted(seen) == list(range(23))


@pytest.mark.parametrize("shapes", ["pad", "list"])
def test_blocks_are_clean_when_they_are_used_again(version: Path, shapes: Any) -> None:
    data = ShardDataset(version, batch_size=3, shapes=shapes, max_pad_fraction=1)
    for loader in loaders(data):
        for _ in range(3):
            assert sorted(n for b in loader for n in check(b, listed=shapes == "list")) == [
                *range(23)
            ]


def test_growing_batches_get_larger_blocks_and_no_shared_memory(tmp_path: Path) -> None:
    """A DataLoader's worker has 16 blocks: the small ones give way."""
    samples = [Sample(f"{n:04d}", {"x": np.full(2000 * n, n)}) for n in range(1, 40)]
    data = ShardDataset(
        build(tmp_path / "v", {"a": [samples]}), batch_size=1, shapes="pad", shuffle=False
    )
    for number, batch in enumerate(DataLoader(data, batch_size=None, num_workers=1), 1):
        assert batch["x"].tolist() == [[number] * 2000 * number]
        assert not batch["x"].is_shared()


@pytest.mark.parametrize("shapes", ["pad", "list"])
def test_a_batch_moves_and_is_copied_as_one_block(version: Path, shapes: Any) -> None:
    batch = next(iter(ShardDataset(version, batch_size=5, shapes=shapes, max_pad_fraction=1)))
    for other in (
        copy.copy(batch),
        copy.deepcopy(batch),
        pickle.loads(ForkingPickler.dumps(batch)),  # noqa: S301 - our own
        batch.to("cpu"),
    ):
        assert type(other) is Batch
        check(other, listed=shapes == "list")
        assert len(storages(other)) == 1
    moved = batch.to("meta")["boxes"]
    assert {t.device.type for t in (moved if shapes == "list" else [moved])} == {"meta"}


def test_what_lists_hold_beside_views_moves_too() -> None:
    grad = torch.ones(2, requires_grad=True)
    batch = Batch(mixed=[torch.zeros(3), grad, "word", [grad]], x=torch.zeros(1))
    there = batch.to("meta")["mixed"]
    assert [there[0].device.type, there[1].device.type, there[2]] == ["meta", "meta", "word"]
    assert there[3][0].device.type == "meta"
    parts = Parts.of(batch)
    one, other = parts.together(), parts.together()
    assert one["mixed"] is not other["mixed"]
    assert parts.items["mixed"] == [None, grad, "word", [grad]]


@pytest.mark.parametrize("shapes", ["pad", "list"])
def test_fields_are_chosen_and_decoded_no_further(version: Path, shapes: Any) -> None:
    options: dict[str, Any] = {"batch_size": 23, "shuffle": False, "shapes": shapes}
    (batch,) = ShardDataset(version, fields=["f8 frames", "same"], **options)
    names = ["f8 frames", "same", "__valid__", "__shape__.f8 frames"]
    assert list(batch) == (names if shapes == "pad" else names[:3])
    values = [native(arrays["f8 frames"]) for arrays in SAMPLES]
    if shapes == "pad":
        assert same(batch["f8 frames"], padded(values))
    else:
        assert all(map(same, batch["f8 frames"], values))
    (batch,) = ShardDataset(version, fields=["same", "n"], **options)  # nothing wanted varies
    assert list(batch) == ["n", "same", "__valid__"]
    assert same(batch["same"], np.stack([native(arrays["same"]) for arrays in SAMPLES]))
    (batch,) = ShardLoader(ShardDataset(version, fields=[], **options), 1)
    assert list(batch) == ["__valid__"]


@pytest.mark.parametrize("shapes", ["pad", "list"])
def test_decompression_stops_early_for_each_shape(tmp_path: Path, shapes: Any) -> None:
    random = np.random.default_rng(0)
    samples = [
        {"a": random.random(9_000 * n), "b": random.random(120_000 + n).astype("f4")}
        for n in range(1, 4)
    ]
    root = build(tmp_path / "v", {"a": [[Sample(str(n), s) for n, s in enumerate(samples)]]})
    layout = make_plan(
        VersionFiles.open(root), Options(batch_size=3, shapes=shapes, fields=("a",))
    ).layout
    assert [size - layout.start for size in layout.decoded] == [72_000, 144_000, 216_000]
    (batch,) = ShardDataset(root, batch_size=3, shuffle=False, shapes=shapes, fields=["a"])
    values = [one["a"] for one in samples]
    if shapes == "pad":
        assert same(batch["a"], padded(values))
    else:
        assert all(map(same, batch["a"], values))


@pytest.mark.parametrize("shapes", ["pad", "list"])
def test_one_shape_is_as_without_the_option(small: Path, shapes: Any) -> None:
    data = ShardDataset(small, batch_size=6, shapes=shapes)
    assert make_plan(VersionFiles.open(small), Options(batch_size=6, shapes=shapes)).varied is None
    for one, other in zip(data, ShardDataset(small, batch_size=6), strict=True):
        assert list(one) == list(other) == ["label", "x", "__valid__"]
        assert torch.equal(one["x"], other["x"])


@pytest.mark.parametrize("shapes", ["pad", "list"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_skipped_sample_is_zeros_in_its_own_shape(
    tmp_path: Path, shapes: Any, workers: int
) -> None:
    """It is in the fifth batch, which is small: its block was another's before."""
    numbers = [5, 2, 10, 7, 4, 9, 1, 12, 6, 3]
    root = build(
        tmp_path / "v", {"a": [[Sample(f"{at:04d}", SAMPLES[n]) for at, n in enumerate(numbers)]]}
    )
    rows = make_plan(VersionFiles.open(root), Options(batch_size=1, shapes=shapes)).rows
    damage(root / "shards" / "a" / "000000.tar", int(rows.offset[8]) + 20)
    options: dict[str, Any] = {"batch_size": 2, "shuffle": False, "shapes": shapes, "retries": 0}
    with pytest.raises(IntegrityError, match=r"a/000000\.tar: sample 'a/0008'"):
        list(ShardLoader(ShardDataset(root, **options), workers))
    lenient = ShardDataset(root, on_error="skip", **options)
    for at, batch in enumerate(ShardLoader(lenient, workers)):
        assert batch["__valid__"].tolist() == [at < 4, True]
        check(batch, listed=shapes == "list", samples=SAMPLES if at < 4 else EMPTY_6)
        assert batch["n"].tolist() == ([0, 3] if at == 4 else numbers[2 * at : 2 * at + 2])
    assert lenient.skipped == 1


def mask(sample: Mapping[str, Any], generator: np.random.Generator) -> Mapping[str, Any]:
    frames, _ = sample["__shape__.f8 frames"].tolist()
    assert not sample["f8 frames"][frames:].any()
    return {"own": sample["f8 frames"][:frames], "sum": sample["f8 frames"].sum(), "n": sample["n"]}


def cropped(sample: Mapping[str, Any], generator: np.random.Generator) -> Mapping[str, Any]:
    wide = torch.zeros(4, 3, dtype=torch.float64)
    wide[: len(sample["f8 frames"])] = sample["f8 frames"][:4]
    return {"f8 frames": wide, "boxes": sample["boxes"]}


def as_it_is(sample: Mapping[str, Any], generator: np.random.Generator) -> Mapping[str, Any]:
    return sample


@pytest.mark.parametrize("workers", [0, 2])
def test_transforms_see_shapes_and_make_others(version: Path, workers: int) -> None:
    def batches(function: Callable[..., Any], shapes: Any, lists: list[str]) -> list[Batch]:
        data = ShardDataset(
            version,
            batch_size=4,
            shuffle=False,
            shapes=shapes,
            transform=per_sample(function, lists),
            max_pad_fraction=1,
        )
        return list(ShardLoader(data, workers))

    for batch in batches(mask, "pad", ["own"]):
        for own, number in zip(batch["own"], batch["n"].tolist(), strict=True):
            assert same(own, native(SAMPLES[number]["f8 frames"]))
        assert batch["sum"].shape == (4,)
    for batch in batches(cropped, "list", ["boxes"]):
        assert batch["f8 frames"].shape == (4, 4, 3)
        assert type(batch["boxes"]) is list
    told = r"'boxes' is \[2, 0, 0\] in sample 'a/0000' .* \[2, 1, 5\] in sample 'a/0001'"
    with pytest.raises(PlanError, match=told):
        batches(cropped, "list", [])
    varying = [name for name in SAMPLES[0] if name not in ("same", "n")]
    for batch in batches(as_it_is, "list", varying):
        check(batch, listed=True)


LENGTHS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=7)


@settings(max_examples=25)
@given(LENGTHS, st.integers(1, 4), st.sampled_from(["pad", "list"]))
def test_any_shapes(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, int]], size: int, mode: Any
) -> None:
    random = np.random.default_rng(1)
    samples = [{"x": random.random(shape), "y": np.arange(shape[0])} for shape in shapes]
    root = build(
        tmp_path_factory.mktemp("any") / "v",
        {"a": [[Sample(str(n), arrays) for n, arrays in enumerate(samples)]]},
    )
    data = ShardDataset(root, batch_size=size, shapes=mode, evaluate=True)
    for number, batch in enumerate(data):
        chosen = [samples[p % len(samples)] for p in range(number * size, (number + 1) * size)]
        for name in ("x", "y"):
            values = [one[name] for one in chosen]
            if isinstance(batch[name], list):
                assert all(map(same, batch[name], values))
            else:
                assert same(batch[name], padded(values))
            told = batch.get(f"__shape__.{name}")
            assert told is None or told.tolist() == [list(value.shape) for value in values]
