"""A batch: a dict of tensors that moves each block of memory once."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils import _pytree as pytree


class Batch(dict[str, Any]):
    """A dict of tensors, first dimension the batch, and of lists, be it of tensors.

    `__valid__` is a bool tensor, False for padding and for skipped samples. Tensors may be views of
    one block; `pin_memory`, `to` and sending it to another process move that block once, and keep
    what shares memory sharing it.

    It is a pytree node, as a dict is. `pickle` and `torch.save` write a plain OrderedDict of packed
    tensors, which `torch.load` takes with `weights_only=True`; `Batch(loaded)` is a batch again.
    """

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """This batch with its tensors on `device`."""
        return _moved(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """This batch with its tensors in page-locked memory."""
        return _moved(self, lambda tensor: tensor.pin_memory())

    def copy(self) -> Batch:
        """A batch of the same tensors."""
        return Batch(self)

    def __copy__(self) -> Batch:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Batch:
        parts = Parts.of(self)
        items, blocks = copy.deepcopy((parts.items, parts.blocks), memo)
        return Parts(items, blocks, parts.views).together()

    def __or__(self, other: Mapping[str, Any]) -> Batch:  # type: ignore[override]
        return Batch(dict(self) | dict(other))

    def __ror__(self, other: Mapping[str, Any]) -> Batch:  # type: ignore[override]
        return Batch(dict(other) | dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        # What torch.load may call is a short list, and pickling views would write their block again
        # for each of them.
        return OrderedDict, (), None, None, _packed(self)


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


def _packed(batch: Batch) -> Iterator[tuple[str, Any]]:
    """Entries of a batch without blocks."""
    for name, value in batch.items():
        if type(value) is list:
            yield name, list(map(_clone, value))
        else:
            yield name, _clone(value)


def _clone(value: Any) -> Any:
    return value.clone(memory_format=torch.contiguous_format) if _plain(value) else value


def _sent(batch: Batch) -> tuple[Any, ...]:
    parts = Parts.of(batch)
    return rebuild, (parts.items, parts.blocks, parts.views)


def _leaves(batch: Batch) -> tuple[list[Any], list[str]]:
    return list(batch.values()), list(batch)


def _leaves_with_keys(batch: Batch) -> tuple[list[tuple[Any, Any]], list[str]]:
    return [(pytree.MappingKey(name), value) for name, value in batch.items()], list(batch)


def _of_leaves(values: Iterable[Any], names: list[str]) -> Batch:
    return Batch(zip(names, values, strict=True))


def register_node(kind: type[Batch]) -> None:
    """Have torch take a `kind` apart as it does a dict; what is put together is a Batch."""
    pytree.register_pytree_node(
        kind,
        _leaves,
        _of_leaves,
        serialized_type_name=f"fsmount_loader.{kind.__name__}",
        flatten_with_keys_fn=_leaves_with_keys,
    )


register_node(Batch)
ForkingPickler.register(Batch, _sent)


def rebuild(
    items: Mapping[str, Any], blocks: tuple[torch.Tensor, ...], views: Mapping[Key, View]
) -> Batch:
    """The batch of what it was taken apart into; `Parts` themselves are not sent."""
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
