"""Programs of the tests under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def torchrun(ranks: int, program: str, out: Path, *arguments: Path) -> list[dict[str, Any]]:
    """Run a program of this folder with `arguments` and `out`; what each rank wrote into that."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = [f"--nproc-per-node={ranks}", f"--log-dir={out}/log"]
    done = subprocess.run(
        [*command, *options, Path(__file__).with_name(program), *arguments, out],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]
