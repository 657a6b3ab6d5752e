"""What a mount leases is leased until it ends."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from fsmount.errors import StoreError, StoreWriteError
from fsmount.model import Digest
from fsmount.mount.leases import LeaseKeeper

TABLE = Digest("0" * 64)


@dataclass
class FakeLease:
    """A lease that counts, and is lost after `lives` renewals."""

    lives: int
    ttl: int = 0  # seconds: it is always time to renew
    renewed: int = 0
    released: bool = False

    def renew(self) -> None:
        if self.renewed == self.lives:
            raise StoreError("gone")
        self.renewed += 1

    def release(self) -> None:
        self.released = True


@dataclass
class FakeStore:
    """Gives leases until there are `enough`; `done` is set then."""

    enough: int
    leases: list[FakeLease] = field(default_factory=list)
    asked: list[tuple[str, tuple[Digest, ...]]] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def lease(self, kind: str, tables: tuple[Digest, ...]) -> FakeLease:
        self.asked.append((kind, tables))
        self.leases.append(FakeLease(3 if len(self.leases) + 1 < self.enough else 10**9))
        if len(self.leases) == self.enough:
            self.done.set()
        return self.leases[-1]


class ReadOnlyStore:
    def lease(self, kind: str, tables: tuple[Digest, ...]) -> FakeLease:
        del kind, tables
        raise StoreWriteError("read-only")


def keeper_of(store: object, notes: list[str]) -> LeaseKeeper:
    assert hasattr(store, "lease")
    return LeaseKeeper(store, notes.append)  # type: ignore[arg-type]


def test_a_lease_is_renewed_and_taken_again_when_lost() -> None:
    store, notes = FakeStore(enough=3), list[str]()
    with keeper_of(store, notes) as keeper:
        keeper.hold([TABLE])
        keeper.hold([TABLE])
        assert store.done.wait(30)
    assert store.asked == [("mount", (TABLE,))] * 3
    assert [lease.renewed for lease in store.leases[:2]] == [3, 3]
    assert store.leases[-1].released
    assert notes == []


def test_a_store_that_can_not_be_leased_is_told_once() -> None:
    notes: list[str] = []
    with keeper_of(ReadOnlyStore(), notes) as keeper:
        keeper.hold([TABLE])
        keeper.hold([Digest("1" * 64)])
    assert len(notes) == 1
    assert notes[0].endswith("read-only")
