"""What of a kernel's offers is taken, and what does without. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsmount.errors import MountError
from fsmount.mount.kernel.protocol import MAJOR, MINOR, OLDEST_MINOR, Init, InitAnswer, InitFlag

REQUEST = 1 << 20  # bytes that one request reads at most
PAGES = 256  # of 4096 bytes: REQUEST
PLAIN_REQUEST = 128 << 10  # without MAX_PAGES
BACKGROUND = 1024  # requests that nobody waits for at once: hung ones must not block the others
_MAX_WRITE = 4096  # nobody writes; requests fit into the smallest read buffer

_WANTED = (
    InitFlag.ASYNC_READ
    | InitFlag.EXPORT_SUPPORT
    | InitFlag.DO_READDIRPLUS
    | InitFlag.PARALLEL_DIROPS
    | InitFlag.ASYNC_DIO
    | InitFlag.MAX_PAGES
    | InitFlag.NO_OPENDIR_SUPPORT
    | InitFlag.ABORT_ERROR
    | InitFlag.INIT_EXT
    | InitFlag.HAS_RESEND
)
# Not wanted: CACHE_SYMLINKS, since `latest` moves; READDIRPLUS_AUTO, by which a program that lists
# thousands of names before it looks at the first one, as `find` does, makes a request for each.
_MISSED = {
    InitFlag.MAX_PAGES: "reads of more than 128 KiB at once",
    InitFlag.DO_READDIRPLUS: "attributes with listings",
    InitFlag.PARALLEL_DIROPS: "parallel lookups in one directory",
    InitFlag.NO_OPENDIR_SUPPORT: "opening directories without a request",
    InitFlag.HAS_RESEND: "resending: requests that are in work when a server dies hang",
    InitFlag.PASSTHROUGH: "passthrough",
}


@dataclass(frozen=True, slots=True)
class Features:
    """What kernel and server agreed on. A connection keeps it for life."""

    minor: int
    flags: InitFlag

    @property
    def passthrough(self) -> bool:
        return InitFlag.PASSTHROUGH in self.flags

    @property
    def resend(self) -> bool:
        return InitFlag.HAS_RESEND in self.flags

    @property
    def no_opendir(self) -> bool:
        """Whether OPENDIR is refused once, for all directories."""
        return InitFlag.NO_OPENDIR_SUPPORT in self.flags

    @property
    def request(self) -> int:
        """Bytes that one request reads at most."""
        return REQUEST if InitFlag.MAX_PAGES in self.flags else PLAIN_REQUEST

    def names(self) -> Iterator[str]:
        """The agreed features for people."""
        for flag in InitFlag:
            if flag in self.flags:
                yield str(flag.name).lower()


def negotiate(offer: Init, *, passthrough: bool) -> tuple[InitAnswer, Features]:
    """The answer to INIT; `passthrough`: whether it is wanted. MountError for an odd kernel."""
    if offer.major != MAJOR or offer.minor < OLDEST_MINOR:
        raise MountError(
            f"the kernel speaks FUSE {offer.major}.{offer.minor}; {MAJOR}.{OLDEST_MINOR} is needed"
        )
    wanted = _WANTED | (InitFlag.PASSTHROUGH if passthrough else InitFlag(0))
    flags = offer.flags & wanted
    answer = InitAnswer(
        minor=MINOR,
        max_readahead=REQUEST,
        flags=flags,
        max_background=BACKGROUND,
        max_write=_MAX_WRITE,
        max_pages=PAGES,
        max_stack_depth=1,
    )
    return answer, Features(min(MINOR, offer.minor), flags)


def missed(features: Features, *, passthrough: bool) -> list[str]:
    """What the kernel doesn't offer though it is wanted, for the log."""
    return [
        what
        for flag, what in _MISSED.items()
        if flag not in features.flags and (passthrough or flag is not InitFlag.PASSTHROUGH)
    ]
