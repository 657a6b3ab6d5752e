"""The process that serves a mount."""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Callable

from fsmount.errors import FsmountError, MountError
from fsmount.model import TableRef, TagRef, VersionDocument, parse_ref
from fsmount.mount import fusepy_driver, records, threads
from fsmount.mount.leases import LeaseKeeper
from fsmount.mount.records import Record
from fsmount.mount.request import FUSEPY, Answer, MountRequest
from fsmount.store import Store
from fsmount.store.owner import Owner as Process
from fsmount.vfs.filesystem import ROOT_NODE, FileSystem
from fsmount.vfs.helpers import Helpers
from fsmount.vfs.reads import ObjectReader
from fsmount.vfs.sample_data import SampleData
from fsmount.vfs.store import StoreTree
from fsmount.vfs.version import VersionTree

log = logging.getLogger("fsmount.mount")


def serve(request: MountRequest, notes: tuple[str, ...], answer: Callable[[Answer], None]) -> None:
    """Mount and serve until unmounted, SIGTERM or SIGINT; must be called in the main thread.

    `answer` is called when the root has been looked at through the kernel, from another thread;
    it passes `notes` on.
    Raises FsmountError if it can't be mounted; then `answer` was not called.
    """
    _raise_limit_on_files()
    told = [*notes]
    store = Store.open(request.store)
    helpers = Helpers()
    with LeaseKeeper(store, told.append) as keeper:
        document, filesystem = _open(store, request, keeper, helpers)
        serving = _Serving(request, document, told, answer, helpers)
        serving.begin()
        try:
            fusepy_driver.serve(filesystem, request.mountpoint, serving.options, serving.started)
        finally:
            serving.forget()
        if serving.failure is not None:
            raise serving.failure


class _Serving:
    """One mount from the kernel's first question on."""

    def __init__(
        self,
        request: MountRequest,
        document: VersionDocument | None,
        notes: list[str],
        answer: Callable[[Answer], None],
        helpers: Helpers,
    ) -> None:
        self._helpers = helpers
        self.failure: FsmountError | None = None
        self._request = request
        self._document = document
        self._notes = notes
        self._answer = answer
        self._record: Record | None = None
        self._asked = threading.Event()
        self._shown = (
            None if document is None else document.tag or f"sha256:{document.table.digest}"
        )

    @property
    def options(self) -> fusepy_driver.FuseOptions:
        source = records.source_of(self._request.store, self._request.ref)
        return fusepy_driver.FuseOptions(source, self._request.allow_other)

    def begin(self) -> None:
        """Get ready for `started`, before anything is mounted; MountError where that can't be."""
        threads.start(self._announce)

    def started(self) -> None:
        """The kernel asks; whether it also gets its answers is seen from another thread."""
        self._asked.set()

    def forget(self) -> None:
        """Remove the record of this mount."""
        if self._record is not None:
            records.remove(self._record)

    def _announce(self) -> None:
        # Signals are for the main thread, which waits in libfuse.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._asked.wait()
        try:
            self._keep_record(_look_at_root(self._request.mountpoint))
            self._answer(Answer(None, self._shown, tuple(self._notes)))
            self._helpers.start()
        except FsmountError as error:
            self.failure = error
            os.kill(os.getpid(), signal.SIGTERM)

    def _keep_record(self, device: str) -> None:
        document = self._document
        record = Record(
            mountpoint=self._request.mountpoint,
            store=self._request.store,
            ref=self._request.ref,
            tag=None if document is None else document.tag,
            table=None if document is None else document.table.digest,
            driver=FUSEPY,
            since=records.now(),
            server=Process.current(),
            log=self._request.log,
            device=device,
        )
        try:
            records.write(record)
            self._record = record
        except MountError as error:
            self._notes.append(str(error))


def _open(
    store: Store, request: MountRequest, keeper: LeaseKeeper, helpers: Helpers
) -> tuple[VersionDocument | None, FileSystem]:
    reader = ObjectReader(store.objects, request.verify)
    samples = SampleData(helpers, reader)
    if request.ref is None:
        tree = StoreTree(
            store,
            reader,
            request.look,
            samples=samples,
            clock=time.monotonic,
            on_first_use=lambda document: keeper.hold([document.table.digest]),
        )
        return None, tree
    document = store.resolve(parse_ref(request.ref))
    table = document.table.digest
    keeper.hold([table])
    version = store.version(TableRef(table) if document.tag is None else TagRef(document.tag))
    return document, VersionTree(
        version, store.keysets_of(table), reader, request.look, samples=samples
    )


def _look_at_root(mountpoint: str) -> str:
    """Stat the mount's root through the kernel and return its device, as mountinfo has it."""
    try:
        root = os.stat(mountpoint)
    except OSError as error:
        raise MountError(f"the mount does not answer: {error}") from error
    if root.st_ino != ROOT_NODE:
        raise MountError(f"{mountpoint} was covered by another mount")
    return f"{os.major(root.st_dev)}:{os.minor(root.st_dev)}"


def _raise_limit_on_files() -> None:
    """An open file of the mount is an open file of its server."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
