"""A batch: a dict of tensors that moves each block of memory once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Batch(dict[str, Any]):
    """A dict of tensors, first dimension the batch, and of lists.

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


class View(NamedTuple):
    """A tensor as a view of a block; offset and strides in elements."""

    block: int  # place among the blocks
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """The view of `block`, which is the block that it is of."""
        empty = torch.empty(0, dtype=self.dtype, device=block.device)
        return empty.set_(block.untyped_storage(), self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Parts:
    """A batch taken apart: blocks of memory, the tensors that are views of them, and the rest."""

    items: Mapping[str, Any]  # every entry in order; None for those in `views`
    blocks: tuple[torch.Tensor, ...]  # uint8, each a whole storage
    views: Mapping[str, View]

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Parts:
        """Take `batch` apart; storages of tensors that are nothing but a view become blocks."""
        blocks: dict[int, tuple[int, torch.Tensor]] = {}
        views: dict[str, View] = {}
        items: dict[str, Any] = {}
        for name, value in batch.items():
            items[name] = None if _plain(value) else value
            if not _plain(value):
                continue
            storage = value.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            place, _ = blocks.setdefault(storage.data_ptr(), (len(blocks), whole))
            offset, shape = value.storage_offset(), tuple(value.shape)
            views[name] = View(place, value.dtype, offset, shape, value.stride())
        return cls(items, tuple(block for _, block in blocks.values()), views)

    def together(self) -> Batch:
        """The batch."""
        batch = Batch(self.items)
        for name, view in self.views.items():
            batch[name] = view.of(self.blocks[view.block])
        return batch


def _rebuild(
    items: Mapping[str, Any], blocks: tuple[torch.Tensor, ...], views: Mapping[str, View]
) -> Batch:
    return Parts(items, blocks, views).together()


def _moved(batch: Batch, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    parts = Parts.of(batch)
    items = {n: move(v) if isinstance(v, torch.Tensor) else v for n, v in parts.items.items()}
    return Parts(items, tuple(map(move, parts.blocks)), parts.views).together()


def _plain(value: object) -> bool:
    """Whether `value` is a tensor that is nothing but a view of memory."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not (value.requires_grad or value.is_conj() or value.is_neg())
        and value.untyped_storage().nbytes() > 0
    )
