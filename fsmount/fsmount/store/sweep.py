"""Clearing away what processes left behind that did not end by themselves.

Only what is known to be nobody's goes: a stale lease, the staging directory of its name, and
staging of no lease that is older than any lease may be.
"""

from __future__ import annotations

from fsmount.errors import StoreError
from fsmount.store import durable, inside
from fsmount.store.inside import StorePath
from fsmount.store.leases import MAX_TTL, Leases, is_stale


def sweep(leases: Leases) -> None:
    """Remove stale leases and the staging of the dead; StoreError, StoreWriteError."""
    now = leases.now()
    stale = {}  # by id; listed before the staging, so that a newer lease is not among them
    held = set()
    for path, lease in leases.files():
        lease_id = path.name.partition(".")[0]
        if is_stale(lease, now):
            stale[lease_id] = path
        else:
            held.add(lease_id)
    for name, path in _staging(leases.root):
        if name in stale or (name not in held and _age(path, now) > MAX_TTL):
            durable.remove_tree(path)
    for path in stale.values():
        durable.remove(path)


def _staging(root: str) -> list[tuple[str, StorePath]]:
    directory = StorePath(root, durable.STAGING)
    try:
        return [(name, directory / name) for name in inside.names_in(directory)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"can't read {directory}: {durable.cause(error)}") from error


def _age(path: StorePath, now: float) -> float:
    """Seconds since anything was put into the directory; 0 if it is gone."""
    try:
        return now - inside.status(path).st_mtime
    except FileNotFoundError:
        return 0.0
