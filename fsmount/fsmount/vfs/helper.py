"""`python -m fsmount.vfs.helper SOCKET LOCK`: starts helpers when they are wanted; see `helpers`.

Everything is imported before there is anything to do. So the helpers, which are forked, share that
memory, are there at once, and need no file of the package that might have been replaced meanwhile.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from fsmount.errors import FsmountError, LoadError
from fsmount.formats import document as documents
from fsmount.formats.checked import load_object
from fsmount.formats.partition import partition_from_json, partition_to_json
from fsmount.model import Digest, ObjectRef
from fsmount.privileges import give_up
from fsmount.vfs.decoding import Decoding
from fsmount.vfs.form import Form
from fsmount.vfs.helpers import MESSAGE
from fsmount.vfs.memory_file import MemoryFile
from fsmount.vfs.reads import ObjectHandle
from fsmount.vfs.sample_list import SampleList

log = logging.getLogger("fsmount.mount")

MEMORY = 4 << 30  # bytes that a helper may take for itself; files that it makes don't count
_GROWN = 256 << 10  # KiB of resident memory more than at the start: a helper ends, to give it back
_TEXT = 2000  # characters of an error
_FDS = 2
_NAME = b"fsmount-samples"  # as `ps` and the kernel's log show it
_VICTIM = b"800"  # for the out-of-memory killer: before anybody else


class _Starter:
    """The process that forks helpers, and tells whoever waits for one that it died."""

    def __init__(self, control: socket.socket, lock: int) -> None:
        self._control = control
        self._lock = lock
        self._helpers: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: pid and its socket

    def run(self) -> None:
        """Until nobody is left who could want a helper."""
        while True:
            wanted = self._control.fileno()
            found, _, _ = select.select([wanted, *self._helpers], [], [])
            for pidfd in [fd for fd in self._helpers if fd in found]:
                self._bury(pidfd)
            if wanted in found and not self._start_one():
                return

    def _start_one(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, MESSAGE, 1)
        if not data:
            return False
        for fd in fds:
            user = socket.socket(fileno=fd)
            pid = os.fork()
            if pid == 0:
                self._control.close()
                os.close(self._lock)
                for pidfd, (_, other) in self._helpers.items():
                    os.close(pidfd)
                    other.close()
                _help(user)
            self._helpers[os.pidfd_open(pid)] = (pid, user)
        return True

    def _bury(self, pidfd: int) -> None:
        pid, user = self._helpers.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(status)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        with suppress(OSError), user:  # nobody waits for it
            user.send(json.dumps({"died": how}).encode(), socket.MSG_DONTWAIT)


def _help(user: socket.socket) -> NoReturn:
    """Do what is asked until nobody asks any more."""
    code = 1
    try:
        _limit_memory()
        grown = _resident() + _GROWN
        stays = True
        user.send(json.dumps({"ready": True}).encode())
        while stays:
            data, fds, _, _ = socket.recv_fds(user, MESSAGE, _FDS)
            if not data:
                break
            answer, found = _answer(json.loads(data), fds)
            stays = _resident() < grown
            message = json.dumps({**answer, "stays": stays}).encode()
            socket.send_fds(user, [message], [] if found is None else [found.fd])
            del found
            for fd in fds:
                os.close(fd)
        code = 0
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ECONNRESET):
            log.exception("a process that decodes samples failed")
    finally:
        sys.stderr.flush()
        os._exit(code)


def _limit_memory() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bounds = [limit for limit in (soft, hard, MEMORY) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), hard))


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _answer(asked: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], MemoryFile | None]:
    """What is told, and what is handed over; every failure is told."""
    try:
        return {}, _do(asked, fds)
    except FsmountError as error:
        return {"error": type(error).__name__, "text": str(error)[:_TEXT]}, None
    except MemoryError:
        text = f"{asked.get('about')}: decoding it takes more than {MEMORY >> 20} MiB of memory"
        return {"error": LoadError.__name__, "text": text}, None
    except Exception:  # noqa: BLE001 - it is raised again where it was asked
        return {"error": None, "text": traceback.format_exc()[-_TEXT:]}, None


def _do(asked: dict[str, Any], fds: list[int]) -> MemoryFile:
    decoding = Decoding()
    match asked["do"]:
        case "partitions":
            document = documents.decode(_all(fds[0]))
            parts = decoding.partitions(asked["store"], document)
            return MemoryFile.of(json.dumps([partition_to_json(part) for part in parts]).encode())
        case "samples":
            partition = partition_from_json(load_object(_all(fds[1]), "partition"))
            manifest = _handle(fds[0], partition.manifest, asked["about"])
            return decoding.samples(manifest, partition).file
        case "unpack":
            ref = ObjectRef(Digest(asked["digest"]), asked["size"])
            found = SampleList(MemoryFile(os.dup(fds[1])), asked["partition"])
            shard = _handle(fds[0], ref, asked["about"])
            return decoding.unpack(shard, found, asked["row"], Form(asked["form"]))
        case other:
            raise ValueError(f"nobody knows how to do {other!r}")


def _handle(fd: int, ref: ObjectRef, about: str) -> ObjectHandle:
    return ObjectHandle(0, fd, ref, about, keep_cache=False)


def _all(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def main(control: int, lock: int) -> None:
    """Start helpers until nobody is left who could want one; `lock` tells that this one does."""
    give_up()  # it needs nothing but what it is handed
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that started this one blocks all
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
        file.write(_VICTIM)
    with suppress(OSError), open("/proc/self/comm", "wb") as file:
        file.write(_NAME)
    _Starter(socket.socket(fileno=control), lock).run()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
