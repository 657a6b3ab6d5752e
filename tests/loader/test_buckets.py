"""Length bucketing: order 1 sorted in windows, still a pure function that resumes anywhere."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_order
import test_order
from hypothesis import given
from hypothesis import strategies as st
from small_versions import Sample, build
from test_order import PARAMETERS, vectors
from torch.utils.data import DataLoader

from fsmount.errors import PlanError, StateMismatchError
from fsmount_loader import Batch, ShardDataset, ShardLoader, order

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def epoch_of(
    parameters: dict[str, Any], lengths: list[int], window: int, size: int
) -> order.EpochOrder:
    bounds = order.cut(np.array(parameters["rows_per_shard"], np.int64), parameters["chunk_size"])
    buckets = order.Buckets(np.array(lengths, np.int32), window, size)
    whole = order.Order(
        bounds, parameters["seed"], True, parameters["streams"], parameters["window"], buckets
    )
    return whole.of_epoch(parameters["epoch"])


def expected(parameters: dict[str, Any], lengths: list[float], window: int, size: int) -> list[int]:
    seed, epoch = parameters["seed"], parameters["epoch"]
    plain = reference_order.epoch_order(**parameters)
    return reference_order.bucketed(
        plain, lengths, window=window, size=size, seed=seed, epoch=epoch
    )


@given(PARAMETERS, st.integers(1, 9), st.integers(1, 9), st.integers(0, 30), st.data())
def test_it_is_the_reference_s_order(
    parameters: dict[str, Any], size: int, buckets: int, longest: int, data: st.DataObject
) -> None:
    total, window = sum(parameters["rows_per_shard"]), size * buckets
    lengths = data.draw(st.lists(st.integers(0, longest), min_size=total, max_size=total))
    one = epoch_of(parameters, lengths, window, size)
    wanted = expected(parameters, [float(length) for length in lengths], window, size)
    assert sorted(wanted) == list(range(total))
    assert one.rows(np.arange(total)).tolist() == wanted
    some = data.draw(st.lists(st.integers(0, total - 1), max_size=20))
    assert one.rows(np.array(some, np.int64)).tolist() == [wanted[position] for position in some]
    assert one.rows(np.arange(total)[::-1]).tolist() == wanted[::-1]


def test_the_specification_s_vectors() -> None:
    for case in vectors()["buckets"]:
        rows, lengths = case.pop("rows"), case.pop("lengths")
        size, window = case.pop("bucket_size"), case.pop("bucket_window")
        assert epoch_of(case, lengths, window, size).rows(np.arange(len(rows))).tolist() == rows
        assert expected(case, lengths, window, size) == rows


def test_a_bucket_s_rows_are_alike_and_buckets_mixed() -> None:
    """Batches of a bucket need little padding, and do not come in the order of their lengths."""
    parameters: dict[str, Any] = {
        "rows_per_shard": [500] * 100, "chunk_size": 16, "streams": 960, "window": 16, "seed": 3,
        "epoch": 1,
    }  # fmt: skip
    lengths = np.random.default_rng(0).integers(1, 1000, 50_000).astype(np.int32)
    positions = np.arange(12 * 4096)
    plain = lengths[test_order.epoch_of(**parameters).rows(positions)]
    found = lengths[epoch_of(parameters, lengths.tolist(), 4096, 256).rows(positions)]

    def filled(of: Any) -> float:
        batches = of.reshape(-1, 64)
        return float(batches.sum() / (64 * batches.max(axis=1)).sum())

    assert filled(plain) < 0.55
    assert filled(found) > 0.97
    means = found.reshape(-1, 256).mean(axis=1)
    neighbours = np.corrcoef(means[1:], means[:-1])[0, 1]
    assert abs(neighbours) < 0.25


LENGTHS = [n * 37 % 11 for n in range(41)]


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """41 samples whose `x` has 0 to 10 elements."""
    return made(tmp_path_factory.mktemp("buckets") / "v")


def made(root: Path, **changed: Any) -> Path:
    samples = [
        Sample(
            f"{n:04d}",
            {"x": np.full(length, n, np.float32), "n": np.array(n)},
            {"frames": length, "more": length * 2.5, "many": n + 2**62, "odd": n or None,
             "yes": True, "word": "w", **changed},
        )
        for n, length in enumerate(LENGTHS)
    ]  # fmt: skip
    return build(root, {"a": [samples[:9], samples[9:14]], "b": [samples[14:]]})


OPTIONS: dict[str, Any] = {
    "shapes": "pad", "bucket_by": "frames", "bucket_size": 4, "bucket_window": 12, "streams": 4,
    "window": 5, "chunk_size": 3, "max_pad_fraction": 1,
}  # fmt: skip


def numbers(batch: Batch) -> list[int]:
    found: list[int] = batch["n"][batch["__valid__"]].tolist()
    return found


def all_numbers(batches: Any) -> list[int]:
    return list(chain.from_iterable(map(numbers, batches)))


def epoch_numbers(root: Path, epoch: int) -> list[int]:
    data = ShardDataset(root, batch_size=1, **OPTIONS)
    data.set_epoch(epoch)
    return all_numbers(data)


def test_it_is_the_specified_order_of_the_samples(version: Path) -> None:
    for epoch in range(2):
        plain = reference_order.epoch_order(
            [9, 5, 27], chunk_size=3, streams=4, window=5, seed=0, epoch=epoch
        )
        assert epoch_numbers(version, epoch) == reference_order.bucketed(
            plain, list(map(float, LENGTHS)), window=12, size=4, seed=0, epoch=epoch
        )


@pytest.mark.parametrize("by", ["more", "__raw_size__"])
def test_only_the_order_of_lengths_matters(version: Path, by: str) -> None:
    options = {**OPTIONS, "bucket_by": by}
    data = ShardDataset(version, batch_size=1, **options)
    if by == "__raw_size__":  # a header may be as long for 2 elements as for 3, but the data isn't
        assert all_numbers(data) == epoch_numbers(version, 0)
    state = data.next_state()
    assert (
        state["lengths"] == ShardDataset(version, batch_size=1, **OPTIONS).next_state()["lengths"]
    )
    assert re.fullmatch("[0-9a-f]{64}", state["lengths"])


@pytest.mark.parametrize("shapes", ["pad", "list"])
def test_workers_and_ranks_have_no_part_in_it(version: Path, shapes: Any) -> None:
    options = {**OPTIONS, "shapes": shapes}
    whole = [numbers(batch) for batch in ShardDataset(version, batch_size=6, **options)]
    assert sorted(chain.from_iterable(whole)) == list(range(41))
    ranks = [
        ShardDataset(version, batch_size=2, rank=rank, world_size=3, **options) for rank in range(3)
    ]
    for loaders in (
        ranks,
        [ShardLoader(rank, 2) for rank in ranks],
        [DataLoader(rank, batch_size=None, num_workers=2) for rank in ranks],
    ):
        for rank in ranks:
            rank.set_epoch(0)
        for wanted, parts in zip(whole, zip(*loaders, strict=True), strict=True):
            assert sorted(all_numbers(parts)) == sorted(wanted)


@pytest.mark.parametrize(("world", "size", "workers"), [(1, 4, 0), (2, 6, 1), (3, 9, 2)])
def test_from_every_step(version: Path, world: int, size: int, workers: int) -> None:
    """Workers build every sixth rest: they are slow to start."""
    loader = ShardLoader(ShardDataset(version, batch_size=5, **OPTIONS))
    states = [loader.state_dict()]
    for _ in range(2):
        states += [json.loads(json.dumps(loader.state_dict())) for _ in loader]
    assert len(states) == 19
    epochs = [epoch_numbers(version, epoch) for epoch in range(3)]
    for step, state in enumerate(states):
        ranks = [
            ShardDataset(version, global_batch_size=size, rank=rank, world_size=world, **OPTIONS)
            for rank in range(world)
        ]
        for rank in ranks:
            rank.load_state_dict(state)
        done = state["position"] == 41
        rest = epochs[state["epoch"] + done][0 if done else state["position"] :]
        batches = [list(ShardLoader(rank, 0 if step % 6 else workers)) for rank in ranks]
        for number, parts in enumerate(zip(*batches, strict=True)):
            wanted = rest[number * size :][:size]
            assert sorted(all_numbers(parts)) == sorted(wanted)
            for batch in parts:
                lengths = [LENGTHS[n] for n in batch["n"].tolist()]
                assert batch["__shape__.x"].tolist() == [[length] for length in lengths]
                assert batch["x"].shape[1] == max(lengths)
        assert len(batches[0]) == -(-len(rest) // size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_by": None}, "bucket_by='frames', this is None"),
        ({"bucket_by": "more"}, "bucket_by='frames', this is 'more'"),
        ({"bucket_size": 3}, "bucket_size=4, this is 3"),
        ({"bucket_window": 8}, "bucket_window=12, this is 8"),
        ({"bucket_window": None}, "bucket_window=12, this is 64"),
        ({"window": 4}, "window=5, this is 4"),
    ],
)
def test_a_state_of_another_run_is_refused_by_name(
    version: Path, options: dict[str, Any], message: str
) -> None:
    state = ShardDataset(version, batch_size=1, **OPTIONS).next_state()
    other = ShardDataset(version, batch_size=1, **{**OPTIONS, **options})
    with pytest.raises(StateMismatchError, match=message):
        other.load_state_dict(state)
    with pytest.raises(StateMismatchError, match=message.split("=", maxsplit=1)[0]):
        ShardDataset(version, batch_size=1, **OPTIONS).load_state_dict(other.next_state())


def test_changed_lengths_are_another_run(version: Path, tmp_path: Path) -> None:
    state = ShardDataset(version, batch_size=1, **OPTIONS).next_state()
    changed = ShardDataset(made(tmp_path / "v", frames=3), batch_size=1, **OPTIONS)
    assert changed.next_state()["selection"] == state["selection"]
    with pytest.raises(StateMismatchError, match="lengths='"):
        changed.load_state_dict(state)
    data = ShardDataset(version, batch_size=1, shapes="list", bucket_size=5)
    plain = data.next_state()
    names = ("bucket_by", "bucket_size", "bucket_window", "lengths")
    assert [plain[name] for name in names] == [None] * 4
    other = ShardDataset(version, batch_size=1, shapes="pad", bucket_size=6)
    other.load_state_dict(plain)  # buckets that are not made have no size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_by": "none"}, "bucket_by: no column 'none'; there are .*frames"),
        ({"bucket_by": "word"}, "bucket_by='word' is no number but string"),
        ({"bucket_by": "yes"}, "bucket_by='yes' is no number but bool"),
        ({"bucket_by": "odd"}, "bucket_by='odd': sample 'a/0000' has none"),
        ({"bucket_by": 5}, "bucket_by must be a text, not 5"),
        ({"shuffle": False}, "bucket_by sorts a shuffled order: it needs shuffle=True"),
        ({"evaluate": True}, "bucket_by sorts a shuffled order: it needs shuffle=True"),
        ({"bucket_window": 13}, "bucket_window=13 is no multiple of bucket_size=4"),
        ({"bucket_window": 2}, "bucket_window=2 is no multiple of bucket_size=4"),
        ({"bucket_size": 0}, "bucket_size must be a whole number of at least 1"),
    ],
)
def test_options_that_can_t_be(version: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        ShardDataset(version, batch_size=1, **{**OPTIONS, **options})
    assert "\n" not in str(caught.value)


def test_evaluation_in_buckets_counts_each_sample_once(version: Path) -> None:
    data = ShardDataset(version, batch_size=6, **OPTIONS, evaluate=True, shuffle=True)
    assert sorted(all_numbers(ShardLoader(data, 2))) == list(range(41))


def test_a_selection_s_own_rows_are_sorted(version: Path) -> None:
    """`many` needs all 64 bits: as doubles its values would be equal."""
    options = {**OPTIONS, "bucket_by": "many", "bucket_size": 20, "bucket_window": 20}
    data = ShardDataset(version, batch_size=20, where="frames > 4", columns=["many"], **options)
    for batch in data:
        valid = numbers(batch)
        assert valid == sorted(valid)
        assert all(LENGTHS[n] > 4 for n in valid)
