"""A mount as process 1 of a container."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from mounting import wait_for
from serving import both_drivers, children

from fsmount.model import Version
from fsmount.store import Store

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make namespaces"),
]

SECONDS = 30


@both_drivers
def test_orphans_are_waited_for_and_signals_end_it(
    store: Store, version: Version, mountpoint: str, driver: str
) -> None:
    del version
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-m",
               "fsmount_cli.main", "mount", "--foreground", "--driver", driver,
               f"{store.path}@v1", mountpoint]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: children(process.pid) != [], SECONDS)
            [first] = children(process.pid)
            inside = ["nsenter", "-t", str(first), "--pid", "--mount"]
            look = [*inside, "test", "-e", f"{mountpoint}/VERSION.json"]
            wait_for(lambda: subprocess.run(look, check=False).returncode == 0, SECONDS)
            [serving] = children(first)
            orphan = "exec 3<&0; (echo begun; read line <&3) & exit 0"
            with subprocess.Popen(
                [*inside, "sh", "-c", orphan], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as parent:
                assert parent.stdout is not None
                assert parent.stdout.readline() == b"begun\n"
                wait_for(lambda: len(children(first)) == 2, SECONDS)
            wait_for(lambda: children(first) == [serving], SECONDS)
            os.kill(first, signal.SIGTERM)
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()
