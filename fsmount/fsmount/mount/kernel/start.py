"""From a config to a mount that serves: what runs in the supervisor's process."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from fsmount.errors import FsmountError
from fsmount.mount.kernel import server
from fsmount.mount.kernel.config import Config
from fsmount.mount.kernel.leasing import Leasing
from fsmount.mount.kernel.negotiate import Features
from fsmount.mount.kernel.supervisor import Supervisor
from fsmount.vfs.pathlist import open_list

log = logging.getLogger("fsmount.mount")

Serving = Callable[[Features, list[str]], None]


def supervise(config: Config, serving: Serving) -> None:
    """Mount and keep it served until it is unmounted, or SIGTERM. FsmountError.

    `serving` is called with what was agreed and notes for the user when the mount serves.
    """
    paths = None if config.paths is None else open_list(config.paths)
    lease = Leasing(config.store, config.tables)
    notes = list(filter(None, [lease.take()]))
    supervisor = Supervisor(
        config, lambda: server.file_system(config, paths), lease.renew, lease.interval
    )
    try:
        features = supervisor.mount()
        supervisor.run(lambda: serving(features, notes))
    finally:
        lease.release()


def main(text: str, descriptor: str | None) -> int:
    """Supervise what the JSON `text` says and return the exit code.

    One line of JSON is written to `descriptor` when it serves, or why it does not: an object with
    `error` and `shown` (text or null), `features` and `notes` (lists of text), `supervisor_pid`.
    """
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr
    )
    config = Config.from_json(text)
    told = None if descriptor is None else int(descriptor)
    if told is not None:
        os.set_inheritable(told, False)

    def tell(error: str | None, features: list[str], notes: list[str]) -> None:
        nonlocal told
        if told is None:
            for note in notes:
                log.warning("%s", note)
            return
        answer = {
            "error": error,
            "shown": config.shown,
            "features": features,
            "notes": notes,
            "supervisor_pid": os.getpid(),
        }
        with suppress(OSError):  # nobody waits
            os.write(told, json.dumps(answer).encode() + b"\n")
        os.close(told)
        told = None

    try:
        supervise(config, lambda features, notes: tell(None, [*features.names()], notes))
    except FsmountError as error:
        log.critical("%s", error)
        tell(str(error), [], [])
        return error.exit_code
    log.info("%s: unmounted", config.mountpoint)
    return 0
