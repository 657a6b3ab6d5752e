"""torchdata's StatefulDataLoader: it asks each worker's iterator for its state after each batch.

After `iter` in a new process it gives each the same back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from test_dataset import all_numbers, numbers
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fsmount.errors import PlanError, StateMismatchError
from fsmount_loader import ShardDataset

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

States = dict[int, dict[str, Any]]


class Driven(IterableDataset[Any]):
    """In each worker, what such a loader does there: what comes, with the state behind it."""

    def __init__(self, data: ShardDataset, states: Mapping[int, Any] | None) -> None:
        self.data = data
        self.states = states

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        share = iter(self.data)
        if self.states is not None:
            share.load_state_dict(self.states[worker])
        yield None, worker, share.state_dict()
        for batch in share:
            yield batch, worker, share.state_dict()


def handed_over(
    data: ShardDataset, workers: int, states: States | None = None
) -> Iterator[tuple[Any, States]]:
    """What each batch, or sample, of a pass is, and the states of all workers behind it."""
    saved: States = {}
    for item, worker, state in DataLoader(
        Driven(data, states), batch_size=None, num_workers=workers, collate_fn=lambda item: item
    ):
        saved[worker] = state
        if item is not None:
            yield item, json.loads(json.dumps(saved), object_hook=_whole_keys)


def _whole_keys(value: dict[str, Any]) -> dict[Any, Any]:
    return {int(name) if name.isdigit() else name: each for name, each in value.items()}


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_it_resumes_the_second_epoch_at_every_batch(small: Path, workers: int) -> None:
    data = ShardDataset(small, batch_size=3)
    epochs = [all_numbers(ShardDataset(small, batch_size=3))]
    assert [n for batch, _ in handed_over(data, workers) for n in numbers(batch)] == epochs[0]
    second = [(numbers(batch), states) for batch, states in handed_over(data, workers)]
    third = [numbers(batch) for batch, _ in handed_over(data, workers)]
    for place in range(len(second)):
        other = ShardDataset(small, batch_size=3)
        rest = [numbers(b) for b, _ in handed_over(other, workers, second[place][1])]
        left = [batch for batch, _ in second[place + 1 :]]
        # That loader goes on with the worker whose turn it is, and this one with the first.
        assert rest == left if workers < 2 else sorted(rest) == sorted(left)
        if place in (2, len(second) - 1):
            assert [numbers(batch) for batch, _ in handed_over(other, workers)] == third
            assert other.state_after(0)["epoch"] == 2


def test_it_resumes_what_was_resumed_itself(small: Path) -> None:
    """From a position in an epoch, as with another number of ranks."""
    whole = all_numbers(ShardDataset(small, batch_size=3))
    data = ShardDataset(small, batch_size=3)
    data.load_state_dict(ShardDataset(small, batch_size=3).state_at(0, 6))
    _, (_, states), *_ = handed_over(data, 0)
    rest = handed_over(ShardDataset(small, batch_size=3), 0, states)
    assert [n for batch, _ in rest for n in numbers(batch)] == whole[12:]


@pytest.mark.parametrize(
    ("options", "worker", "message"),
    [
        ({"seed": 1}, 0, "the state has seed=0, this is 1"),
        ({"batch_size": 6}, 0, "the state has global_batch_size=3, this is 6"),
        ({}, 1, "not a state: it has no 'selection'"),
    ],
)
def test_what_can_t_be_resumed_exactly_is_refused(
    small: Path, options: dict[str, Any], worker: int, message: str
) -> None:
    share = iter(ShardDataset(small, batch_size=3))
    next(share)
    state = {} if worker else share.state_dict()
    other = iter(ShardDataset(small, **{"batch_size": 3} | options))
    with pytest.raises(StateMismatchError, match=message):
        other.load_state_dict(state)


def test_a_worker_s_state_is_no_other_worker_s_and_no_dataset_s(small: Path) -> None:
    data = ShardDataset(small, batch_size=3)
    (_, states), *_ = handed_over(data, 2)
    with pytest.raises(StateMismatchError, match="the state has workers=2, this is 0"):
        list(handed_over(data, 0, states))
    with pytest.raises(StateMismatchError, match="not a state: it has no 'position'"):
        data.load_state_dict(states[0])


def test_samples_of_a_webdataset_source_are_resumed_inside_a_batch(small: Path) -> None:
    webdataset = pytest.importorskip("fsmount_loader.webdataset")

    def source() -> Any:
        return webdataset.ShardSamples(small, batch_size=4, evaluate=True, shuffle=True)

    whole = [(sample["__key__"], states) for sample, states in handed_over(source(), 2)]
    assert len(whole) == 18
    for place in (1, 2, 6, 9, 16, 17):
        rest = [sample["__key__"] for sample, _ in handed_over(source(), 2, whole[place][1])]
        assert sorted(rest) == sorted(key for key, _ in whole[place + 1 :])
    pipeline = iter(source().compose())
    with pytest.raises(PlanError, match="can't be resumed by a StatefulDataLoader"):
        pipeline.state_dict()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_itself(small: Path, workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: PLC0415 - it warns

    def stateful() -> Any:
        data = ShardDataset(small, batch_size=3)
        return StatefulDataLoader(data, batch_size=None, num_workers=workers)

    loader = stateful()
    assert len(all_numbers(loader)) == 18
    second, state = [], {}
    for batch in loader:
        second.append(numbers(batch))
        if len(second) == 2:
            state = loader.state_dict()
    other = stateful()
    other.load_state_dict(state)
    assert [numbers(batch) for batch in other] == second[2:]
    assert all_numbers(other) == all_numbers(loader)
