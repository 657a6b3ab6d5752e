"""`python readers.py ROOT STORE SECONDS SEED KIND`: use a mount, and print what went wrong.

One JSON object: how much was done, and the first failures. KIND is read, find or map.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import sys
import time
from collections.abc import Callable

Failures = list[str]
_DROPPED_IN = 20


def objects_of(root: str, store: str) -> list[tuple[str, str]]:
    """The shards on the mount, each with its object."""
    with open(f"{root}/SHA256SUMS", encoding="utf-8") as file:
        lines = [line.rstrip("\n").split("  ", 1) for line in file]
    return [
        (f"{root}/{path}", f"{store}/objects/{digest[:2]}/{digest}")
        for digest, path in lines
        if path.startswith("shards/")
    ]


def read_once(rng: random.Random, objects: list[tuple[str, str]], failures: Failures) -> None:
    shown, real = rng.choice(objects)
    with open(shown, "rb", 0) as a, open(real, "rb", 0) as b:
        if rng.random() < 0.5:
            os.posix_fadvise(a.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(b.fileno()).st_size
        for _ in range(6):
            offset, length = rng.randrange(size), rng.randrange(2 << 20)
            if os.pread(a.fileno(), length, offset) != os.pread(b.fileno(), length, offset):
                failures.append(f"wrong bytes: {shown} {offset} {length}")


def find_once(root: str, expected: int, failures: Failures) -> None:
    def fail(error: OSError) -> None:
        failures.append(f"find: {error}")

    found = 0
    for directory, _, files in os.walk(root, onerror=fail):
        found += len(files)
        for name in files:
            os.stat(os.path.join(directory, name))
    if found != expected:
        failures.append(f"{found} files instead of {expected}")


def repeat(until: float, once: Callable[[], None], failures: Failures) -> int:
    done = 0
    while time.monotonic() < until and len(failures) < 5:
        try:
            once()
        except OSError as error:
            failures.append(repr(error))
        done += 1
    return done


def main(root: str, store: str, seconds: float, seed: int, kind: str) -> dict[str, object]:
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    failures: Failures = []
    objects = objects_of(root, store)
    until = time.monotonic() + seconds
    if kind == "read":
        done = repeat(until, lambda: read_once(rng, objects, failures), failures)
    elif kind == "find":
        expected = sum(len(files) for _, _, files in os.walk(root))
        done = repeat(until, lambda: find_once(root, expected, failures), failures)
    else:
        done = map_file(objects[0], until, rng, failures)
    return {"done": done, "failures": failures}


def map_file(pair: tuple[str, str], until: float, rng: random.Random, failures: Failures) -> int:
    with open(pair[1], "rb") as file:
        expected = file.read()
    with open(pair[0], "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

        def once() -> None:
            offset = rng.randrange(len(expected))
            if mapped[offset : offset + 50_000] != expected[offset : offset + 50_000]:
                failures.append(f"wrong bytes mapped at {offset}")
            if rng.randrange(_DROPPED_IN) == 0:
                mapped.madvise(mmap.MADV_DONTNEED)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        return repeat(until, once, failures)


if __name__ == "__main__":
    root, store, seconds, seed, kind = sys.argv[1:]
    sys.stdout.write(json.dumps(main(root, store, float(seconds), int(seed), kind)))
