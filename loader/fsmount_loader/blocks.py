"""Blocks of memory that batches lie in, used again once nothing refers to them.

A fresh block costs more than decompressing into it: the kernel clears each page at first touch. So
a block is lent as a tensor over an array of its own; when the last view of the tensor's storage is
gone, the array dies, and a weak reference to it says so.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fsmount.errors import LoadError

Array = npt.NDArray[np.uint8]
Take = Callable[[int], torch.Tensor]  # bytes -> uint8 [bytes], a whole storage, not cleared

_FREE, _SENT, _GIVEN_UP = range(3)  # what a shared block's flag says
_SPARE_MAX = 4  # blocks that wait to be used again
_LENT_MAX = 512  # blocks in use; a process can have 65,530 mappings


@dataclass(slots=True)
class Forks:
    """How often this process was forked: a child may go on using what was lent before."""

    count: int = 0

    def add(self) -> None:
        """Count one more."""
        self.count += 1


FORKS = Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=FORKS.add)


def map_block(nbytes: int, file: int | None = None) -> mmap.mmap:
    """Map `nbytes` of `file`, or new memory that is this process's own, in a fork too.

    Raises LoadError if there is none.
    """
    try:
        if file is None:
            memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            memory = mmap.mmap(file, max(nbytes, 1))
    except OSError as error:
        raise _no_room(nbytes, error) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def anonymous_file(nbytes: int) -> int:
    """The descriptor of a new file of `nbytes` that has no name; a memfd where there is such.

    Raises LoadError if there can be none.
    """
    try:
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("fsmount-loader")
        else:
            with tempfile.TemporaryFile() as named:
                file = os.dup(named.fileno())
        os.truncate(file, nbytes)
    except OSError as error:
        raise _no_room(nbytes, error) from error
    return file


def _no_room(nbytes: int, error: OSError) -> LoadError:
    return LoadError(f"no room for a batch of {nbytes} bytes: {error.strerror}")


def lend(
    memory: mmap.mmap, nbytes: int, returned: Callable[[], object]
) -> tuple[torch.Tensor, weakref.ref[Array]]:
    """The first `nbytes` of `memory` as a tensor; `returned` is called when its storage is gone.

    It may be called in any thread. The weak reference, which has to be kept for that, is dead then.
    """
    array = np.frombuffer(memory, np.uint8, nbytes)
    return torch.from_numpy(array), weakref.ref(array, lambda _: returned())


@dataclass(slots=True, weakref_slot=True)
class SharedBlock:
    """A memfd that the process which made it and one receiver map.

    It ends in a flag: the maker sets it when the block is sent, the receiver clears it when no
    tensor uses the block any more. If the receiver was forked meanwhile, its child may use the
    block, which is given up then.
    """

    memory: mmap.mmap
    file: int  # its descriptor; -1 when it is closed
    address: int = 0  # of what was lent last
    _used: weakref.ref[Array] | None = None  # by a tensor in this process

    @classmethod
    def make(cls, nbytes: int) -> SharedBlock:
        """A new one with room for `nbytes`; LoadError."""
        file = anonymous_file(nbytes + 1)
        return cls(map_block(nbytes + 1, file), file)

    @property
    def room(self) -> int:
        """Bytes that can be lent."""
        return len(self.memory) - 1

    @property
    def is_free(self) -> bool:
        """Whether neither process uses it."""
        here = self._used is not None and self._used() is not None
        return not here and self.memory[-1] == _FREE  # in this order: sending sets the flag first

    @property
    def is_given_up(self) -> bool:
        """Whether it will never be free."""
        return self.memory[-1] == _GIVEN_UP

    def lend(self, nbytes: int) -> torch.Tensor:
        """The first `nbytes`, to be filled: uint8 [nbytes], a whole storage."""
        tensor, self._used = lend(self.memory, nbytes, lambda: None)
        self.address = tensor.data_ptr()
        return tensor

    def sent(self) -> None:
        """It is the receiver's until that gives it back."""
        self.memory[-1] = _SENT


def give_back(memory: mmap.mmap, forks: Forks, before: int) -> bool:
    """The receiver uses a SharedBlock no more, if it has not been forked since `before` forks.

    Returns whether it was given back, and not given up. `forks` is FORKS, which may be gone when
    the interpreter ends.
    """
    unforked = forks.count == before
    memory[-1] = _FREE if unforked else _GIVEN_UP
    return unforked


class Recycler:
    """Takes blocks of this process's own memory, each again when no tensor uses it any more."""

    def __init__(self) -> None:
        self._spare: deque[mmap.mmap] = deque()
        self._lent: dict[int, weakref.ref[Array]] = {}
        self._count = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """A block that nothing else uses: uint8 [nbytes], a whole storage, its content undefined.

        May be dropped before its blocks are.
        """
        if len(self._lent) >= _LENT_MAX:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        memory = self._spared(nbytes) or map_block(nbytes)
        spare, lent, number = self._spare, self._lent, self._count

        def returned() -> None:
            del lent[number]
            if len(spare) < _SPARE_MAX:
                spare.append(memory)

        self._count += 1
        block, lent[number] = lend(memory, nbytes, returned)
        return block

    def _spared(self, nbytes: int) -> mmap.mmap | None:
        while self._spare:
            memory = self._spare.pop()
            if len(memory) >= nbytes:
                return memory
        return None
