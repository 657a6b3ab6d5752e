"""A batch: a dict of tensors that moves each block of memory once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_View = tuple[int, torch.dtype, int, tuple[int, ...], tuple[int, ...]]


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
        return _rebuild, _taken_apart(self)


def _moved(batch: Batch, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    items, blocks, views = _taken_apart(batch)
    alone = {n: move(v) if isinstance(v, torch.Tensor) else v for n, v in items.items()}
    return _rebuild(alone, tuple(map(move, blocks)), views)


def _taken_apart(
    batch: Mapping[str, Any],
) -> tuple[dict[str, Any], tuple[torch.Tensor, ...], dict[str, _View]]:
    """The entries that are no plain tensors, the blocks of the others, and their views of those."""
    blocks: dict[int, tuple[int, torch.Tensor]] = {}
    views: dict[str, _View] = {}
    items: dict[str, Any] = {}
    for name, value in batch.items():
        if not _plain(value):
            items[name] = value
            continue
        items[name] = None  # keeps the order
        storage = value.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
        place, _ = blocks.setdefault(storage.data_ptr(), (len(blocks), whole))
        views[name] = (place, value.dtype, value.storage_offset(), value.shape, value.stride())
    return items, tuple(block for _, block in blocks.values()), views


def _rebuild(
    items: Mapping[str, Any], blocks: tuple[torch.Tensor, ...], views: Mapping[str, _View]
) -> Batch:
    batch = Batch(items)
    for name, (place, dtype, offset, shape, stride) in views.items():
        block = blocks[place]
        empty = torch.empty(0, dtype=dtype, device=block.device)
        batch[name] = empty.set_(block.untyped_storage(), offset, shape, stride)
    return batch


def _plain(value: object) -> bool:
    """Whether `value` is a tensor that is nothing but a view of memory."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not (value.requires_grad or value.is_conj() or value.is_neg())
        and value.untyped_storage().nbytes() > 0
    )
