"""Whoever dies, whenever: an error or a run that goes on, and nothing that stays behind."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from small_versions import build, damage, numbered
from test_dataset import numbers
from test_workers import wait_for, wait_gone
from torch.utils.data import DataLoader
from worker_transforms import Stuck

from fsmount.errors import IntegrityError, LoadError
from fsmount_loader import Batch, Generators, ShardDataset, ShardLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

FORK = multiprocessing.get_context("fork")


def left_behind() -> dict[str, Any]:
    """Processes, blocks that are mapped or open, and files that may outlive their users."""
    gc.collect()
    open_files = [_target(name) for name in os.listdir("/proc/self/fd")]
    return {
        "children": len(multiprocessing.active_children()),
        "open": len(open_files),
        "open blocks": sum("memfd:fsmount" in target for target in open_files),
        "mapped blocks": Path("/proc/self/maps").read_text().count("memfd:fsmount"),
        "shared memory": sorted(os.listdir("/dev/shm")),  # noqa: S108 - where torch has its own
    }


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:  # the listing's own
        return ""


class Dies:
    """A transform that ends its process, in some way, at a sample."""

    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end

    def __call__(self, batch: Batch, generators: Generators) -> Batch:
        if 2003 in numbers(batch):
            self._end()
        return batch


def _exhausted(data: ShardDataset) -> None:
    assert len(list(ShardLoader(data, 2))) == 6


def _closed(data: ShardDataset) -> None:
    iterator = iter(ShardLoader(data, 2))
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    assert list(iterator) == []


def _dropped(data: ShardDataset) -> None:
    kept = next(iter(ShardLoader(data, 2)))["x"]
    assert len(kept) == 3


def _not_begun(data: ShardDataset) -> None:
    iter(ShardLoader(data, 2))


def _interrupted(data: ShardDataset) -> None:
    def train() -> None:
        for _ in ShardLoader(data, 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()


def _dying(end: Callable[[], object], message: str) -> Callable[[ShardDataset], None]:
    def run(data: ShardDataset) -> None:
        dying = ShardDataset(data_root(data), batch_size=3, transform=Dies(end))
        with pytest.raises(LoadError, match=message):
            list(ShardLoader(dying, 2))

    return run


def data_root(data: ShardDataset) -> str:
    return data._plan.files.root


@pytest.mark.parametrize(
    "run",
    [
        _exhausted,
        _closed,
        _dropped,
        _not_begun,
        _interrupted,
        _dying(lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        _dying(lambda: os._exit(7), "exited with code 7"),
        _dying(lambda: exec("raise SystemExit(3)"), "exited with code 3"),  # noqa: S102
    ],
)
def test_nothing_stays_behind(small: Path, run: Callable[[ShardDataset], None]) -> None:
    data = ShardDataset(small, batch_size=3)
    before = left_behind()
    run(data)
    assert left_behind() == before


def test_a_run_goes_on_after_a_worker_was_killed(larger: Path, tmp_path: Path) -> None:
    """In the same process, from the state that is of the batches handed out."""
    order = [numbers(batch) for batch in ShardDataset(larger, batch_size=3)]
    pids = tmp_path / "pids"
    pids.mkdir()
    loader = ShardLoader(ShardDataset(larger, batch_size=3), 2)
    seen = []

    def train() -> None:
        for batch in loader:
            seen.append(numbers(batch))
            if len(seen) == 2:
                for child in multiprocessing.active_children():
                    os.kill(child.pid or 0, signal.SIGKILL)

    with pytest.raises(LoadError, match="was killed by SIGKILL"):
        train()
    assert 2 <= len(seen) < 10  # of 35: no more were built ahead
    assert loader.state_dict()["position"] == 3 * len(seen)
    loader.load_state_dict(loader.state_dict())
    seen += [numbers(batch) for batch in loader]
    assert seen == order
    again = ShardLoader(ShardDataset(larger, batch_size=3, transform=Stuck(pids)), 2)
    thread = threading.Thread(target=lambda: os.kill(wait_for(pids, 1)[0], signal.SIGKILL))
    thread.start()
    with pytest.raises(LoadError, match="was killed by SIGKILL"):  # though nobody else comes
        next(iter(again))
    thread.join()


def cut_hangs() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(100)


def _train(root: Path, folder: Path, workers: int, told: Connection) -> None:
    """Train two epochs, a state after each batch; go on where the last one stood."""
    cut_hangs()
    data = ShardDataset(root, batch_size=2)
    loader = ShardLoader(data, workers)
    path = folder / "state.json"
    if path.exists():
        loader.load_state_dict(json.loads(path.read_text()))
    first = loader.state_dict()["epoch"]
    for epoch in range(first, 2):
        data.set_epoch(epoch)
        for batch in loader:
            state = loader.state_dict()
            told.send((epoch, state["position"], numbers(batch), _children()))
            new = folder / "state.new"
            new.write_text(json.dumps(state))
            new.replace(path)
    told.send(None)


def _children() -> list[int]:
    return [child.pid or 0 for child in multiprocessing.active_children()]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_trainer_that_is_killed_goes_on_where_it_stood(
    small: Path, tmp_path: Path, workers: int
) -> None:
    data = ShardDataset(small, batch_size=2)
    wanted = {
        (epoch, 2 * (place + 1)): numbers(batch)
        for epoch in range(2)
        for place, batch in enumerate(data)
    }
    seen: dict[tuple[int, int], list[int]] = {}
    for patience in (4, 3, 5, 1000):
        ours, theirs = FORK.Pipe(duplex=False)
        trainer = FORK.Process(target=_train, args=(small, tmp_path, workers, theirs))
        trainer.start()
        theirs.close()
        pids = []
        for _ in range(patience):
            message = ours.recv()
            if message is None:
                break
            epoch, position, batch, pids = message
            assert seen.setdefault((epoch, position), batch) == batch
        trainer.kill()
        trainer.join()
        ours.close()
        for pid in pids:
            wait_gone(pid)
    assert message is None
    assert seen == wanted
    for epoch in range(2):
        batches = [batch for (of, _), batch in seen.items() if of == epoch]
        assert len(set(chain.from_iterable(batches))) == 18


@pytest.mark.parametrize("kind", ["ShardLoader", "DataLoader"])
def test_an_interrupt_from_the_keyboard_ends_all(small: Path, kind: str) -> None:
    """It goes to the trainer and to its workers, which are in the middle of something."""
    ours, theirs = FORK.Pipe(duplex=False)

    def train() -> None:
        cut_hangs()
        os.setsid()  # a group of its own, as a terminal gives its commands
        data = ShardDataset(small, batch_size=3)
        if kind == "ShardLoader":
            endless = chain.from_iterable(iter(lambda: ShardLoader(data, 2), None))
        else:
            plain = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
            endless = chain.from_iterable(iter(lambda: plain, None))
        for number, _ in enumerate(endless):
            if number == 8:
                theirs.send(_children())
            if number > 8:
                threading.Event().wait(0.01)

    trainer = FORK.Process(target=train)
    trainer.start()
    theirs.close()
    pids = ours.recv()
    assert len(pids) == 2
    files = [os.pidfd_open(pid) for pid in pids]
    os.killpg(trainer.pid or 0, signal.SIGINT)
    trainer.join(60)
    assert trainer.exitcode == 1  # of a KeyboardInterrupt
    for file in files:
        assert select.select([file], [], [], 60)[0]
        os.close(file)


@pytest.mark.parametrize("kind", ["ShardLoader", "DataLoader"])
def test_workers_use_pyarrow_after_the_trainer_used_it(small: Path, kind: str) -> None:
    """An error's key is read from a manifest, in a fork of a process that ran DuckDB."""
    data = ShardDataset(small, batch_size=3, where="n <> 1", columns=["n"], keys=True, retries=0)
    damage(small / "shards" / "d" / "000000.tar", int(data._plan.rows.offset[-1]) + 9)
    plain = DataLoader(data, batch_size=None, num_workers=2)
    loader: Any = ShardLoader(data, 2, start_method="fork") if kind == "ShardLoader" else plain
    batches = iter(loader)
    with pytest.raises(IntegrityError, match=r"sample 'd/0006' at offset"):
        list(batches)
    if kind == "DataLoader":
        batches._shutdown_workers()  # else the next collection of garbage waits for them


@pytest.mark.parametrize("kind", ["ShardLoader", "DataLoader"])
def test_blocks_and_files_are_as_many_after_many_epochs(tmp_path: Path, kind: str) -> None:
    samples = numbered(12)
    for one in samples:
        one.arrays["x"].resize(1 << 12, refcheck=False)
    data = ShardDataset(build(tmp_path / "v", {"a": [samples]}), batch_size=2, keys=True)
    plain = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
    loader: Any = ShardLoader(data, 2) if kind == "ShardLoader" else plain

    def train(epochs: int) -> dict[str, Any]:
        for _ in range(epochs):
            for batch in loader:
                assert batch["x"].shape == (2, 1 << 12)
        return left_behind()

    assert train(5) == train(15)
