"""A trainer that handles signals: python signals_program.py VERSION shard|torch START_METHOD.

It takes some batches, is sent SIGUSR1, with its workers if they are forks, takes the others, and
exits in the middle of an epoch.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from torch.utils.data import DataLoader

from fsmount_loader import ShardDataset, ShardLoader

handled = threading.Event()


def handle(number: int, frame: object) -> None:
    """Say which process runs this."""
    os.write(1, f"{signal.Signals(number).name} in {os.getpid()}\n".encode())
    handled.set()


def main(version: str, kind: str, method: str) -> None:
    """Train."""
    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGUSR1, handle)
    data = ShardDataset(version, batch_size=2)
    loader: Any = (
        ShardLoader(data, 2, start_method=method)
        if kind == "shard"
        else DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=method)
    )
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    os.kill(0 if method == "fork" else os.getpid(), signal.SIGUSR1)
    assert handled.wait(60)
    for _ in batches:
        pass
    os.write(1, f"an epoch in {os.getpid()}\n".encode())
    batches = iter(loader)
    next(batches)


if __name__ == "__main__":
    main(*sys.argv[1:])
