"""Batches from a DataLoader's worker, in recycled blocks as well.

DataLoader offers a worker no way to hear what became of its batches. So a block, a memfd that both
processes map, ends in a flag: the worker sets it when the batch is sent, the receiver clears it
when no tensor uses the block any more. If the receiver was forked meanwhile, its child may use the
block, which is given up then.
"""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

import torch

from fsmount_loader.batch import Batch, Key, Parts, View
from fsmount_loader.blocks import FORKS, Array, Forks, anonymous_file, lend, map_block

_FREE, _SENT, _GIVEN_UP = range(3)  # what a block's flag says
_BLOCKS_MAX = 16  # of a worker; batches beyond, which the trainer keeps, get new shared memory


@dataclass(slots=True, weakref_slot=True)
class Block:
    """A worker's block; the last byte is the flag."""

    memory: mmap.mmap
    file: int
    address: int = 0
    used: weakref.ref[Array] | None = None  # by a tensor in this process

    def free(self) -> bool:
        """Whether neither process uses it."""
        here = self.used is not None and self.used() is not None
        return not here and self.memory[-1] == _FREE  # in this order: sending sets the flag first


class Handing:
    """Takes blocks for batches that a DataLoader's worker hands over. Not thread-safe."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """A block that nothing uses; as Recycler.take."""
        self._blocks = [block for block in self._blocks if block.memory[-1] != _GIVEN_UP]
        free = [block for block in self._blocks if block.free()]
        block = next((block for block in free if len(block.memory) > nbytes), None)
        if block is None and free and len(self._blocks) == _BLOCKS_MAX:  # all are too small
            self._blocks = [other for other in self._blocks if other is not free[0]]
        if block is None and len(self._blocks) < _BLOCKS_MAX:
            file = anonymous_file(nbytes + 1)
            block = Block(map_block(nbytes + 1, file), file)
            weakref.finalize(block, os.close, file).atexit = False
            self._blocks.append(block)
        if block is None:  # as torch's own collate does
            fresh = torch.UntypedStorage._new_shared(nbytes)  # type: ignore[no-untyped-call]
            return torch.empty(0, dtype=torch.uint8).set_(fresh)
        tensor, block.used = lend(block.memory, nbytes, lambda: None)
        block.address = tensor.data_ptr()
        return tensor

    def batch(self, parts: Parts) -> Batch:
        """The batch of `parts`, which is sent in the block that it lies in, if it does in one."""
        addresses = {block.address: block for block in self._blocks if not block.free()}
        if len(parts.blocks) == 1 and parts.blocks[0].data_ptr() in addresses:
            return HandedBatch.of(parts, addresses[parts.blocks[0].data_ptr()])
        return parts.together()


class HandedBatch(Batch):
    """A batch in a worker's block; it arrives as a Batch."""

    block: Block

    @classmethod
    def of(cls, parts: Parts, block: Block) -> HandedBatch:
        """The batch of `parts`, which lie in `block`."""
        batch = cls(parts.together())
        batch.block = block
        return batch

    def __copy__(self) -> HandedBatch:
        copied = HandedBatch(self)
        copied.block = self.block
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        parts = Parts.of(self)
        block = self.block
        if len(parts.blocks) != 1 or parts.blocks[0].data_ptr() != block.address:
            return super().__reduce__()
        block.memory[-1] = _SENT
        file = reduction.DupFd(block.file)
        nbytes = parts.blocks[0].nbytes
        return _receive, (parts.items, file, len(block.memory), nbytes, parts.views)


def _receive(
    items: dict[str, Any], file: Any, size: int, nbytes: int, views: dict[Key, View]
) -> Batch:
    opened = file.detach()
    memory = map_block(size, opened)
    os.close(opened)
    block, used = lend(memory, nbytes, lambda: None)
    array = used()
    assert array is not None  # noqa: S101 - the block has it
    weakref.finalize(array, _give_back, memory, FORKS, FORKS.count).atexit = False
    return Parts(items, (block,), views).together()


def _give_back(memory: mmap.mmap, forks: Forks, before: int) -> None:
    memory[-1] = _FREE if forks.count == before else _GIVEN_UP
