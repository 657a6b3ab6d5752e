"""A batch: a dict of tensors that moves each block of memory once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch


class Batch(dict[str, Any]):
    """A dict of tensors, first dimension the batch, and of lists, be it of tensors.

    `__valid__` is a bool tensor, False for padding and for skipped samples. Tensors may be views of
    one block; `pin_memory`, `to` and sending it to another process move that block once, and keep
    what shares memory sharing it.
    """

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """This batch with its tensors on `device`."""
        return _moved(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """This batch with its tensors in page-locked memory."""
        return _moved(self, lambda tensor: tensor.pin_memory())

    def __reduce__(self) -> tuple[Any, ...]:
        parts = Parts.of(self)
        return _rebuild, (parts.items, parts.blocks, parts.views)


def packed_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a packed tensor."""
    return tuple(prod(shape[at + 1 :]) for at in range(len(shape)))


class View(NamedTuple):
    """A tensor as a view of a block; offset and strides in elements."""

    block: int  # place among the blocks
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def packed(cls, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> View:
        """A packed tensor from byte `start` of the first block on."""
        return cls(0, dtype, start // dtype.itemsize, shape, packed_stride(shape))

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """The view of `block`, which is the block that it is of."""
        empty = block.new_empty(0, dtype=self.dtype)
        return empty.set_(block.untyped_storage(), self.offset, self.shape, self.stride)


Key: TypeAlias = str | tuple[str, int]  # an entry of a batch, or its name and a place in its list
_Blocks: TypeAlias = dict[int, tuple[int, torch.Tensor]]  # by address: place, and the block


@dataclass(frozen=True, slots=True)
class Parts:
    """A batch taken apart: blocks of memory, the tensors that are views of them, and the rest."""

    items: Mapping[str, Any]  # every entry in order; None for what is in `views`
    blocks: tuple[torch.Tensor, ...]  # uint8, each a whole storage
    views: Mapping[Key, View]

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Parts:
        """Take `batch` apart; storages of tensors that are nothing but a view become blocks."""
        blocks: _Blocks = {}
        views: dict[Key, View] = {}
        items: dict[str, Any] = {}
        for name, value in batch.items():
            listed = type(value) is list
            rest = list(value) if listed else [value]
            for place, one in enumerate(rest):
                if _plain(one):
                    views[(name, place) if listed else name] = _view(one, blocks)
                    rest[place] = None
            items[name] = rest if listed else rest[0]
        return cls(items, tuple(block for _, block in blocks.values()), views)

    def together(self) -> Batch:
        """The batch."""
        batch = Batch(self.items)
        for name in {key[0] for key in self.views if not isinstance(key, str)}:
            batch[name] = list(batch[name])
        for key, view in self.views.items():
            tensor = view.of(self.blocks[view.block])
            if isinstance(key, str):
                batch[key] = tensor
            else:
                batch[key[0]][key[1]] = tensor
        return batch


def _rebuild(
    items: Mapping[str, Any], blocks: tuple[torch.Tensor, ...], views: Mapping[Key, View]
) -> Batch:
    return Parts(items, blocks, views).together()


def _moved(batch: Batch, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    parts = Parts.of(batch)
    items = {name: _each_moved(value, move) for name, value in parts.items.items()}
    return Parts(items, tuple(map(move, parts.blocks)), parts.views).together()


def _each_moved(value: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if type(value) is list:
        return [_each_moved(one, move) for one in value]
    return move(value) if isinstance(value, torch.Tensor) else value


def _view(value: torch.Tensor, blocks: _Blocks) -> View:
    """`value` as a view of its whole storage, which is one of `blocks` or becomes one."""
    storage = value.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
    place, _ = blocks.setdefault(storage.data_ptr(), (len(blocks), whole))
    offset, shape = int(value.storage_offset()), tuple(value.shape)
    return View(place, value.dtype, offset, shape, value.stride())


def _plain(value: object) -> bool:
    """Whether `value` is a tensor that is nothing but a view of memory."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not (value.requires_grad or value.is_conj() or value.is_neg())
        and value.untyped_storage().nbytes() > 0
    )
