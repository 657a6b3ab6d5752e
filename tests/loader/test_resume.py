"""A run goes on from every step, at another world size, worker count and batch size."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from small_versions import build, numbered
from test_dataset import all_numbers, numbers

from fsmount.errors import StateMismatchError
from fsmount_loader import ShardDataset, ShardLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

OPTIONS: dict[str, Any] = {"streams": 4, "window": 5, "chunk_size": 3, "max_pad_fraction": 1}


def epoch_positions(root: Path, epoch: int, **options: Any) -> list[int]:
    data = ShardDataset(root, batch_size=1, **OPTIONS, **options)
    data.set_epoch(epoch)
    return all_numbers(data)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("world", "size", "workers"), [(1, 4, 0), (2, 6, 0), (3, 9, 1), (2, 4, 2)])
def test_from_every_step(small: Path, world: int, size: int, workers: int, shuffle: bool) -> None:
    order = epoch_positions(small, 1, shuffle=shuffle)
    loader = ShardLoader(ShardDataset(small, batch_size=5, shuffle=shuffle, **OPTIONS))
    states = [loader.state_dict()]
    for _ in range(2):
        states += [json.loads(json.dumps(loader.state_dict())) for _ in loader]
    assert [(state["epoch"], state["position"]) for state in states] == [
        *((0, at) for at in (0, 5, 10, 15, 18)),
        *((1, at) for at in (5, 10, 15, 18)),
    ]
    for state in states:
        ranks = [
            ShardLoader(
                ShardDataset(
                    small,
                    global_batch_size=size,
                    rank=rank,
                    world_size=world,
                    shuffle=shuffle,
                    **OPTIONS,
                ),
                workers,
            )
            for rank in range(world)
        ]
        for rank in ranks:
            rank.load_state_dict(state)
        done = state["position"] == 18
        rest = epoch_positions(small, state["epoch"] + done, shuffle=shuffle)
        rest = rest[0 if done else state["position"] :]
        batches = [list(rank) for rank in ranks]
        assert {len(part) for part in batches} == {-(-len(rest) // size)}
        for number, parts in enumerate(zip(*batches, strict=True)):
            wanted = rest[number * size :][:size]
            got = list(chain.from_iterable(map(numbers, parts)))
            assert sorted(got) == sorted(wanted)
        following = sorted(chain.from_iterable(map(all_numbers, ranks)))  # the next one is whole
        assert following == sorted(order)


def test_the_state_counts_what_was_handed_out_not_what_was_read(small: Path) -> None:
    for workers in (0, 2):
        loader = ShardLoader(ShardDataset(small, batch_size=2, prefetch=4), workers)
        positions = [loader.state_dict()["position"] for _ in loader]
        assert positions == list(range(2, 19, 2))


def test_a_resumed_run_can_be_resumed(small: Path) -> None:
    order = epoch_positions(small, 0)
    seen: list[int] = []
    state = None
    for size in (3, 2, 5, 1, 4, 7):
        loader = ShardLoader(ShardDataset(small, batch_size=size, **OPTIONS))
        if state is not None:
            loader.load_state_dict(state)
        seen += numbers(next(iter(loader)))
        state = loader.state_dict()
    assert seen == order


def test_set_epoch_in_the_loop_keeps_the_loaded_position(small: Path) -> None:
    def run(state: dict[str, Any] | None, epochs: range) -> list[int]:
        data = ShardDataset(small, batch_size=6)
        loader = ShardLoader(data)
        if state is not None:
            loader.load_state_dict(state)
        seen = []
        for epoch in epochs:
            data.set_epoch(epoch)
            assert len(loader) == len(data)
            seen += all_numbers(loader)
        return seen

    data = ShardDataset(small, batch_size=6)
    loader = ShardLoader(data)
    whole = run(None, range(3))
    for step in range(1, 7):
        if step % 3 == 1:
            data.set_epoch(step // 3)
            iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        assert run(state, range((step - 1) // 3, 3)) == whole[6 * step :]


def test_a_finished_epoch_stays_finished_at_another_batch_size(small: Path) -> None:
    loader = ShardLoader(ShardDataset(small, batch_size=7, drop_last=True))
    assert len(list(loader)) == 2
    other = ShardDataset(small, batch_size=2)
    other.load_state_dict(loader.state_dict())
    assert len(other) == 9
    other.set_epoch(0)
    assert len(other) == 0
    assert list(other) == []


def test_a_state_after_set_epoch_is_the_next_iteration_s(small: Path) -> None:
    data = ShardDataset(small, batch_size=6)
    loader = ShardLoader(data)
    list(loader)
    data.set_epoch(7)
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (7, 0)


def test_an_iteration_that_nothing_was_taken_from_begins_again(small: Path) -> None:
    epochs = [epoch_positions(small, epoch) for epoch in range(3)]
    data = ShardDataset(small, batch_size=6, **OPTIONS)
    loader = ShardLoader(data)

    def state() -> tuple[int, int]:
        return loader.state_dict()["epoch"], loader.state_dict()["position"]

    iter(loader)
    assert state() == (0, 0)
    assert all_numbers(loader) == epochs[0]
    next(iter(loader))  # of epoch 1
    resumed = state()
    assert resumed == (1, 6)
    assert all_numbers(loader) == epochs[2]
    data.load_state_dict(data.state_at(*resumed))
    iter(loader)
    assert all_numbers(loader) == epochs[1][6:]
    data.load_state_dict(data.state_at(1, 18))
    data.set_epoch(1)
    assert list(loader) == []  # all of it, and no reason to begin again
    assert all_numbers(loader) == epochs[2]
    data.set_epoch(0)
    iter(loader)
    assert all_numbers(data) == epochs[1]  # the dataset's own iterations count
    assert all_numbers(loader) == epochs[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "seed=0, this is 1"),
        ({"window": 4}, "window=16, this is 4"),
        ({"streams": 2}, "streams=1, this is 2"),
        ({"chunk_size": 15}, "chunk_size=16, this is 15"),
        ({"shuffle": False}, "shuffle=True, this is False"),
        ({"where": "n > 0"}, "selection="),
    ],
)
def test_a_state_of_another_run_is_refused_by_name(
    small: Path, options: dict[str, Any], message: str
) -> None:
    state = ShardDataset(small, batch_size=1).next_state()
    with pytest.raises(StateMismatchError, match=message):
        ShardDataset(small, batch_size=1, **options).load_state_dict(state)


def test_the_selection_is_bound_by_content(tmp_path: Path) -> None:
    def digest(name: str, **options: Any) -> str:
        data = ShardDataset(tmp_path / name, batch_size=1, **options)
        return str(data.next_state()["selection"])

    build(tmp_path / "one", {"a": [numbered(3)], "b": [numbered(3, 1)]})
    build(tmp_path / "two", {"a": [numbered(3)], "b": [numbered(3, 1, changed=True)]})
    build(tmp_path / "three", {"a": [numbered(3)], "b": [numbered(3, 2)]})
    build(tmp_path / "four", {"a": [numbered(3)], "c": [numbered(3, 1)]})
    assert digest("one") == digest("two", where="true")  # a sidecar is no part of the order
    assert len({digest("one"), digest("three"), digest("four")}) == 3
    assert digest("one", where="n < 3") == digest("three", where="n < 3")
    assert len({digest("one", where=f"n <> {n}") for n in range(3)}) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"position": -1},
        {"position": 19},
        {"position": "5"},
        {"epoch": -1},
        {"epoch": 1.5},
        {"epoch": None},
        {"order": 2},
        {"samples": 17},
    ],
)
def test_what_is_no_state_is_refused(small: Path, change: dict[str, Any]) -> None:
    data = ShardDataset(small, batch_size=1)
    state = data.next_state()
    with pytest.raises(StateMismatchError):
        data.load_state_dict({**state, **change})
    del state["epoch"]
    with pytest.raises(StateMismatchError, match="no 'epoch'"):
        data.load_state_dict(state)
