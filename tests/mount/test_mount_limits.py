"""Servers that have too little of what they need."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from mounting import Mounter, request_for
from serving import both_drivers, processes_about

from fsmount.errors import MountError
from fsmount.mount import lifecycle
from fsmount.mount.mountinfo import mount_at
from fsmount.mount.request import KERNEL, MountRequest
from fsmount.store import Store
from fsmount.testing import tiny

pytestmark = pytest.mark.mounted

Limited = Callable[[str], None]
STRANGE = Path(__file__).parents[1] / "kernel" / "strange.py"


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Limited:
    """Gives servers the limits that a shell's commands set."""
    plain = lifecycle._command

    def limit(commands: str) -> None:
        shell = ["/bin/bash", "-c", f'{commands}; exec "$@"', "server"]
        monkeypatch.setattr(
            lifecycle, "_command", lambda request, *more: [*shell, *plain(request, *more)]
        )

    return limit


@both_drivers
@pytest.mark.usefixtures("version")
def test_a_server_out_of_descriptors_says_so(
    store: Store, mounter: Mounter, limited: Limited, driver: str, tmp_path: Path
) -> None:
    limited("ulimit -n 32")
    log = tmp_path / "log"
    root = mounter(request_for(store, driver=driver, passthrough=False, log=str(log)))
    path = f"{root}/shards/root_/000000.tar"
    with ExitStack() as stack:

        def open_many() -> None:
            for _ in range(40):
                stack.enter_context(open(path, "rb"))

        with pytest.raises(OSError, match="Input/output error"):
            open_many()
    assert "000000.tar" in log.read_text(encoding="utf-8")
    assert "Too many open files" in log.read_text(encoding="utf-8")
    assert Path(path).read_bytes()


@both_drivers
def test_samples_are_read_with_fewer_descriptors_than_there_are_samples(
    store: Store, mounter: Mounter, limited: Limited, driver: str
) -> None:
    """Neither decoded files nor lists of samples are kept until there is no descriptor left."""
    limited("ulimit -n 96")
    tag = f"many-{driver}"
    ids = [f"p{number:02}" for number in range(60)]
    tiny.publish(store, tag, {one: [tiny.numbered(f"{one}/{n}", n) for n in (1, 2)] for one in ids})
    root = mounter(request_for(store, tag, driver=driver))
    for suffix in ("npz", "safetensors"):
        for one in ids:
            for number in (1, 2):
                assert Path(f"{root}/samples/{one}/{number}.{suffix}").read_bytes()


@both_drivers
@pytest.mark.usefixtures("version")
def test_a_server_that_can_have_no_threads_is_an_error_at_once(
    store: Store, mountpoint: str, limited: Limited, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread's stack is larger than all memory that there may be."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    limited("ulimit -s 20000000; ulimit -v 16000000")
    begun = time.monotonic()
    with pytest.raises(MountError, match=r"raise its limit of memory \(ulimit -v\)"):
        lifecycle.mount(MountRequest(store.path, "v1", mountpoint, driver=driver))
    assert time.monotonic() - begun < lifecycle.START_SECONDS / 2
    assert mount_at(mountpoint) is None
    assert not processes_about(mountpoint)


@pytest.mark.usefixtures("version")
def test_a_supervisor_killed_before_it_answers_is_an_error_at_once(
    store: Store, mountpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server would serve on, and held what the command waits at."""
    program = tmp_path / "program.py"
    program.write_text(f"""
import os, sys
if os.fork():
    os._exit(0)
from fsmount.mount import process
from fsmount.mount.kernel import prepare
real = prepare.command
prepare.command = lambda config, told: [
    sys.executable, {str(STRANGE)!r}, "mute", config.to_json(), str(told)
]
sys.exit(process.main(*sys.argv[1:]))
""")
    monkeypatch.setattr(
        lifecycle,
        "_command",
        lambda request, *more: [sys.executable, str(program), request.to_json(), *more],
    )
    begun = time.monotonic()
    with pytest.raises(MountError, match="the server died before it served"):
        lifecycle.mount(MountRequest(store.path, "v1", mountpoint, driver=KERNEL))
    assert time.monotonic() - begun < lifecycle.START_SECONDS / 2
    assert mount_at(mountpoint) is None
    assert not processes_about(mountpoint, "strange.py")
