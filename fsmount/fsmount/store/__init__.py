"""Objects by digest, versions by tag, leases; on a local or network file system."""

from fsmount.store.leases import Lease, LeaseRecord
from fsmount.store.objects import Objects, ObjectWriter
from fsmount.store.store import Store

__all__ = ["Lease", "LeaseRecord", "ObjectWriter", "Objects", "Store"]
