"""Running tasks: here, or in processes that end with us."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized, SynchronizedArray
from typing import Protocol

from fsmount.errors import PackWorkerError
from fsmount.pack.build import Built, Context, Task, build_partition

_POLL = 0.2  # seconds between looks at what the workers have counted
_SAMPLES, _BYTES = 0, 1


class Progress(Protocol):
    """Told what has been done so far, in samples and bytes of source files."""

    def __call__(self, samples: int, source_bytes: int) -> None: ...


class _StoppedError(Exception):
    """Another task failed, or the user interrupted: a worker gives up between two samples."""


def run(tasks: Sequence[Task], context: Context, workers: int, progress: Progress) -> list[Built]:
    """Do `tasks` and return what they built, in their order.

    The first failure stops the rest between two samples and is raised; PackWorkerError, which names
    the partitions then in flight, for a process that died.
    """
    if workers == 1 or len(tasks) < 2:
        return _run_here(tasks, context, progress)
    counts = multiprocessing.get_context("spawn").Array("q", 2)
    stop = multiprocessing.get_context("spawn").Value("b", 0)
    with _pool(min(workers, len(tasks)), counts, stop) as pool:
        futures = [pool.submit(_work, task, context) for task in tasks]
        try:
            _watch(futures, counts, progress)
        except BrokenProcessPool as error:
            raise PackWorkerError(_obituary(tasks, context)) from error
        return [future.result() for future in futures]


def _run_here(tasks: Sequence[Task], context: Context, progress: Progress) -> list[Built]:
    done = [0, 0]

    def advance(samples: int, source_bytes: int) -> None:
        done[_SAMPLES] += samples
        done[_BYTES] += source_bytes
        progress(done[_SAMPLES], done[_BYTES])

    return [build_partition(task, context, advance) for task in tasks]


def _watch(
    futures: Sequence[Future[Built]], counts: SynchronizedArray[int], progress: Progress
) -> None:
    """Wait for all of `futures`; raise what the first of them to fail raised."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, _POLL, FIRST_COMPLETED)
        progress(counts[_SAMPLES], counts[_BYTES])
        for future in done:
            future.result()


def _obituary(tasks: Sequence[Task], context: Context) -> str:
    """A dead worker leaves the staging directory of the partition it was building."""
    left = {int(name) for name in os.listdir(context.staging) if name.isdigit()}
    in_flight = [task.id for task in tasks if task.place in left]
    return (
        "a worker process died (killed, or out of memory) while these partitions were built: "
        f"{', '.join(map(repr, in_flight)) or 'none yet'}; nothing is published, and the next run "
        "takes over the partitions that were finished"
    )


@contextmanager
def _pool(
    workers: int, counts: SynchronizedArray[int], stop: Synchronized[int]
) -> Iterator[ProcessPoolExecutor]:
    """Processes that forget what is queued, and stop at the next sample, when the block fails."""
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start, (counts, stop)
    )
    try:
        yield pool
    except BaseException:
        stop.value = 1
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_advance: Callable[[int, int], None]


def _start(counts: SynchronizedArray[int], stop: Synchronized[int]) -> None:
    """Set up a worker: an interrupt is the parent's business, and its death is ours."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()

    def advance(samples: int, source_bytes: int) -> None:
        if stop.value:
            raise _StoppedError
        with counts.get_lock():
            counts[_SAMPLES] += samples
            counts[_BYTES] += source_bytes

    global _advance  # noqa: PLW0603 - a process pool hands its workers nothing else
    _advance = advance


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _work(task: Task, context: Context) -> Built:
    return build_partition(task, context, _advance)
