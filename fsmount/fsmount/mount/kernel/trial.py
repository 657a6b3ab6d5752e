"""A process that does, one at a time, requests that a server may have died of.

Where it dies too, it is clear of which. It answers the kernel itself, so that a request is done
once, and gets done however often the server is killed meanwhile.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from fsmount.errors import FsmountError
from fsmount.mount.kernel.answers import Answers, Request
from fsmount.mount.kernel.backing import OpenNodes
from fsmount.mount.kernel.config import Config
from fsmount.mount.kernel.leasing import release_kept
from fsmount.mount.kernel.link import Message, Supervised
from fsmount.mount.kernel.listings import KEPT, Listings
from fsmount.mount.kernel.negotiate import Features
from fsmount.mount.kernel.protocol import IN_HEADER
from fsmount.mount.kernel.sending import Sender
from fsmount.mount.kernel.server import Make, settle
from fsmount.mount.kernel.session import answer
from fsmount.vfs.filesystem import FileSystem

log = logging.getLogger("fsmount.mount")

NAME = "fsmount-trial"  # in lists of processes


def try_suspects(
    device: int,
    supervisor: socket.socket,
    nodes: OpenNodes,
    features: Features,
    *,
    config: Config,
    make: Make,
    on_alone: Callable[[], None],
) -> None:
    """Do what the supervisor hands over until there is nothing left. Arguments as of `serve`."""
    settle()
    _tell_system("comm", NAME)
    _tell_system("oom_score_adj", "1000")  # memory that is short is taken from here first
    link = Supervised(supervisor, nodes, on_alone)
    sender = Sender(device, splice=config.splice)
    listings = Listings(sender.drop_kept)
    listed: list[int] = []
    filesystem = make()
    answers = Answers(
        filesystem,
        link if features.passthrough else None,
        xattrs=config.xattrs,
        on_listed=listed.append if features.no_opendir else None,
    )
    taken = True
    while message := link.next(taken=taken):
        link.say(Message.NAMED, _name(filesystem, message))
        taken = _try(answers, sender, message)
    if listed:
        listings.begin()
        for node in listed:
            listings.note(node)
        time.sleep(4 * KEPT)  # until each was dropped twice
    release_kept()


def _name(filesystem: FileSystem, message: bytes) -> str:
    """The path that a request is about, "" if that can't be told."""
    node = IN_HEADER.unpack_from(message)[3]
    try:
        return filesystem.path(node)
    except (FsmountError, OSError):
        return ""


def _try(answers: Answers, sender: Sender, message: bytes) -> bool:
    """Answer a request; whether the kernel took the answer."""
    _, opcode, unique, node, *_ = IN_HEADER.unpack_from(message)
    request = Request(opcode, unique, node, message[IN_HEADER.size :])
    taken = answer(answers, sender, request)
    if not taken:
        answers.undo(request)
    return taken


def _tell_system(what: str, value: str) -> None:
    with suppress(OSError), open(f"/proc/self/{what}", "w", encoding="ascii") as file:
        file.write(value)
