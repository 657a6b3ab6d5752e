"""A server: the process that answers the kernel, and may be replaced at any moment."""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from itertools import count

from fsmount.mount import threads
from fsmount.mount.kernel import device as devices
from fsmount.mount.kernel.answers import Answers
from fsmount.mount.kernel.backing import OpenNodes
from fsmount.mount.kernel.config import Config
from fsmount.mount.kernel.leasing import Leasing, release_kept
from fsmount.mount.kernel.leaving import say_why
from fsmount.mount.kernel.link import Message, Supervised
from fsmount.mount.kernel.listings import Listings
from fsmount.mount.kernel.negotiate import Features
from fsmount.mount.kernel.recording import forget
from fsmount.mount.kernel.sending import Sender
from fsmount.mount.kernel.session import Session
from fsmount.mount.kernel.takeover import TakeOver
from fsmount.store.objects import Objects
from fsmount.vfs.filesystem import FileSystem
from fsmount.vfs.helpers import Helpers
from fsmount.vfs.mapped import mapped_store, mapped_version
from fsmount.vfs.pathlist import PathList
from fsmount.vfs.reads import ObjectReader
from fsmount.vfs.sample_data import SampleData

log = logging.getLogger("fsmount.mount")

Make = Callable[[], FileSystem]


def file_system(config: Config, paths: PathList | None, helpers: Helpers) -> FileSystem:
    """What `config` says; `paths` is its path list. FsmountError."""
    reader = ObjectReader(Objects(config.store), config.verify)
    samples = SampleData(helpers, reader)
    if paths is not None:
        return mapped_version(paths, config.store, reader, samples, config.look)
    return mapped_store(
        config.store,
        reader,
        samples,
        config.look,
        clock=time.monotonic,
        on_first_use=lambda document: Leasing(config.store, (document.table.digest,)).keep(),
    )


def serve(
    device: int,
    supervisor: socket.socket,
    nodes: OpenNodes,
    features: Features,
    *,
    config: Config,
    make: Make,
    taken_over: TakeOver,
    parent: int,
    on_alone: Callable[[], None],
    on_ready: Callable[[], object],
) -> None:
    """Serve until unmounted. `nodes` is what the supervisor knows at this moment, `parent` a
    descriptor of its process. `on_alone` is called before anything is opened that the supervisor is
    not told of, `on_ready` when it begins to serve, in a thread.
    """
    settle()
    lease = Leasing(config.store, config.tables)

    def go_on_alone() -> None:
        on_alone()
        lease.keep()

    link = Supervised(supervisor, nodes, go_on_alone)
    wishes = count(1)
    signal.signal(signal.SIGTERM, lambda *_: _on_sigterm(link, parent, config, next(wishes)))
    filesystem = make()
    backing = link if features.passthrough else None
    sender = Sender(device, splice=config.splice)
    on_listed = None
    if features.no_opendir:
        on_listed = _noting(sender, filesystem, successor=taken_over.successor)
    answers = Answers(filesystem, backing, xattrs=config.xattrs, on_listed=on_listed)
    session = Session(device, answers, sender, taken_over)

    def started() -> None:
        threads.start(_await_end, parent, link)
        link.say(Message.READY)
        threads.start(on_ready)

    session.run(started, lambda: link.say(Message.SERVING))
    if link.alone:
        forget(config.mountpoint)
    release_kept()


def _await_end(parent: int, link: Supervised) -> None:
    """Notice at once that the supervisor has ended, though nothing is to be told to it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _has_ended(parent, None)
    link.lose()


def _has_ended(parent: int, seconds: float | None = 0.0) -> bool:
    """Whether a process ends within so many seconds."""
    return bool(select.select([parent], [], [], seconds)[0])


def _noting(sender: Sender, filesystem: FileSystem, *, successor: bool) -> Callable[[int], None]:
    """What has the kernel's listing of a directory that grows dropped; a predecessor's are now."""
    listings = Listings(sender.drop_kept)
    listings.begin()
    if successor:
        listings.note_all(filesystem.growing)
    return listings.note


def _on_sigterm(link: Supervised, parent: int, config: Config, wishes: int) -> None:
    """Die, as a server may; but the last process of a mount takes the mount off, and who uses it
    may go on until a second wish.
    """
    if wishes > 1 or not (link.alone or _has_ended(parent)):
        os._exit(128 + signal.SIGTERM)
    code = devices.unmount(config.mountpoint, detach=True, only=config.mounted)
    if code:
        say_why(config, code)


def settle() -> None:
    """A terminal's signals are for the supervisor. As many files as may be can be opened: one that
    the kernel does not read itself is an open file of the server.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
