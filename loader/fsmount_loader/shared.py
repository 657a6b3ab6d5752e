"""Batches from a worker process to the trainer, in blocks of memory that both map.

A block is a memfd: containers have 64 MB of /dev/shm, and nothing is left behind whoever dies. The
worker makes it and sends its descriptor once. The trainer lends it to the training loop and gives
it back, by its flag, when no tensor uses it any more; then the worker fills it again.
"""

from __future__ import annotations

import mmap
import os
import pickle
import resource
import weakref
from collections.abc import Mapping
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from fsmount_loader.batch import Batch, Key, Parts, View
from fsmount_loader.blocks import FORKS, Array, SharedBlock, give_back, lend, map_block

_ALIGNMENT = 64
_KEPT_MAX = 512  # blocks of a worker that may be kept; a process can have 65,530 mappings
_KEPT_LEAST = 4


def most_kept(workers: int) -> int:
    """How many blocks of each of `workers` may be kept: a mapping holds a descriptor open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _KEPT_MAX if soft == resource.RLIM_INFINITY else soft // (4 * workers)
    return max(_KEPT_LEAST, min(_KEPT_MAX, limit))


class _Message(NamedTuple):
    """A batch. The descriptors of its fresh blocks follow."""

    fresh: list[tuple[int, int]]  # number and size of blocks that the trainer has not met
    dropped: list[int]  # blocks that will not come again
    places: list[tuple[int, int]]  # the batch's blocks: number, and bytes of it in use
    views: bytes | None  # pickled; None: as in the message before
    items: Mapping[str, Any]


class Packed(NamedTuple):
    """A batch on its way: the pickled message, and the numbers of its blocks."""

    message: bytes
    blocks: list[int]


class Sender:
    """The worker's end. Not thread-safe."""

    def __init__(self, connection: Connection, spare_max: int) -> None:
        self._connection = connection
        self._spare_max = spare_max  # blocks that wait to be filled again
        self._blocks: dict[int, SharedBlock] = {}
        self._taken: list[int] = []  # since the last batch
        self._dropped: list[int] = []
        self._count = 0
        self._views: Mapping[Key, View] = {}

    def ordered(self) -> bool:
        """Wait until one more batch is wanted; False: none will be. EOFError if nobody is there."""
        return bool(self._connection.recv_bytes())

    def take(self, nbytes: int) -> torch.Tensor:
        """A block that neither process uses, the smallest that fits; as Recycler.take."""
        free = self._free()
        number = next((number for number in free if self._blocks[number].room >= nbytes), None)
        if number is None:
            self._count += 1
            number = self._count
            self._blocks[number] = SharedBlock.make(nbytes)
        else:
            free.remove(number)
        for surplus in free[: max(0, len(free) - self._spare_max)]:
            self._drop(surplus)
        self._taken.append(number)
        return self._blocks[number].lend(nbytes)

    def pack(self, parts: Parts) -> Packed:
        """A batch as it is sent; what lies in no block taken for it is copied into one.

        Raises what pickling raises.
        """
        places, views = self._placed(parts)
        fresh = [(n, len(self._blocks[n].memory)) for n, _ in places if self._blocks[n].file >= 0]
        told = None if views == self._views else pickle.dumps(views)
        message = pickle.dumps(_Message(fresh, self._dropped, places, told, parts.items))
        self._views, self._dropped = views, []
        return Packed(message, [number for number, _ in places])

    def send(self, batch: Packed) -> None:
        """Send a batch; OSError if nobody is there."""
        blocks = [self._blocks[number] for number in batch.blocks]
        for block in blocks:
            block.sent()
        self._connection.send_bytes(batch.message)
        for block in blocks:
            if block.file >= 0:
                reduction.send_handle(self._connection, block.file, 0)
                os.close(block.file)
                block.file = -1
        self._taken = []

    def fail(self, error: Exception) -> None:
        """Have the trainer raise `error` in place of the next batch."""
        self._connection.send_bytes(pickle.dumps(error))

    def _free(self) -> list[int]:
        """The blocks that can be taken, the smallest first. Those given up are forgotten."""
        self._blocks = {n: block for n, block in self._blocks.items() if not block.is_given_up}
        free = [n for n, block in self._blocks.items() if block.is_free and n not in self._taken]
        return sorted(free, key=lambda number: self._blocks[number].room)

    def _drop(self, number: int) -> None:
        block = self._blocks.pop(number)
        if block.file >= 0:
            os.close(block.file)
        else:
            self._dropped.append(number)

    def _placed(self, parts: Parts) -> tuple[list[tuple[int, int]], Mapping[Key, View]]:
        """Where the batch's blocks lie, and its views of those."""
        mine = {self._blocks[number].address: number for number in self._taken}
        inside = [block.data_ptr() in mine for block in parts.blocks]
        places = [
            (mine[block.data_ptr()], block.nbytes)
            for block, here in zip(parts.blocks, inside, strict=True)
            if here
        ]
        if all(inside):
            return places, parts.views
        moved = {}  # of each block: its new place, and how far into it
        end = here = 0
        for old, block in enumerate(parts.blocks):
            if inside[old]:
                moved[old], here = (here, 0), here + 1
            else:
                moved[old] = (len(places), end)
                end += block.nbytes + -block.nbytes % _ALIGNMENT
        extra = self.take(end)
        for old, (place, start) in moved.items():
            if place == len(places):
                extra[start : start + parts.blocks[old].nbytes] = parts.blocks[old].cpu()
        views = {name: _shifted(view, *moved[view.block]) for name, view in parts.views.items()}
        return [*places, (self._taken[-1], end)], views


class Receiver:
    """The trainer's end of one worker. Not thread-safe, but blocks may be dropped in any thread.

    Batches beyond `kept_max` that are kept are copies.
    """

    def __init__(self, connection: Connection, kept_max: int) -> None:
        self._connection = connection
        self._kept_max = kept_max
        self._memory: dict[int, mmap.mmap] = {}
        self._lent: dict[int, weakref.ref[Array]] = {}
        self._views: dict[Key, View] = {}

    @property
    def kept(self) -> int:
        """Blocks that some tensor uses."""
        return len(self._lent)

    def order(self) -> None:
        """Want one more batch; OSError if the worker is gone."""
        self._connection.send_bytes(b"1")

    def receive(self) -> Batch | Exception:
        """The next batch, or what the worker raised; EOFError or OSError if it is gone."""
        message = pickle.loads(self._connection.recv_bytes())  # noqa: S301 - from our own child
        if isinstance(message, Exception):
            return message
        for number in message.dropped:
            del self._memory[number]
        for number, size in message.fresh:
            file = reduction.recv_handle(self._connection)
            self._memory[number] = map_block(size, file)
            os.close(file)
        if message.views is not None:
            self._views = pickle.loads(message.views)  # noqa: S301
        blocks = tuple(self._lend(number, nbytes) for number, nbytes in message.places)
        return Parts(message.items, blocks, self._views).together()

    def _lend(self, number: int, nbytes: int) -> torch.Tensor:
        lent, memories, memory = self._lent, self._memory, self._memory[number]
        give, forks, before = give_back, FORKS, FORKS.count

        def returned() -> None:
            del lent[number]
            if not give(memory, forks, before):
                del memories[number]

        full = len(lent) >= self._kept_max
        block, lent[number] = lend(memory, nbytes, returned)
        return block.clone() if full else block


def _shifted(view: View, block: int, start: int) -> View:
    return view._replace(block=block, offset=view.offset + start // view.dtype.itemsize)
