"""Leases: who reads or writes what in a store, so that it is not collected meanwhile.

One small file each, renewed by touching it. A lease that nobody renews, or whose process is known
to be gone, is stale; so nobody ever has to delete one by hand. Time is the file server's: that of
the lease file against that of a file touched just now, never a local clock.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, cast, get_args

from fsmount.errors import FormatError, InvalidNameError, StoreError, StoreWriteError
from fsmount.formats.checked import dump_document, get, load_object
from fsmount.formats.document import check_format
from fsmount.model import FORMAT, Digest
from fsmount.store import durable, inside
from fsmount.store.inside import StorePath
from fsmount.store.owner import Owner

LEASES = "leases"
DEFAULT_TTL = 3600  # seconds; renew at a quarter of it
MAX_TTL = 86400  # seconds; no lease holds longer without being renewed, whatever it says
_LIMIT = 256 << 20  # bytes of a lease; a pack of a million objects has 70 MB
_SUFFIX = ".json"
_CLOCK = ".clock"

Kind = Literal["pack", "mount", "gc"]


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What a lease file says, and when it was last renewed by the file server's clock."""

    id: str
    kind: Kind
    owner: Owner
    tables: tuple[Digest, ...]
    objects: tuple[Digest, ...]
    ttl: int  # seconds
    created_at: str
    renewed_at: float  # seconds since 1970


@dataclass(frozen=True, slots=True)
class UnreadableLease:
    """A lease file that this release can't read: what it needs is unknown."""

    path: str
    reason: str
    renewed_at: float


def is_stale(lease: LeaseRecord | UnreadableLease, now: float) -> bool:
    """Whether nobody holds `lease` any more; `now` is the file server's time (`Leases.now`)."""
    if isinstance(lease, UnreadableLease):
        return now - lease.renewed_at > MAX_TTL
    return now - lease.renewed_at > min(lease.ttl, MAX_TTL) or lease.owner.is_gone()


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease this process holds; a context manager that gives it back."""

    path: StorePath
    ttl: int  # seconds

    @property
    def id(self) -> str:
        """The lease's id, the stem of its file."""
        return self.path.name.removesuffix(_SUFFIX)

    def renew(self) -> None:
        """Hold it for `ttl` more; StoreError if it was collected, StoreWriteError."""
        try:
            durable.touch(self.path)
        except StoreWriteError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                gone = f"lease {self.path} is gone: it was not renewed for {self.ttl} s"
                raise StoreError(gone) from None
            raise

    def release(self) -> None:
        """Give it back; it is fine if it is gone. StoreWriteError."""
        durable.remove(self.path)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class Leases:
    """The leases of the store at `root`. Holds only that path: picklable, safe in any thread."""

    root: str

    def create(
        self,
        kind: Kind,
        tables: Iterable[Digest] = (),
        objects: Iterable[Digest] = (),
        ttl: int = DEFAULT_TTL,
    ) -> Lease:
        """Take a lease for this very process (not its children); StoreWriteError."""
        if not 1 <= ttl <= MAX_TTL:
            raise InvalidNameError(f"a lease's ttl must be 1 to {MAX_TTL} seconds, not {ttl}")
        lease_id = secrets.token_hex(16)
        directory = StorePath(self.root, LEASES)
        path = directory / f"{lease_id}{_SUFFIX}"
        data = dump_document(
            {
                "format": FORMAT,
                "id": lease_id,
                "kind": kind,
                "tables": sorted(tables),
                "objects": sorted(objects),
                "ttl": ttl,
                "created_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                **asdict(Owner.current()),
            }
        )
        durable.make_directory(directory)
        with durable.staging(self.root) as staging:  # so that no reader sees half a lease
            durable.write_file(staging / lease_id, data)
            durable.link(staging / lease_id, path)
        return Lease(path, ttl)

    def now(self) -> float:
        """The file server's time in seconds since 1970; StoreWriteError."""
        return durable.touch_new(StorePath(self.root, LEASES, _CLOCK))

    def all(self) -> tuple[LeaseRecord | UnreadableLease, ...]:
        """All leases, stale ones too, by id; those that vanish meanwhile are left out."""
        return tuple(lease for _, lease in self.files())

    def files(self) -> tuple[tuple[StorePath, LeaseRecord | UnreadableLease], ...]:
        """The same, each with the path of its file."""
        directory = StorePath(self.root, LEASES)
        try:
            names = sorted(inside.names_in(directory))
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise StoreError(f"can't read {directory}: {durable.cause(error)}") from error
        paths = [directory / n for n in names if n.endswith(_SUFFIX) and n[0] != "."]
        return tuple((path, lease) for path in paths if (lease := _read(path)) is not None)

    def live(self) -> tuple[LeaseRecord, ...]:
        """The leases that are held now.

        Raises FormatError for one that can't be read and may be held: what it needs is unknown.
        """
        now = self.now()
        held = [lease for lease in self.all() if not is_stale(lease, now)]
        for lease in held:
            if isinstance(lease, UnreadableLease):
                raise FormatError(f"lease {lease.path} can't be read: {lease.reason}")
        return tuple(lease for lease in held if isinstance(lease, LeaseRecord))


def _read(path: StorePath) -> LeaseRecord | UnreadableLease | None:
    try:
        renewed_at = inside.status(path).st_mtime
        data = durable.read_small(path, _LIMIT)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"can't read {path}: {durable.cause(error)}") from error
    except FormatError as error:
        return UnreadableLease(path, str(error), renewed_at)
    if data is None:
        return None
    try:
        return _parse(data, renewed_at)
    except (FormatError, InvalidNameError) as error:
        return UnreadableLease(path, str(error), renewed_at)


def _parse(data: bytes, renewed_at: float) -> LeaseRecord:
    value = load_object(data, "lease")
    check_format(value)
    kind = get(value, "kind", str)
    if kind not in get_args(Kind):
        raise FormatError(f"unknown kind of lease {kind!r}")
    return LeaseRecord(
        id=get(value, "id", str),
        kind=cast(Kind, kind),
        owner=_owner(value),
        tables=_digests(get(value, "tables", list)),
        objects=_digests(get(value, "objects", list)),
        ttl=get(value, "ttl", int),
        created_at=get(value, "created_at", str),
        renewed_at=renewed_at,
    )


def _digests(values: list[Any]) -> tuple[Digest, ...]:
    if not all(isinstance(value, str) for value in values):
        raise FormatError("a digest that is no text")
    return tuple(map(Digest, values))


def _owner(value: dict[str, Any]) -> Owner:
    return Owner(
        host=get(value, "host", str),
        boot_id=get(value, "boot_id", str),
        pid_namespace=get(value, "pid_namespace", str),
        pid=get(value, "pid", int),
        start_time=get(value, "start_time", int),
    )
