"""Running tasks: here, or in processes that end with us."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Protocol

from fsmount.errors import PackWorkerError
from fsmount.pack.build import build_partition
from fsmount.pack.source import SourceSample
from fsmount.pack.task import Context, Result, Task
from fsmount.store.inside import names_in

_POLL = 0.2  # seconds between looks at what the workers have counted
_START = 2.0  # seconds of work in one process, below which more of them don't pay
_FRESH = 1e-3  # seconds that a sample takes which has to be read, and a byte of its file
_BYTE = 1 / 40e6
_KNOWN = 1e-4  # seconds that a sample takes which is as it was
_LOOKED_AT = 20_000  # samples up to which a look at what is known pays
_SPAWN = multiprocessing.get_context("spawn")


class Progress(Protocol):
    """Told what has been done so far, in samples and bytes of source files."""

    def __call__(self, samples: int, source_bytes: int) -> None: ...


class _StoppedError(Exception):
    """Another task failed, or the user interrupted: a worker gives up between two samples."""


def run(
    tasks: Sequence[Task], context: Context, workers: int | None, progress: Progress
) -> list[Result]:
    """Do `tasks` in so many processes, and return what they built, in their order.

    None: one process a core, if starting them takes less time than it saves.

    The first failure stops the rest between two samples and is raised; PackWorkerError, which names
    the partitions then in flight, for a process that died.
    """
    count = min(len(tasks), workers or _worthwhile(tasks, context))
    if count < 2:
        return _run_here(tasks, context, progress)
    shared = _Shared.of(len(tasks))
    with _pool(count, shared) as pool:
        try:
            with uninterrupted():  # the workers start here and inherit that
                futures = [pool.submit(_work, task, context) for task in tasks]
            _watch(futures, shared, progress)
        except BrokenProcessPool as error:
            raise PackWorkerError(_obituary(tasks, context)) from error
        return [future.result() for future in futures]


def _worthwhile(tasks: Sequence[Task], context: Context) -> int:
    """How many processes do `tasks` soonest: one a core, or just this one."""
    samples = sum(len(task.samples) for task in tasks)
    seconds = sum(_seconds(task.samples, {}) for task in tasks)
    if seconds > _START and samples <= _LOOKED_AT and not context.force:
        seconds = sum(_seconds(task.samples, _known(task, context)) for task in tasks)
    return len(os.sched_getaffinity(0)) if seconds > _START else 1


def _known(task: Task, context: Context) -> Mapping[str, SourceSample]:
    return (task.previous and context.memory.samples(task.previous)) or {}


def _seconds(samples: Sequence[SourceSample], known: Mapping[str, SourceSample]) -> float:
    """A rough estimate of the time that one process takes."""
    fresh = [item for item in samples if known.get(item.key) != item]
    size = sum(item.file.size for item in fresh)
    return len(samples) * _KNOWN + len(fresh) * _FRESH + size * _BYTE


def _run_here(tasks: Sequence[Task], context: Context, progress: Progress) -> list[Result]:
    done = [0, 0]

    def advance(samples: int, source_bytes: int) -> None:
        done[:] = done[0] + samples, done[1] + source_bytes
        progress(*done)

    return [build_partition(task, context, advance) for task in tasks]


def _watch(futures: Sequence[Future[Result]], shared: _Shared, progress: Progress) -> None:
    """Wait for all of `futures`; raise what the first of them to fail raised."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, _POLL, FIRST_COMPLETED)
        progress(sum(shared.samples), sum(shared.source_bytes))
        for future in done:
            future.result()


def _obituary(tasks: Sequence[Task], context: Context) -> str:
    """A dead worker leaves the staging directory of the partition it was building."""
    left = {int(name) for name in names_in(context.staging) if name.isdigit()}
    in_flight = [task.id for task in tasks if task.place in left]
    return (
        "a worker process died (killed, or out of memory) while these partitions were built: "
        f"{', '.join(map(repr, in_flight)) or 'none yet'}; nothing is published, and the next run "
        "takes over the partitions that were finished"
    )


@dataclass(frozen=True, slots=True)
class _Shared:
    """Memory that workers and parent share, without a lock: one that dies would keep it.

    Each task has numbers of its own, so that each has one writer.
    """

    samples: ctypes.Array[ctypes.c_longlong]
    source_bytes: ctypes.Array[ctypes.c_longlong]
    stop: ctypes.c_byte

    @classmethod
    def of(cls, tasks: int) -> _Shared:
        samples, source_bytes = _SPAWN.RawArray("q", tasks), _SPAWN.RawArray("q", tasks)
        return cls(samples, source_bytes, _SPAWN.RawValue("b", 0))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put an interrupt off until the block has ended; none ever reaches what starts in it.

    A process inherits the mask. It does not put anything off here, though: the interrupt may come
    to a thread that has another mask, and Python then handles it in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _pool(workers: int, shared: _Shared) -> Iterator[ProcessPoolExecutor]:
    """Processes that forget what is queued, and stop at the next sample, when the block fails."""
    pool = ProcessPoolExecutor(workers, _SPAWN, _start, (shared,))
    try:
        yield pool
    except BaseException:
        shared.stop.value = 1
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_shared: _Shared


def _start(shared: _Shared) -> None:
    """Set up a worker: an interrupt is the parent's business, and its death is ours."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()

    global _shared  # noqa: PLW0603 - a process pool hands its workers nothing else
    _shared = shared


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _work(task: Task, context: Context) -> Result:
    def advance(samples: int, source_bytes: int) -> None:
        if _shared.stop.value:
            raise _StoppedError
        _shared.samples[task.place] += samples
        _shared.source_bytes[task.place] += source_bytes

    return build_partition(task, context, advance)
