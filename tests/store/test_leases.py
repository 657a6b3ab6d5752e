from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsmount.errors import FormatError, InvalidNameError, StoreError
from fsmount.model import Digest
from fsmount.store import LeaseRecord, Store
from fsmount.store.leases import MAX_TTL, UnreadableLease, is_stale

TABLE = Digest("ab" * 32)
HOLDER = """
import sys
from fsmount.store import Store
lease = Store.open(sys.argv[1]).lease("mount")
print("held", flush=True)
sys.stdin.read()
"""


DYING = """
import os, signal, sys
from fsmount.store import Store
store = Store.open(sys.argv[1])
staging = store.staging(store.lease("pack"))
staging.__enter__()
store.lease("mount")
os.kill(os.getpid(), signal.SIGKILL)
"""


def only(store: Store) -> LeaseRecord:
    (lease,) = store.leases.all()
    assert isinstance(lease, LeaseRecord)
    return lease


def edit(path: str, **changes: Any) -> None:
    """Change what a lease says, but not when it was renewed."""
    times = os.stat(path)
    value = json.loads(Path(path).read_text()) | changes
    os.unlink(path)
    Path(path).write_text(json.dumps(value))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def age(path: str, seconds: float) -> None:
    renewed = os.stat(path).st_mtime - seconds
    os.utime(path, (renewed, renewed))


def test_a_lease_says_who_holds_what(store: Store) -> None:
    with store.lease("pack", tables=[TABLE], objects=[TABLE], ttl=60) as lease:
        found = only(store)
        assert (found.kind, found.tables, found.objects, found.ttl) == (
            *("pack", (TABLE,)),
            *((TABLE,), 60),
        )
        assert found.owner.pid == os.getpid()
        assert Path(lease.path).stem == found.id
        assert store.leases.live() == (found,)
    assert store.leases.all() == ()
    assert os.listdir(f"{store.path}/staging") == []


def test_leases_are_apart(store: Store) -> None:
    with store.lease("pack"), store.lease("mount"), store.lease("gc"):
        assert sorted(lease.kind for lease in store.leases.live()) == ["gc", "mount", "pack"]


def test_it_is_stale_when_its_time_has_passed(store: Store) -> None:
    with store.lease("mount", ttl=100) as lease:
        age(lease.path, 90)
        assert not is_stale(only(store), store.leases.now())
        age(lease.path, 20)
        assert is_stale(only(store), store.leases.now())
        assert store.leases.live() == ()
        lease.renew()
        assert len(store.leases.live()) == 1


def test_no_lease_holds_for_ever(store: Store) -> None:
    with store.lease("mount") as lease:
        edit(lease.path, ttl=10**12, boot_id="elsewhere")
        assert len(store.leases.live()) == 1
        age(lease.path, MAX_TTL + 10)
        assert store.leases.live() == ()


@pytest.mark.parametrize("reaped", [True, False])
def test_it_is_stale_at_once_when_its_process_is_killed(store: Store, reaped: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, store.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"held\n"
        assert only(store).owner.pid == holder.pid
        assert len(store.leases.live()) == 1
        holder.send_signal(signal.SIGKILL)
        if reaped:
            holder.wait()
        else:
            os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
        assert store.leases.live() == ()


def test_another_process_with_the_same_number_does_not_count(store: Store) -> None:
    with store.lease("mount") as lease:
        edit(lease.path, start_time=only(store).owner.start_time + 1)
        assert store.leases.live() == ()


@pytest.mark.parametrize("name", ["boot_id", "pid_namespace"])
def test_a_process_that_can_not_be_seen_from_here_may_live(store: Store, name: str) -> None:
    with store.lease("mount") as lease:
        edit(lease.path, **{name: "other", "start_time": 1})
        assert len(store.leases.live()) == 1


def test_a_collected_lease_can_not_be_renewed(store: Store) -> None:
    with store.lease("mount") as lease:
        os.unlink(lease.path)
        with pytest.raises(StoreError, match="is gone"):
            lease.renew()


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"format": 2}', '{"format": 1, "kind": "other"}', "[" * 100_000],
)
def test_a_lease_that_can_not_be_read_counts_for_a_day(store: Store, text: str) -> None:
    path = f"{store.path}/leases/odd.json"
    Path(path).write_text(text)
    with pytest.raises(FormatError, match=r"odd\.json can't be read"):
        store.leases.live()
    assert isinstance(store.leases.all()[0], UnreadableLease)
    age(path, MAX_TTL + 10)
    assert store.leases.live() == ()


def test_a_hostile_digest_makes_it_unreadable(store: Store) -> None:
    with store.lease("mount") as lease:
        edit(lease.path, objects=["../../etc/passwd"])
        assert isinstance(store.leases.all()[0], UnreadableLease)


@pytest.mark.parametrize("ttl", [0, -1, MAX_TTL + 1])
def test_odd_times_to_live_are_refused(store: Store, ttl: int) -> None:
    with pytest.raises(InvalidNameError):
        store.lease("mount", ttl=ttl)


def test_sweep_removes_what_the_dead_left_and_nothing_else(store: Store) -> None:
    held = store.lease("pack")
    with store.staging(held) as mine:
        with subprocess.Popen([sys.executable, "-c", DYING, store.path]) as process:
            assert process.wait(timeout=60) == -signal.SIGKILL
        (left,) = set(os.listdir(f"{store.path}/staging")) - {held.id}
        assert len(store.leases.all()) == 3
        unowned = f"{store.path}/staging/{'0' * 32}"
        os.mkdir(unowned)
        store.sweep()
        assert {lease.id for lease in store.leases.live()} == {held.id}
        assert set(os.listdir(f"{store.path}/staging")) == {held.id, "0" * 32} - {left}
        os.utime(unowned, (0, 0))  # older than any lease may be
        store.sweep()
        assert os.listdir(f"{store.path}/staging") == [os.path.basename(mine)]
    held.release()
