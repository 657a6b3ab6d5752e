"""ShardDataset: a mounted version as a torch IterableDataset of batches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed import device_mesh as meshes
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from fsmount.errors import FsmountError, PlanError, RankMismatchError
from fsmount_loader.batch import Batch
from fsmount_loader.division import Division
from fsmount_loader.epochs import Epochs, Skipped
from fsmount_loader.iteration import Items, Iteration
from fsmount_loader.options import (
    DEFAULT_SEEK_THRESHOLD,
    OnError,
    Options,
    Shapes,
    Transform,
    names,
    real,
    whole,
)
from fsmount_loader.order import (
    DEFAULT_BUCKET_SIZE,
    DEFAULT_CHUNK_SIZE,
    DEFAULT_WINDOW,
    EPOCH_BITS,
    Buckets,
    Order,
    cut,
    default_streams,
)
from fsmount_loader.passes import Pass
from fsmount_loader.plan import Plan, make_plan
from fsmount_loader.prepared import refuse_prepared
from fsmount_loader.ranks import Placement, agree, check_alone, find_placement
from fsmount_loader.signals import begin_torch_worker
from fsmount_loader.state import Identity, State
from fsmount_loader.values import lengths_digest
from fsmount_loader.version import VersionFiles, VersionName

T = TypeVar("T")

_LEAST_PATIENCE, _MOST_PATIENCE = 0.001, 1e9  # seconds; torch counts milliseconds


class ShardDataset(IterableDataset[Batch]):
    """The batches of one rank from a version mounted, or exported in the mount's layout, at `path`.

    Iterating yields whole batches: dicts of tensors with the samples' names, dtypes and shapes, and
    `__valid__`. The options are in docs/loading.md. Under DataLoader give `batch_size=None`; each
    worker then builds whole batches in turn. Every iteration is the next epoch unless `set_epoch`
    or `load_state_dict` said which; `len()` counts the batches of the next one. Workers share the
    epoch with the dataset that they were started with; a pickled or deep copy has one of its own.

    Construction plans the run and, where torch.distributed is initialised and no rank is given,
    waits until all ranks have come with the same plan. Raises PlanError (StateMismatchError and
    RankMismatchError are PlanErrors), FormatError, IntegrityError and LoadError.
    """

    def __init__(
        self,
        path: str | bytes | os.PathLike[str],
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        where: str | None = None,
        params: Sequence[Any] | Mapping[str, Any] | None = None,
        keyset: str | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        streams: int | None = None,
        window: int = DEFAULT_WINDOW,
        chunk_size: int = DEFAULT_CHUNK_SIZE,
        bucket_by: str | None = None,
        bucket_size: int = DEFAULT_BUCKET_SIZE,
        bucket_window: int | None = None,
        seek_threshold: int = DEFAULT_SEEK_THRESHOLD,
        max_pad_fraction: float = 0.1,
        drop_last: bool = False,
        evaluate: bool = False,
        fields: Sequence[str] | None = None,
        columns: Sequence[str] = (),
        keys: bool = False,
        transform: Transform | None = None,
        contiguous: bool = False,
        shapes: Shapes = "error",
        on_error: OnError = "raise",
        max_skipped: int = 100,
        retries: int = 3,
        prefetch: int = 2,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        device_mesh: meshes.DeviceMesh | None = None,
        agreement_timeout: float = 300.0,
    ) -> None:
        options = Options(
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            where=where,
            params=params,
            keyset=keyset,
            shuffle=shuffle,
            seed=seed,
            streams=streams,
            window=window,
            chunk_size=chunk_size,
            bucket_by=bucket_by,
            bucket_size=bucket_size,
            bucket_window=bucket_window,
            seek_threshold=seek_threshold,
            max_pad_fraction=max_pad_fraction,
            drop_last=drop_last,
            evaluate=evaluate,
            fields=None if fields is None else names("fields", fields),
            columns=names("columns", columns),
            keys=keys,
            transform=transform,
            contiguous=contiguous,
            shapes=shapes,
            on_error=on_error,
            max_skipped=max_skipped,
            retries=retries,
            prefetch=prefetch,
        )
        patience = real("agreement_timeout", agreement_timeout, _LEAST_PATIENCE, _MOST_PATIENCE)
        placement = find_placement(rank, world_size, process_group, device_mesh)
        try:
            plan = self._make_plan(VersionFiles.open(path), options)
            division = _division(len(plan.rows), options, placement)
            _check_memory(division.rank_batch, plan.layout.pitch)
        except FsmountError as error:
            with suppress(RankMismatchError):  # the others get it; this rank has its own error
                agree(placement, {"error": str(error)}, patience)
            raise
        self._plan = plan
        self._version = plan.files.name()
        self._options = options
        self._division = division
        self._order = _order(plan, options)
        self._identity = _identity(plan, options, self._order)
        self._epochs = Epochs()
        self._skipped = Skipped(options.max_skipped)
        self._assumed = placement.assumed
        agree(placement, _shared(self._identity, division, options), patience)

    @property
    def version(self) -> VersionName:
        """Which version it reads; states have it too, for people: what counts is the selection."""
        return self._version

    def __repr__(self) -> str:
        options, division = self._options, self._division
        told = [f"{type(self).__name__}({self._plan.files.root!r}: {self._version}"]
        told += [f"{len(self._plan.rows):,} samples"]
        told += [
            f"{name}={value!r}"
            for name in ("where", "keyset", "fields")
            if (value := getattr(options, name)) is not None
        ]
        told += [f"batch {division.rank_batch} of rank {division.rank} of {division.world_size}"]
        told += [f"{'shuffled' if options.shuffled else 'in order'}, seed {options.seed}"]
        return f"{', '.join(told)})"

    @property
    def skipped(self) -> int:
        """Samples skipped so far under `on_error="skip"`, by all workers of this rank."""
        return self._skipped.total()

    def __len__(self) -> int:
        """The number of batches that the next iteration yields, the same on every rank."""
        _, start = self._epochs.next()
        return self._division.batches(start)

    def __iter__(self) -> Iteration[Batch]:
        """This process's batches of the next epoch: all, or a DataLoader worker's share."""
        return self._iteration(_batches)

    def begin_pass(self, unused: Pass | None = None) -> Pass:
        """Begin the next epoch, as iterating in this process does, and say what it is.

        If `unused` began last, it is returned instead; no epoch and no state may have been set
        since.
        """
        if unused is not None and self._epochs.latest() == (unused.epoch, unused.start):
            return unused
        return self._pass(*self._epochs.begin())

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be `epoch`, from its start.

        In the epoch of a state just loaded the position stays; if that epoch was finished, the
        iteration is empty.
        """
        refuse_prepared(self)
        self._epochs.set_epoch(whole("epoch", epoch, 0, EPOCH_BITS))

    def state_after(self, batches: int) -> dict[str, Any]:
        """The state once `batches` batches of the latest iteration are consumed, as a JSON object.

        For a plain DataLoader, whose workers run ahead of the training loop, which alone knows the
        number. ShardLoader counts by itself. Raises PlanError for more batches than it has.
        """
        epoch, start = self._epochs.latest()
        batches, most = whole("batches", batches), self._division.batches(start)
        if batches > most:
            raise PlanError(f"batches={batches}, but the latest iteration has only {most}")
        return self.state_at(epoch, self._division.after(start, batches))

    def next_state(self) -> dict[str, Any]:
        """The state before the next iteration."""
        return self.state_at(*self._epochs.next())

    def state_at(self, epoch: int, position: int) -> dict[str, Any]:
        """The state at a position of an epoch."""
        state = State(self._identity, epoch, position).to_dict()
        return {**state, "version": asdict(self.version)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where `state` was taken; a finished epoch is followed by the
        next.

        The world size, the batch size and the number of workers may be others. Raises
        StateMismatchError naming what differs if the rows, the seed or an order option does.
        """
        loaded = State.load(state, self._identity)
        finished = self._division.batches(loaded.position) == 0
        self._epochs.set_position(loaded.epoch, loaded.position, finished=finished)

    @property
    def settings(self) -> int:
        """How often an epoch or a state was set; it tells whether a pass is still the latest."""
        return self._epochs.settings

    def _make_plan(self, files: VersionFiles, options: Options) -> Plan:
        return make_plan(files, options)

    def _iteration(self, items: Items[T]) -> Iteration[T]:
        """Begin the next epoch, or a DataLoader worker's share of it."""
        refuse_prepared(self)
        info = get_worker_info()
        worker, workers = (0, 0) if info is None else (info.id, info.num_workers)
        if workers:
            begin_torch_worker()
        begun = self._pass(*self._epochs.begin(worker, workers))
        identity, epochs = self._identity, self._epochs
        return Iteration(items, begun, worker, workers, identity=identity, epochs=epochs)

    def _pass(self, epoch: int, start: int) -> Pass:
        if self._assumed:
            check_alone()
        return Pass(
            plan=self._plan,
            options=self._options,
            order=self._order,
            division=self._division,
            skipped=self._skipped,
            epoch=epoch,
            start=start,
        )


def _batches(
    begun: Pass, worker: int, workers: int, done: int, _: int
) -> Iterator[tuple[Batch, int, int]]:
    for number, batch in enumerate(begun.batches(worker, workers, done), done + 1):
        yield batch, number, 0


def _refuse_to_collate(batches: object, *, collate_fn_map: object = None) -> NoReturn:
    raise PlanError("a ShardDataset yields whole batches: give its DataLoader batch_size=None")


default_collate_fn_map[Batch] = _refuse_to_collate


def _order(plan: Plan, options: Options) -> Order:
    bounds = cut(plan.selected.rows_per_shard, options.chunk_size)
    streams = options.streams or default_streams(len(bounds) - 1)
    buckets = None
    if plan.lengths is not None:
        buckets = Buckets(plan.lengths, options.bucket_positions, options.bucket_size)
    return Order(bounds, options.seed, options.shuffled, streams, options.window, buckets)


def _identity(plan: Plan, options: Options, order: Order) -> Identity:
    shuffled, buckets = options.shuffled, order.buckets
    return Identity(
        selection=plan.selected.digest,
        samples=len(plan.rows),
        seed=options.seed,
        shuffle=shuffled,
        streams=order.streams if shuffled else None,
        window=options.window if shuffled else None,
        chunk_size=options.chunk_size if shuffled else None,
        bucket_by=options.bucket_by,
        bucket_size=buckets.size if buckets else None,
        bucket_window=buckets.window if buckets else None,
        lengths=lengths_digest(buckets.lengths) if buckets else None,
    )


def _division(samples: int, options: Options, placement: Placement) -> Division:
    division = Division(
        samples=samples,
        global_batch=options.global_batch(placement.world_size),
        world_size=placement.world_size,
        rank=placement.rank,
        interleaved=options.shuffled,
        drop_last=options.drop_last,
    )
    size, padding = division.global_batch, division.pad_fraction()
    if not division.batches(0):
        raise PlanError(f"drop_last=True leaves none of {samples} samples: a batch takes {size}")
    if padding > options.max_pad_fraction and not options.evaluate:
        raise PlanError(
            f"{samples} samples in global batches of {size}: {padding:.0%} would be padding, over "
            f"max_pad_fraction={options.max_pad_fraction:g}; choose a smaller batch_size or "
            "global_batch_size, or set drop_last=True, evaluate=True or a larger max_pad_fraction"
        )
    return division


def _check_memory(samples: int, row: int) -> None:
    """Refuse a batch that this machine can't hold, before anything is made for it."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if samples * row > memory:
        raise PlanError(
            f"a batch of {samples} samples takes {samples * row / 2**30:.1f} GiB, and this machine "
            f"has {memory / 2**30:.1f}; choose a smaller batch_size or global_batch_size"
        )


def _shared(identity: Identity, division: Division, options: Options) -> dict[str, object]:
    """What must be equal on all ranks."""
    return {
        **asdict(identity),
        "global_batch_size": division.global_batch,
        "drop_last": options.drop_last,
        "evaluate": options.evaluate,
        "fields": options.fields,
        "columns": options.columns,
        "keys": options.keys,
        "shapes": options.shapes,
    }
