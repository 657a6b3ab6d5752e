"""Trainers that handle signals: handlers run in the trainer alone, and its exit never hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("signals_program.py")


@pytest.mark.parametrize(
    ("kind", "method"), [("shard", "fork"), ("torch", "fork"), ("shard", "spawn")]
)
def test_a_handler_runs_in_the_trainer_alone_and_the_trainer_ends(
    small: Path, kind: str, method: str
) -> None:
    command = [sys.executable, "-W", "ignore", PROGRAM, small, kind, method]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as trainer:
        try:
            output, errors = trainer.communicate(timeout=200)
        finally:
            trainer.kill()
    lines = [f"SIGUSR1 in {trainer.pid}", f"an epoch in {trainer.pid}"]
    assert (output.splitlines(), errors, trainer.returncode) == (lines, "", 0)
