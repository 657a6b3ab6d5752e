"""Objects by digest, versions by tag, leases; on a local or network file system.

Names are imported when they are first asked for: a mount's server needs `durable` and `objects`
only, and must start without what reads Parquet.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsmount.store.leases import Lease, LeaseRecord
    from fsmount.store.objects import Mark, Objects, ObjectWriter
    from fsmount.store.store import Store

__all__ = ["Lease", "LeaseRecord", "Mark", "ObjectWriter", "Objects", "Store"]

_HOMES = {
    "Lease": "leases",
    "LeaseRecord": "leases",
    "Mark": "objects",
    "ObjectWriter": "objects",
    "Objects": "objects",
    "Store": "store",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
