"""What a bench has started ends with it, in whichever moment of its start it is interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = """
import os, subprocess, sys
from fsmount_cli.bench import scratch

scratch._END_SECONDS = 0.3
where, seconds, program, end = sys.argv[1:]
with scratch.scratch_directory(where, float(seconds)):
    os.environ["PROGRAM"] = program
    started = subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE)
    pid = int(started.stdout.readline())
    print(pid, flush=True)
    exec(end)
"""
STUBBORN = "import os, signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
PROGRAMS = {
    # Most of the time without arguments that could be seen.
    "starts for ever": "print(os.getpid(), flush=True);"
    "os.execv(sys.executable, [sys.executable, '-S', '-c', os.environ['PROGRAM']])",
    "in the background": "os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0);"
    "print(os.getpid(), flush=True); signal.pause()",
    "stopped": "print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP)",
}
# Its children are killed with it, or it starts another one.
PROGRAMS["replaces its child"] = """
while True:
    child = os.fork()
    if child == 0:
        signal.pause()
    print(child, flush=True)
    os.wait()
"""


def bench(scratch: Path, seconds: float, program: str, end: str) -> tuple[int, str]:
    """The process that is said to be started, and the bench's last line on stderr."""
    command = [sys.executable, "-c", BENCH, scratch, str(seconds), f"{STUBBORN}{program}", end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    return int(done.stdout), done.stderr.splitlines()[-1]


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_interrupted_bench_ends_what_it_lost_sight_of(tmp_path: Path, program: str) -> None:
    pid, said = bench(tmp_path, 60, PROGRAMS[program], "raise RuntimeError('interrupted')")
    assert said == "RuntimeError: interrupted"
    assert not os.path.exists(f"/proc/{pid}")
    assert list(tmp_path.iterdir()) == []


def test_a_bench_that_takes_too_long_ends_all(tmp_path: Path) -> None:
    program = PROGRAMS["replaces its child"]
    pid, said = bench(tmp_path, 1, program, "started.wait()")
    assert said.endswith("BenchError: not done in 1 s")
    assert not os.path.exists(f"/proc/{pid}")
    assert list(tmp_path.iterdir()) == []
