"""Processes that decode for a server, so that what a sample does to them harms nobody else.

There is one that starts the others: it has imported everything, and forks a helper when one is
wanted. A helper does one thing at a time, so it is known what it died of. One that died is replaced
and asked again, once; a sample that two helpers have died of can't be read. All of them end when
the last process ends that holds the other end of their socket.

What is asked and answered is a small JSON object, and descriptors of what is large.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from fsmount import errors
from fsmount.errors import FsmountError, LoadError, StoreError
from fsmount.formats import document as documents
from fsmount.formats.checked import dump_compact
from fsmount.formats.partition import partition_from_json, partition_to_json
from fsmount.model import Partition, VersionDocument
from fsmount.vfs.form import Form
from fsmount.vfs.memory_file import MemoryFile
from fsmount.vfs.reads import ObjectHandle
from fsmount.vfs.sample_list import SampleList

log = logging.getLogger("fsmount.mount")

MESSAGE = 64 << 10  # bytes at most
MOST = 4  # helpers at once
_ATTEMPTS = 2
_START_SECONDS = 60.0
_LOOK_SECONDS = 0.5  # in which it is noticed that the one that starts others has died


class Helpers:
    """A Decoder in other processes. May be made before a fork, and used behind it."""

    def __init__(self) -> None:
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Locked by the process that starts helpers.
        self._lock_file = os.memfd_create("fsmount-helpers", os.MFD_CLOEXEC)
        self._room = threading.BoundedSemaphore(MOST)
        self._idle: list[socket.socket] = []
        self._starting = threading.Lock()
        self._started: subprocess.Popen[bytes] | None = None

    def start(self) -> bool:
        """Have helpers ready soon, and return at once: whether nobody did before."""
        with self._starting:
            # A lock of a description of its own is held as long as who inherits that lives.
            lock = os.open(f"/proc/self/fd/{self._lock_file}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._start_with(lock)
            except BlockingIOError:
                return False
            finally:
                os.close(lock)
            return True

    def _start_with(self, lock: int) -> None:
        if self._started is not None:
            self._started.wait()  # it has died, or it would hold the lock
        passed = (self._theirs.fileno(), lock)
        try:
            self._started = subprocess.Popen(
                [sys.executable, "-P", "-m", "fsmount.vfs.helper", *map(str, passed)],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
        except OSError as error:
            log.error("a process that decodes samples can't be started: %s", error)

    @property
    def starter(self) -> int | None:
        """The process that starts helpers, if this one has started it."""
        return None if self._started is None else self._started.pid

    def close(self) -> None:
        """Have them end, unless another process can ask them."""
        for helper in (*self._idle, self._control, self._theirs):
            helper.close()
        os.close(self._lock_file)
        if self._started is not None:
            self._started.wait()

    def partitions(self, store: str, document: VersionDocument) -> tuple[Partition, ...]:
        text = MemoryFile.of(documents.encode(document))
        about = f"version {document.tag or document.table.digest} of {store}"
        found = self._ask({"do": "partitions", "store": store}, [text.fd], about)
        return tuple(map(partition_from_json, json.loads(found.read(found.size, 0))))

    def samples(self, manifest: ObjectHandle, partition: Partition) -> SampleList:
        text = MemoryFile.of(dump_compact(partition_to_json(partition)).encode())
        asked = {"do": "samples", "about": manifest.about}
        found = self._ask(asked, [manifest.fd, text.fd], manifest.about)
        return SampleList(found, partition.id)

    def unpack(self, shard: ObjectHandle, found: SampleList, row: int, form: Form) -> MemoryFile:
        asked = {
            "do": "unpack", "about": shard.about, "digest": shard.ref.digest,
            "size": shard.ref.size, "row": row, "form": form, "partition": found.partition,
        }  # fmt: skip
        about = f"{shard.about}: object {shard.ref.digest}"
        return self._ask(asked, [shard.fd, found.file.fd], about)

    def _ask(self, asked: dict[str, Any], fds: Sequence[int], about: str) -> MemoryFile:
        """What a helper answers; raises what it raised, and LoadError if it died of it."""
        message = json.dumps(asked).encode()
        with self._room:
            for _ in range(_ATTEMPTS):
                helper = self._take()
                answer, found = _exchange(helper, message, fds)
                if "died" not in answer:
                    break
                helper.close()
            else:
                raise LoadError(f"{about}: the process that decodes it {answer['died']}, twice")
        if answer.get("stays"):
            self._idle.append(helper)
        else:
            helper.close()
        if found is None:
            raise _error(answer)
        return found

    def _take(self) -> socket.socket:
        """A helper that waits to be asked; StoreError if none can be had."""
        while True:
            try:
                helper = self._idle.pop()
            except IndexError:
                return self._new()
            if not select.select([helper], [], [], 0)[0]:
                return helper
            helper.close()  # it has died

    def _new(self) -> socket.socket:
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                socket.send_fds(self._control, [b"helper"], [theirs.fileno()])
            if self._await_greeting(ours, until):
                return ours
            ours.close()
        raise StoreError("no process that decodes samples can be started; see the log above")

    def _await_greeting(self, helper: socket.socket, until: float) -> bool:
        """Whether the helper says that it is there; False if it died before."""
        starts = 0
        while time.monotonic() < until and starts <= _ATTEMPTS:
            starts += self.start()
            if select.select([helper], [], [], _LOOK_SECONDS)[0]:
                return bool(_receive(helper)[0].get("ready"))
        raise StoreError("no process that decodes samples can be started; see the log above")


def _exchange(
    helper: socket.socket, message: bytes, fds: Sequence[int]
) -> tuple[dict[str, Any], MemoryFile | None]:
    try:
        socket.send_fds(helper, [message], fds)
        return _receive(helper)
    except OSError as error:  # it died before it was asked
        return {"died": f"ended: {error.strerror}"}, None


def _receive(helper: socket.socket) -> tuple[dict[str, Any], MemoryFile | None]:
    """What a helper says; `died` if it ended without a word."""
    data, fds, flags, _ = socket.recv_fds(helper, MESSAGE, 1)
    if flags & socket.MSG_CTRUNC:  # the helper has said nothing wrong
        text = f"what was decoded can't be taken: {os.strerror(errno.EMFILE)}"
        return {"error": StoreError.__name__, "text": text}, None
    return json.loads(data or b'{"died": "ended"}'), MemoryFile(fds[0]) if fds else None


def _error(answer: dict[str, Any]) -> Exception:
    kind = getattr(errors, str(answer["error"]), None)
    if isinstance(kind, type) and issubclass(kind, FsmountError):
        return kind(answer["text"])
    return RuntimeError(answer["text"])
