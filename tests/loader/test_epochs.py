"""Epochs advance by themselves, in this process and in every kind of worker."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
from test_dataset import all_numbers
from torch.utils.data import DataLoader

from fsmount_loader import ShardDataset, ShardLoader
from fsmount_loader.epochs import Epochs

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def expected_epochs(root: Path, count: int) -> list[list[int]]:
    data = ShardDataset(root, batch_size=3)
    epochs = [all_numbers(data) for _ in range(count)]
    assert len(set(map(tuple, epochs))) == count
    return epochs


@pytest.mark.parametrize(
    ("start_method", "persistent"), [("fork", True), ("fork", False), ("spawn", True)]
)
def test_epochs_under_a_plain_dataloader(small: Path, start_method: str, persistent: bool) -> None:
    expected = expected_epochs(small, 5)
    data = ShardDataset(small, batch_size=3)
    loader = DataLoader(
        data,
        batch_size=None,
        num_workers=2,
        multiprocessing_context=start_method,
        persistent_workers=persistent,
    )
    assert [all_numbers(loader) for _ in range(3)] == expected[:3]
    data.set_epoch(1)
    assert [all_numbers(loader) for _ in range(2)] == expected[1:3]
    assert all_numbers(data) == expected[3]  # in process, and on it goes
    assert all_numbers(DataLoader(data, batch_size=None, num_workers=3)) == expected[4]


@pytest.mark.parametrize("copied", [lambda data: pickle.loads(pickle.dumps(data)), copy.deepcopy])  # noqa: S301
def test_copies_have_an_epoch_of_their_own_that_their_workers_share(
    small: Path, copied: Callable[[ShardDataset], ShardDataset]
) -> None:
    expected = expected_epochs(small, 4)
    data = ShardDataset(small, batch_size=3)
    assert all_numbers(data) == expected[0]
    other = copied(data)
    loader = DataLoader(other, batch_size=None, num_workers=2, persistent_workers=True)
    assert [all_numbers(loader) for _ in range(2)] == expected[1:3]  # it goes on from the copy
    other.set_epoch(3)
    assert all_numbers(loader) == expected[3]
    assert other.state_after(1)["epoch"] == 3
    assert all_numbers(ShardLoader(copied(other), 1)) != expected[3]
    assert all_numbers(data) == expected[1]  # nothing of that reached the first


def test_what_multiprocessing_sends_shares_the_epoch(small: Path) -> None:
    """As spawned workers do: the sender knows that a pass was begun."""
    data = ShardDataset(small, batch_size=3)
    sent = pickle.loads(ForkingPickler.dumps(data))  # noqa: S301 - our own
    assert [all_numbers(sent), all_numbers(data)] == expected_epochs(small, 2)
    sent.set_epoch(7)
    assert data.next_state()["epoch"] == 7


def test_resuming_under_a_plain_dataloader(small: Path) -> None:
    (first, second) = expected_epochs(small, 2)
    data = ShardDataset(small, batch_size=3)
    loader = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state = data.state_after(2)
    del iterator
    other = ShardDataset(small, batch_size=3)
    other.load_state_dict(state)
    loader = DataLoader(other, batch_size=None, num_workers=2, persistent_workers=True)
    assert len(loader) == 4
    assert all_numbers(loader) == first[6:]
    assert len(loader) == 6  # DataLoader warns of what it was told last
    assert all_numbers(loader) == second
    assert other.state_after(1)["position"] == 3


def test_spawned_workers_of_shardloader(small: Path) -> None:
    expected = expected_epochs(small, 2)
    loader = ShardLoader(ShardDataset(small, batch_size=3), 2, start_method="spawn")
    assert [all_numbers(loader) for _ in range(2)] == expected


def test_an_iteration_that_is_broken_off_is_an_epoch_too(small: Path) -> None:
    expected = expected_epochs(small, 2)
    for workers in (0, 1):
        loader = ShardLoader(ShardDataset(small, batch_size=3), workers)
        for _ in loader:
            break
        assert all_numbers(loader) == expected[1]


def test_workers_agree_whatever_order_they_begin_in() -> None:
    epochs = Epochs()
    assert [epochs.begin(w, 3) for w in (2, 0, 1)] == [(0, 0)] * 3
    assert epochs.begin(1, 3) == (1, 0)  # far ahead of the others
    assert epochs.begin(0, 3) == (1, 0)
    assert epochs.begin(2, 3) == (1, 0)
    assert [epochs.begin(w, 2) for w in (1, 0)] == [(2, 0)] * 2
    assert epochs.begin() == (3, 0)
    assert [epochs.begin(w, 3) for w in (1, 0, 2)] == [(4, 0)] * 3
    assert (epochs.latest(), epochs.next()) == ((4, 0), (5, 0))
    epochs.set_epoch(2)
    assert [epochs.begin(w, 2) for w in (1, 0)] == [(2, 0)] * 2


def test_positions_and_epochs_that_are_set() -> None:
    epochs = Epochs()
    epochs.set_position(4, 10, finished=False)
    assert epochs.next() == (4, 10)
    epochs.set_epoch(4)  # the epoch just loaded: its position stays
    assert [epochs.begin(), epochs.begin()] == [(4, 10), (5, 0)]
    epochs.set_epoch(4)  # no longer
    assert epochs.begin() == (4, 0)
    epochs.set_position(4, 18, finished=True)
    assert epochs.next() == (5, 0)
    epochs.set_epoch(4)
    assert epochs.begin() == (4, 18)
    epochs.set_position(4, 18, finished=True)
    assert [epochs.begin(), epochs.begin()] == [(5, 0), (6, 0)]
