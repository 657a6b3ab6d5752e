"""Processes that build the batches of one pass, whole batches in turn, and are never waited for in
vain: one that dies is an error at once, and they die with the trainer."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

import torch

from fsmount.errors import FsmountError, LoadError
from fsmount_loader.batch import Batch, Parts
from fsmount_loader.passes import Pass
from fsmount_loader.shared import Receiver, Sender, most_kept
from fsmount_loader.signals import begin_worker

_GOODBYE = 0.5  # seconds that a worker has to end by itself


def batches_of_workers(
    of: Pass,
    workers: int,
    *,
    start_method: str | None,
    most_bytes: int,
    keeps_many: Callable[[int], object],
) -> Iterator[Batch]:
    """The batches of `of`, built by `workers` processes that end with the iteration.

    Up to `prefetch` batches a worker and `most_bytes` in all, but at least one, are built ahead.
    `keeps_many` is called with the number of batches that the caller keeps when blocks had to be
    made for it. Raises what a worker raised, and LoadError when one dies.
    """
    count = min(workers, len(of))
    ahead = min(count * max(1, of.options.prefetch), most_bytes // of.batch_bytes)
    crew = _Crew(of, count, max(1, ahead), multiprocessing.get_context(start_method))
    try:
        yield from crew.batches(keeps_many)
    finally:
        crew.end()


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    receiver: Receiver
    poll: select.poll  # for its messages and any worker's end


class _Crew:
    """The workers of one pass, as the process that started them sees them."""

    def __init__(self, of: Pass, count: int, ahead: int, context: BaseContext) -> None:
        self._of = of
        self._count = count
        self._ahead = ahead
        self._context = context
        self._owner = os.getpid()
        self._workers: list[_Worker] = []

    def batches(self, keeps_many: Callable[[int], object]) -> Iterator[Batch]:
        """The batches in order; `ahead` of them are in the making."""
        total = len(self._of)
        for number in range(self._count):
            self._start(number)
        self._watch_each_other()
        for number in range(min(self._ahead, total)):
            self._order(number)
        for number in range(total):
            if os.getpid() != self._owner:
                raise LoadError("a fork of the trainer can't go on with its iteration")
            batch = self._receive(self._workers[number % self._count])
            if number + self._ahead < total:
                self._order(number + self._ahead)
            kept = sum(worker.receiver.kept for worker in self._workers)
            if kept > self._ahead + 2 * self._count:
                keeps_many(kept)
            yield batch

    def end(self) -> None:
        """End all workers; a copy of this object in a forked process leaves them alone."""
        if os.getpid() != self._owner:
            return
        for worker in self._workers:
            with suppress(OSError):
                worker.connection.send_bytes(b"")
            worker.connection.close()
        end = time.monotonic() + _GOODBYE
        for worker in self._workers:
            worker.process.join(max(0.0, end - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
        self._workers = []

    def _start(self, number: int) -> None:
        ours, theirs = self._context.Pipe()
        forked = self._context.get_start_method() == "fork"
        inherited = (ours, *(worker.connection for worker in self._workers)) if forked else ()
        spare = 2 * -(-self._ahead // self._count) + 2
        job = _Job(self._of, number, self._count, theirs, inherited, self._owner, spare)
        process = self._context.Process(  # type: ignore[attr-defined]
            target=_work, args=(job,), daemon=True, name=f"fsmount-loader-{number}"
        )
        try:
            process.start()
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise LoadError(f"worker {number} can't be started: {error}") from error
            raise
        finally:
            theirs.close()
        receiver = Receiver(ours, most_kept(self._count))
        self._workers.append(_Worker(process, ours, receiver, select.poll()))

    def _watch_each_other(self) -> None:
        for worker in self._workers:
            worker.poll.register(worker.connection, select.POLLIN)
            for other in self._workers:
                worker.poll.register(other.process.sentinel, select.POLLIN)

    def _order(self, number: int) -> None:
        with suppress(OSError):  # it is gone, which is noticed when its batch is waited for
            self._workers[number % self._count].receiver.order()

    def _receive(self, worker: _Worker) -> Batch:
        ready = {file for file, _ in worker.poll.poll()}
        if worker.connection.fileno() not in ready:
            worker = next(w for w in self._workers if w.process.sentinel in ready)
            raise self._died(worker)
        try:
            received = worker.receiver.receive()
        except (EOFError, OSError):
            received = self._died(worker)
        if isinstance(received, Exception):
            raise received
        return received

    def _died(self, worker: _Worker) -> LoadError:
        process = worker.process
        process.join(_GOODBYE)
        code = process.exitcode
        how = "is gone" if code is None else f"exited with code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return LoadError(f"worker {self._workers.index(worker)} (process {process.pid}) {how}")


@dataclass(frozen=True, slots=True)
class _Job:
    """What a worker is told."""

    of: Pass
    number: int
    workers: int
    connection: Connection
    inherited: tuple[Connection, ...]  # the trainer's ends, to be closed in a fork
    trainer: int
    spare: int


def _work(job: _Job) -> None:
    """Build the batches that are ordered, until none is any more."""
    for connection in job.inherited:
        connection.close()
    begin_worker()
    torch.set_num_threads(1)
    threading.Thread(target=_die_with, args=(job.trainer,), daemon=True).start()
    sender = Sender(job.connection, job.spare)
    with suppress(EOFError, ConnectionError):
        _serve(job, sender)


def _serve(job: _Job, sender: Sender) -> None:
    built = job.of.parts(sender.take, job.number, job.workers)
    failed = False
    while sender.ordered():
        if failed:
            continue
        error = _send_next(built, sender)
        if error is not None:
            sender.fail(_portable(error, job.number))
            failed = True


def _send_next(built: Iterator[Parts], sender: Sender) -> Exception | None:
    """Build a batch and send it, or return the error of either."""
    try:
        message = sender.pack(next(built))
    except Exception as error:  # noqa: BLE001 - it is raised in the trainer
        return error
    sender.send(message)
    return None


def _portable(error: Exception, worker: int) -> Exception:
    """`error` as it can be sent: itself, or its name and message if it can't be pickled."""
    if not isinstance(error, FsmountError):
        error.add_note(f"in worker {worker}:\n{''.join(traceback.format_exception(error))}")
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):  # noqa: S301 - our own
            return error
    except Exception:  # noqa: BLE001, S110 - whatever its class does there
        pass
    told = RuntimeError(f"{type(error).__qualname__}: {error}")
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    return told


def _die_with(trainer: int) -> None:
    """End this process as soon as the trainer is gone, whatever else it is doing."""
    parent = os.getppid()
    if hasattr(os, "pidfd_open"):
        try:
            select.select([os.pidfd_open(trainer)], [], [])
        except ProcessLookupError:
            os._exit(1)
        except OSError:  # a kernel without it
            pass
        else:
            os._exit(1)
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
