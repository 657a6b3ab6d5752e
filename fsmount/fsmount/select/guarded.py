"""Expressions that may cost without bound, in a process whose time and memory have one.

DuckDB's own memory limit does not count what a function builds for one value, and an interrupt
comes to nothing while it does. So `lpad('x', 2000000000, 'y')` runs here, where it can be ended.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from fsmount.errors import PlanError
from fsmount.select.expression import Engine, Expression, Params, Rows, refusal

SECONDS = "FSMOUNT_WHERE_SECONDS"  # environment: seconds for the rows of one query
_DEFAULT_SECONDS = 60.0
_MEMORY = 4 << 30  # bytes of address space of the process


def matches(table: pa.Table, expression: Expression, params: Params) -> Rows:
    """The ascending int64 places of the rows of `table` for which `expression` is true.

    The same as `Engine.matches`, but PlanError as well when it takes more than the time that
    `FSMOUNT_WHERE_SECONDS` gives (60 by default), or more than 4 GiB.
    """
    seconds = _seconds()
    answer = _ask(_encode(table, expression, params), expression, seconds)
    if "error" in answer.schema.names:
        raise PlanError(answer["error"][0].as_py())
    return np.asarray(answer["place"].to_numpy(), np.int64)


def _seconds() -> float:
    text = os.environ.get(SECONDS) or str(_DEFAULT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise PlanError(f"{SECONDS}={text!r} is not a number of seconds above 0")
    return seconds


def _ask(question: bytes, expression: Expression, seconds: float) -> pa.Table:
    command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        try:
            answer, _ = process.communicate(question, seconds)
        except subprocess.TimeoutExpired:
            raise refusal(
                expression.sql, f"no answer in {seconds:g} seconds; {SECONDS} sets another limit"
            ) from None
        finally:
            process.kill()
    if process.returncode:
        raise refusal(expression.sql, _obituary(process.returncode))
    return pa.ipc.open_stream(answer).read_all()


def _obituary(code: int) -> str:
    if code == -signal.SIGKILL:
        return "the process that evaluated it was killed (out of memory?)"
    return f"it needs more than {_MEMORY >> 30} GiB of memory, or makes DuckDB crash"


def _encode(table: pa.Table, expression: Expression, params: Params) -> bytes:
    named = isinstance(params, Mapping)
    given = params if isinstance(params, Mapping) else dict(enumerate(params or ()))
    try:
        values = pa.table({str(name): pa.array([value]) for name, value in given.items()})
    except (pa.ArrowException, TypeError) as error:
        raise refusal(expression.sql, f"a parameter that Arrow has no type for: {error}") from None
    about = {"sql": expression.sql, "named": named}
    sink = pa.BufferOutputStream()
    for part in (values.replace_schema_metadata({"about": json.dumps(about)}), table):
        with pa.ipc.new_stream(sink, part.schema) as writer:
            writer.write_table(part)
    return bytes(sink.getvalue())


def main() -> None:
    """Answer the question on standard input on standard output."""
    _limit_memory()
    with pa.PythonFile(sys.stdin.buffer, "r") as source:
        values = pa.ipc.open_stream(source).read_all()
        table = pa.ipc.open_stream(source).read_all()
    answer = _answer(values, table)
    with pa.ipc.new_stream(pa.PythonFile(sys.stdout.buffer, "w"), answer.schema) as writer:
        writer.write_table(answer)


def _answer(values: pa.Table, table: pa.Table) -> pa.Table:
    about: dict[str, Any] = json.loads(values.schema.metadata[b"about"])
    row = {name: values[name][0].as_py() for name in values.column_names}
    params = row if about["named"] else list(row.values())
    expression = Expression(about["sql"], (), frozenset(), bounded=False)
    with Engine() as engine:
        try:
            found = engine.matches(table, expression, params or None)
        except PlanError as error:
            return pa.table({"error": [str(error)]})
    return pa.table({"place": pa.array(found, pa.int64())})


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
