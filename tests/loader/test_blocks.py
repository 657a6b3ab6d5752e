"""Blocks are used again, but never while anything refers to them."""

from __future__ import annotations

import gc
import threading
from multiprocessing import Pipe
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsmount_loader import Batch
from fsmount_loader.batch import Parts
from fsmount_loader.blocks import Recycler
from fsmount_loader.shared import Receiver, Sender


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9000)), max_size=40))
def test_what_is_in_use_is_never_lent_again(steps: list[tuple[int, int]]) -> None:
    recycler = Recycler()
    kept: list[tuple[torch.Tensor, int]] = []
    for number, (drop, size) in enumerate(steps):
        block = recycler.take(size)
        assert (block.dtype, tuple(block.shape)) == (torch.uint8, (size,))
        assert block.untyped_storage().nbytes() == size
        block.fill_(number)
        kept.append((block[size // 2 :], number))  # a view is enough
        del block, kept[: min(drop, len(kept) - 1)]
        assert all((view == value).all() for view, value in kept)


def test_a_block_comes_again_once_its_last_view_is_gone() -> None:
    recycler = Recycler()
    block = recycler.take(1 << 16)
    address, view = block.data_ptr(), block[7:9].numpy()
    del block
    other = recycler.take(1 << 16)
    assert other.data_ptr() != address
    del view
    assert recycler.take(1 << 15).data_ptr() == address


def test_what_is_kept_beyond_measure_takes_no_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsmount_loader.blocks._LENT_MAX", 5)
    recycler = Recycler()
    blocks = [recycler.take(1 << 12).fill_(n) for n in range(20)]
    assert [int(block[-1]) for block in blocks] == list(range(20))
    addresses = {block.data_ptr() for block in blocks[:5]}
    del blocks[1:]
    assert recycler.take(1 << 12).data_ptr() in addresses


def test_blocks_outlive_their_recycler_and_leave_nothing() -> None:
    recycler = Recycler()
    blocks = [recycler.take(1 << 12).fill_(n) for n in range(20)]
    del recycler
    gc.collect()
    assert [int(block[-1]) for block in blocks] == list(range(20))
    thread = threading.Thread(target=blocks.clear)  # an autograd thread may be the last user
    thread.start()
    thread.join()


@pytest.fixture
def ends() -> tuple[Sender, Receiver]:
    here, there = Pipe()
    return Sender(there, spare_max=2), Receiver(here, kept_max=512)


def passed(ends: tuple[Sender, Receiver], batch: Batch) -> Batch:
    sender, receiver = ends
    receiver.order()
    assert sender.ordered()
    sender.send(sender.pack(Parts.of(batch)))
    received = receiver.receive()
    assert isinstance(received, Batch)
    return received


def test_a_batch_in_a_block_and_beside_it(ends: tuple[Sender, Receiver]) -> None:
    for value in range(5):
        block = ends[0].take(4096).fill_(value)
        outside = torch.arange(10) + value
        sent = Batch(
            inside=block[64:128].view(torch.int32),
            outside=outside[2:5],
            again=outside[4:],
            words=["a", "b"],
            grad=torch.ones(2, requires_grad=True),
            empty=torch.empty(0, 3),
        )
        got = passed(ends, sent)
        assert list(got) == list(sent)
        for name, tensor in sent.items():
            if isinstance(tensor, torch.Tensor):
                assert got[name].dtype == tensor.dtype
                assert torch.equal(got[name], tensor), name
        assert got["words"] == ["a", "b"]
        shares = got["outside"].untyped_storage().data_ptr()
        assert shares == got["again"].untyped_storage().data_ptr()


def test_what_either_side_keeps_is_not_filled_again(ends: tuple[Sender, Receiver]) -> None:
    sender = ends[0]
    here: list[torch.Tensor] = []
    there: list[Batch] = []
    for value in range(24):
        block = sender.take(100 + 500 * (value % 5)).fill_(value)
        there.append(passed(ends, Batch(x=block)))
        if value % 3 == 0:
            here.append(block)
        if value % 4 == 0:
            there = there[-3:]
        del block
        assert [int(tensor[-1]) for tensor in here] == list(range(0, value + 1, 3))
        last = range(value + 1)[-len(there) :]
        assert [int(batch["x"][0]) for batch in there] == list(last)


def test_few_blocks_are_enough_for_many_batches(ends: tuple[Sender, Receiver]) -> None:
    addresses = set()
    batch: Any = None
    for value in range(50):
        batch = passed(ends, Batch(x=ends[0].take(1 << 14).fill_(value)))
        addresses.add(batch["x"].data_ptr())
    assert len(addresses) <= 2
    kept = [passed(ends, Batch(x=ends[0].take(1 << 14).fill_(value))) for value in range(9)]
    assert ends[1].kept == 10
    del kept, batch
    for value in range(3):
        passed(ends, Batch(x=ends[0].take(1 << 14).fill_(value)))
    assert len(ends[0]._blocks) <= 4
    assert len(ends[1]._memory) <= 4


def test_of_too_many_blocks_the_largest_stay(ends: tuple[Sender, Receiver]) -> None:
    sizes = [1 << 14, 100, 200]
    kept = [passed(ends, Batch(x=ends[0].take(size).fill_(1))) for size in sizes]
    while kept:
        del kept[0]  # the largest is the first to come back
    ends[0].take(1 << 15)
    assert [block.room for block in ends[0]._blocks.values()] == [1 << 14, 200, 1 << 15]
    passed(ends, Batch(x=ends[0].take(150)))
    assert len(ends[1]._memory) == 2


def test_what_is_kept_beyond_measure_is_copied() -> None:
    here, there = Pipe()
    ends = Sender(there, spare_max=2), Receiver(here, kept_max=3)
    kept = [passed(ends, Batch(x=ends[0].take(100).fill_(value))) for value in range(10)]
    assert ends[1].kept == 3
    assert [int(batch["x"][50]) for batch in kept] == list(range(10))


def test_a_transform_s_block_that_is_no_part_of_the_batch_stays(
    ends: tuple[Sender, Receiver],
) -> None:
    for value in range(10):
        ends[0].take(4096)
        got = passed(ends, Batch(y=torch.full((5,), value)))
        assert got["y"].tolist() == [value] * 5
    assert len(ends[0]._blocks) <= 4
