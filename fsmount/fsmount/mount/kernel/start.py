"""From a config to a mount that serves: what runs in the supervisor's process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable

from fsmount.errors import FsmountError
from fsmount.mount.kernel import server
from fsmount.mount.kernel.config import Config
from fsmount.mount.kernel.leasing import Leasing
from fsmount.mount.kernel.negotiate import Features
from fsmount.mount.kernel.recording import Recording
from fsmount.mount.kernel.supervisor import Supervisor
from fsmount.mount.locks import StartLock
from fsmount.mount.logs import log_to_stderr
from fsmount.mount.request import Answer
from fsmount.mount.telling import tell_parent, tell_people
from fsmount.vfs.helpers import Helpers
from fsmount.vfs.pathlist import open_list

log = logging.getLogger("fsmount.mount")

Serving = Callable[[Features, list[str]], None]


def supervise(config: Config, serving: Serving, closed: Iterable[int] = ()) -> None:
    """Mount and keep it served until it is unmounted, or SIGTERM. FsmountError.

    `serving` is called with what was agreed and notes for the user when the mount serves. `closed`
    are descriptors that only this process is to keep.
    """
    paths = None if config.paths is None else open_list(config.paths)
    lease = Leasing(config.store, config.tables)
    notes = [*config.notes, *filter(None, [lease.take()])]
    recording = Recording(config)
    helpers = Helpers()
    lock = StartLock(config.mountpoint, config.lock)
    supervisor = Supervisor(
        config,
        lambda: server.file_system(config, paths, helpers),
        lease.renew,
        lease.interval,
        on_server=recording.served_by,
        on_ready=helpers.start,
    )
    try:
        features = supervisor.mount()
        notes += filter(None, [recording.begin(features)])
        lock.release()
        supervisor.run(lambda: serving(features, notes), closed)
    finally:
        lock.release()
        recording.end()
        lease.release()


def main(text: str, descriptor: str | None) -> int:
    """Supervise what the JSON `text` says and return the exit code.

    When it serves, or can't, one Answer is written to `descriptor`; without one, people are told on
    stderr.
    """
    log_to_stderr()
    config = Config.from_json(text)
    tell = (
        tell_people(config.mountpoint, config.store)
        if descriptor is None
        else tell_parent(int(descriptor))
    )

    def serving(features: Features, notes: list[str]) -> None:
        tell(Answer(None, config.shown, tuple(notes), tuple(features.names()), os.getpid()))

    try:
        # Who waits for the answer learns from the descriptor's end that there will be none.
        supervise(config, serving, [] if descriptor is None else [int(descriptor)])
    except FsmountError as error:
        log.critical("%s", error)
        tell(Answer(error=str(error), supervisor_pid=os.getpid()))
        return error.exit_code
    log.info("%s: unmounted", config.mountpoint)
    return 0
