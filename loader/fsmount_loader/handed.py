"""Batches from a DataLoader's worker, in recycled blocks as well.

DataLoader offers a worker no way to hear what became of its batches; the blocks' flags tell.
"""

from __future__ import annotations

import os
import weakref
from multiprocessing import reduction
from typing import Any

import torch

from fsmount_loader.batch import Batch, Key, Parts, View, rebuild, register_node
from fsmount_loader.blocks import FORKS, SharedBlock, give_back, lend, map_block

_BLOCKS_MAX = 16  # of a worker; batches beyond, which the trainer keeps, get new shared memory


class Handing:
    """Takes blocks for batches that a DataLoader's worker hands over. Not thread-safe."""

    def __init__(self) -> None:
        self._blocks: list[SharedBlock] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """A block that nothing uses; as Recycler.take."""
        self._blocks = [block for block in self._blocks if not block.is_given_up]
        free = [block for block in self._blocks if block.is_free]
        block = next((block for block in free if block.room >= nbytes), None)
        if block is None and free and len(self._blocks) == _BLOCKS_MAX:  # all are too small
            self._blocks = [other for other in self._blocks if other is not free[0]]
        if block is None and len(self._blocks) < _BLOCKS_MAX:
            block = SharedBlock.make(nbytes)
            weakref.finalize(block, os.close, block.file).atexit = False
            self._blocks.append(block)
        if block is None:  # as torch's own collate does
            fresh = torch.UntypedStorage._new_shared(nbytes)  # type: ignore[no-untyped-call]
            return torch.empty(0, dtype=torch.uint8, device="cpu").set_(fresh)
        return block.lend(nbytes)

    def batch(self, parts: Parts) -> Batch:
        """The batch of `parts`, which is sent in the block that it lies in, if it does in one."""
        addresses = {block.address: block for block in self._blocks if not block.is_free}
        if len(parts.blocks) == 1 and parts.blocks[0].data_ptr() in addresses:
            return HandedBatch.of(parts, addresses[parts.blocks[0].data_ptr()])
        return parts.together()


class HandedBatch(Batch):
    """A batch in a worker's block; it arrives as a Batch."""

    block: SharedBlock

    @classmethod
    def of(cls, parts: Parts, block: SharedBlock) -> HandedBatch:
        """The batch of `parts`, which lie in `block`."""
        batch = cls(parts.together())
        batch.block = block
        return batch

    def __copy__(self) -> HandedBatch:
        copied = HandedBatch(self)
        copied.block = self.block
        return copied


def _sent(batch: HandedBatch) -> tuple[Any, ...]:
    parts = Parts.of(batch)
    block = batch.block
    if len(parts.blocks) != 1 or parts.blocks[0].data_ptr() != block.address:
        return rebuild, (parts.items, parts.blocks, parts.views)
    block.sent()
    file = reduction.DupFd(block.file)
    nbytes = parts.blocks[0].nbytes
    return _receive, (parts.items, file, len(block.memory), nbytes, parts.views)


register_node(HandedBatch)
reduction.ForkingPickler.register(HandedBatch, _sent)


def _receive(
    items: dict[str, Any], file: Any, size: int, nbytes: int, views: dict[Key, View]
) -> Batch:
    opened = file.detach()
    memory = map_block(size, opened)
    os.close(opened)
    block, used = lend(memory, nbytes, lambda: None)
    array = used()
    assert array is not None  # noqa: S101 - the block has it
    weakref.finalize(array, give_back, memory, FORKS, FORKS.count).atexit = False
    return Parts(items, (block,), views).together()
