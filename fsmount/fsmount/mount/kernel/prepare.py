"""What is done before a supervisor starts, in a process that may import anything."""

from __future__ import annotations

import sys

from fsmount.model import Ref, TableRef, TagRef, VersionDocument
from fsmount.mount.kernel.config import Config
from fsmount.store import Store
from fsmount.vfs.mapped import prepare
from fsmount.vfs.parted import Look


def prepare_version(
    store: Store, document: VersionDocument, mountpoint: str, source: str, look: Look
) -> Config:
    """The config that serves the version `document`, whose path list is made if need be."""
    table = document.table.digest
    ref: Ref = TableRef(table) if document.tag is None else TagRef(document.tag)
    paths = prepare(document, lambda: store.version(ref))
    return Config(
        store=store.path,
        mountpoint=mountpoint,
        source=source,
        shown=document.tag or f"sha256:{table}",
        paths=paths,
        tables=(table,),
        uid=look.owner.uid,
        gid=look.owner.gid,
        umask=look.owner.umask,
        list_samples=look.list_samples,
    )


def prepare_store(store: Store, mountpoint: str, source: str, look: Look) -> Config:
    """The config that serves all versions of `store`."""
    return Config(
        store=store.path,
        mountpoint=mountpoint,
        source=source,
        shown=None,
        paths=None,
        tables=(),
        uid=look.owner.uid,
        gid=look.owner.gid,
        umask=look.owner.umask,
        list_samples=look.list_samples,
    )


def command(config: Config, descriptor: int | None = None) -> list[str]:
    """The command of a supervisor that serves `config`, and tells `descriptor` when it does.

    The process that runs it lives as long as the mount; see `start.main` for what it tells.
    """
    told = [] if descriptor is None else [str(descriptor)]
    return [sys.executable, "-P", "-m", "fsmount.mount.kernel", config.to_json(), *told]
