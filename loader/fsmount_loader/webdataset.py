"""The verified stream as a source for pipelines of the webdataset library, and decoders for it.

docs/webdataset.md tells how they are used. Needs the extra `fsmount[webdataset]`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

from fsmount.errors import FsmountError, IntegrityError, PlanError
from fsmount.formats import sample
from fsmount_loader.dataset import ShardDataset
from fsmount_loader.iteration import Iteration
from fsmount_loader.options import Options
from fsmount_loader.passes import Pass
from fsmount_loader.plan import MOST_ZSTD_SAVES, Plan, make_plan
from fsmount_loader.prepared import refuse_prepared
from fsmount_loader.read import Reader
from fsmount_loader.values import columns_of
from fsmount_loader.version import VersionFiles

try:
    import webdataset as library
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "fsmount_loader.webdataset needs the webdataset library: pip install 'fsmount[webdataset]'",
        name=error.name,
    ) from error

__all__ = ["ShardSamples", "decoder", "spread", "tensor_decoder"]

_log = logging.getLogger("fsmount_loader")

Sample = dict[str, Any]

MEMBER = sample.SUFFIX.removeprefix(".")  # the library's name for a member's payload
_OF_BATCHES = {"fields": None, "transform": None, "contiguous": False, "shapes": "error"}
_SPLITTERS = (library.split_by_node, library.split_by_worker, library.single_node_only)


def decoder(name: str, data: bytes) -> dict[str, NDArray[Any]] | None:
    """For the library's `decode`: the arrays of a tensor member as they were packed, bit for bit.

    They can be written. None for what is no `.safetensors.zst`. Raises IntegrityError for a damaged
    member, FormatError for one that is not ours.
    """
    return _arrays(data) if name.lower().endswith(sample.SUFFIX) else None


def tensor_decoder(name: str, data: bytes) -> dict[str, torch.Tensor] | None:
    """As `decoder`, but tensors as ShardDataset has them.

    Byte order is the machine's, memory order is C; `datetime64` and `timedelta64` are int64.
    """
    arrays = decoder(name, data)
    return None if arrays is None else {name: _tensor(array) for name, array in arrays.items()}


def spread(decoded: Sample) -> Sample:
    """For the library's `map`: a decoded sample with its arrays by name in place of the member.

    Raises PlanError if the member is not decoded, or if an array has the name of something else.
    """
    rest = {name: value for name, value in decoded.items() if name != MEMBER}
    arrays = decoded.get(MEMBER)
    if not isinstance(arrays, dict):
        raise PlanError(f"sample {decoded.get('__key__')!r} has no decoded {MEMBER}: decode first")
    if both := rest.keys() & arrays.keys():
        raise PlanError(f"sample {decoded.get('__key__')!r}: two entries are {min(both)!r}")
    return rest | arrays


class _Fluid(library.FluidInterface):  # type: ignore[misc] # it has no types
    """The library's filters as methods."""

    def decode(
        self,
        *args: str | Callable[[str, bytes], Any],
        pre: Sequence[Callable[[str, bytes], Any]] | None = None,
        post: Sequence[Callable[[str, bytes], Any]] | None = None,
        only: str | Collection[str] | None = None,
        partial: bool = False,
        handler: Callable[[Exception], bool] = library.reraise_exception,
    ) -> _Pipeline:
        """The library's `decode`, with `decoder` behind the handlers that are given."""
        pipeline: _Pipeline = super().decode(
            *args, decoder, pre=pre, post=post, only=only, partial=partial, handler=handler
        )
        return pipeline


class _Stages(Iterator[Any]):
    """What a pipeline yields, whose stages may hold samples back: it has no state."""

    def __init__(self, stages: Iterator[Any]) -> None:
        self._stages = stages

    def __next__(self) -> Any:
        return next(self._stages)

    def state_dict(self) -> NoReturn:
        """For torchdata's StatefulDataLoader, which would count what comes out, from epoch 0."""
        raise PlanError(
            "a pipeline of the webdataset library can't be resumed by a StatefulDataLoader: take "
            "torch's DataLoader, and the ShardSamples' state_after and load_state_dict"
        )

    def load_state_dict(self, state: object) -> NoReturn:
        """Not at all either."""
        self.state_dict()


class _Pipeline(library.DataPipeline, _Fluid):  # type: ignore[misc]
    """A pipeline of the library that begins with a ShardSamples."""

    def __iter__(self) -> Iterator[Any]:
        """What the last stage yields in the next epoch."""
        refuse_prepared(self)
        return _Stages(super().__iter__())

    def append(self, f: Any) -> None:
        """Add a stage; PlanError for one that would split a second time."""
        stage = f.func if isinstance(f, partial) else f
        if any(stage is splitter for splitter in _SPLITTERS):
            raise PlanError(
                f"{stage.__name__} would drop samples: ShardSamples gives each rank and each "
                "worker its own"
            )
        super().append(f)


class ShardSamples(ShardDataset, _Fluid):
    """The samples of one rank, one by one, as the library's WebDataset makes them from the shards.

    A sample is a dict: `__key__`, `__url__` (the shard's path), `__valid__` (False for padding),
    `safetensors.zst` (the checked payload, bytes), `json` (the sidecar, bytes) if there is one, and
    `__columns__`, a dict, if `columns` are asked for. It is a source for the library's DataPipeline
    and has its filters as methods.

    Options, epochs, state and errors are ShardDataset's, but that samples may have different
    arrays, that with `evaluate=True` there is no padding, that a skipped sample is left out, and
    that `fields`, `transform`, `contiguous` and `shapes` can't be set. A batch is `batch_size`
    samples that follow each other: the unit of workers and of `state_after`.
    """

    def __len__(self) -> int:
        """The number of samples that the next iteration yields, if none is skipped."""
        _, start = self._epochs.next()
        batches, size = self._division.batches(start), self._division.rank_batch
        if not batches or not self._options.evaluate:
            return batches * size
        _, valid = self._division.positions(start, batches - 1)
        return (batches - 1) * size + int(valid.sum())

    def __iter__(self) -> Iteration[Sample]:  # type: ignore[override] # no batches
        """This process's samples of the next epoch: all, or a DataLoader worker's share."""
        return self._iteration(self._samples)

    def compose(self, *stages: Any) -> _Pipeline:
        """A pipeline of the library: this source, and `stages` behind it."""
        pipeline: _Pipeline = _Pipeline(self).compose(*stages)
        return pipeline

    def begin_pass(self, unused: Pass | None = None) -> NoReturn:
        """Not for samples."""
        raise PlanError("a ShardLoader builds batches: give ShardSamples to a DataLoader")

    def _make_plan(self, files: VersionFiles, options: Options) -> Plan:
        for name, default in _OF_BATCHES.items():
            if getattr(options, name) != default:
                raise PlanError(f"{name} is for batches: ShardSamples delivers whole members")
        plan = make_plan(files, options, alike=False)
        self._beside = columns_of(files, ["__key__", "__sidecar__"], plan.selected)
        return plan

    def _samples(
        self, begun: Pass, worker: int, workers: int, batches: int, samples: int
    ) -> Iterator[tuple[Sample, int, int]]:
        with begun.reader() as reader:
            for planned in begun.planned(reader, worker, max(workers, 1), batches):
                chosen = planned.valid if self._options.evaluate else slice(None)
                rows = planned.rows[chosen][samples:]
                valid = planned.valid[chosen][samples:].tolist()
                read = chain.from_iterable(reader.payloads(rows))
                payloads = {place: _kept(payload) for place, payload in read}
                for place, row in enumerate(rows.tolist()):
                    payload = self._framed(row, payloads.pop(place), reader)
                    if isinstance(payload, FsmountError):
                        self._failed(payload, worker)
                    else:
                        done = samples + place + 1
                        yield self._sample(row, payload, valid=valid[place]), batches, done
                batches, samples = batches + 1, 0

    def _framed(
        self, row: int, payload: bytes | FsmountError, reader: Reader
    ) -> bytes | FsmountError:
        """A payload whose frame says that it holds what the manifest says, or the error."""
        if isinstance(payload, FsmountError):
            return payload
        size = self._plan.layout.raw_size[int(self._plan.rows.schema[row])]
        if _frame_size(payload) == size:
            return payload
        return IntegrityError(f"{reader.where(row)}: the payload does not hold {size} bytes")

    def _sample(self, row: int, payload: bytes, *, valid: bool) -> Sample:
        made: Sample = {
            "__key__": self._beside["__key__"][row].as_py(),
            "__url__": self._plan.shards[int(self._plan.rows.shard[row])],
            "__valid__": valid,
            MEMBER: payload,
        }
        sidecar = self._beside["__sidecar__"][row].as_py()
        if sidecar is not None:
            made["json"] = sidecar
        if self._options.columns:
            columns = {name: self._plan.columns[name][row] for name in self._options.columns}
            made["__columns__"] = {
                name: value.item() if isinstance(value, np.generic) else value.as_py()
                for name, value in columns.items()
            }
        return made

    def _failed(self, error: FsmountError, worker: int) -> None:
        if self._options.on_error == "raise":
            raise error
        _log.warning("skipped: %s", error)
        self._skipped.add(worker, error)


def _kept(payload: memoryview | FsmountError) -> bytes | FsmountError:
    return payload if isinstance(payload, FsmountError) else bytes(payload)


def _frame_size(data: bytes) -> int:
    """How many bytes a frame says that it holds; -1 if it is none, or doesn't say."""
    try:
        return int(zstandard.frame_content_size(data))
    except zstandard.ZstdError:
        return -1


def _arrays(data: bytes) -> dict[str, NDArray[Any]]:
    size = _frame_size(data)
    if size < 0 or size >> MOST_ZSTD_SAVES > len(data):
        raise IntegrityError(f"a payload of {len(data)} bytes that can't be decompressed")
    return sample.decode(memoryview(bytearray(sample.decompress(data, size))))


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    native = np.asarray(array, array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(native.view(np.int64) if native.dtype.kind in "mM" else native)
