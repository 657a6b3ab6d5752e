"""Transforms that misbehave, in a module that spawned workers can import."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fsmount_loader import Batch, Generators


class Refused(ValueError):
    """An error whose class can't be pickled: it needs two arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def raises_value_error(batch: Batch, generators: Generators) -> Batch:
    raise ValueError("no value")


def raises_connection_error(batch: Batch, generators: Generators) -> Batch:
    raise ConnectionResetError("the label server is gone")


def raises_refused(batch: Batch, generators: Generators) -> Batch:
    raise Refused("this", "that")


def not_picklable(batch: Batch, generators: Generators) -> Mapping[str, Any]:
    return {**batch, "function": lambda: None}


class Stuck:
    """Writes its process's id to a folder, and never returns."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, batch: Batch, generators: Generators) -> Batch:
        (self._folder / str(os.getpid())).touch()
        while True:
            time.sleep(60)


class Stasher:
    """Gives the batch before this one too."""

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None

    def __call__(self, batch: Batch, generators: Generators) -> Mapping[str, Any]:
        last, self._last = self._last, batch["x"]
        return {**batch, "last": batch["x"] if last is None else last, "double": batch["x"] * 2}
