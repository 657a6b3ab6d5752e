"""What all tests rely on."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("patient", deadline=None)  # other people's work may slow a run down
settings.load_profile("patient")

# A shell starts what it runs in the background with interrupts ignored, and every process started
# from there inherits that; the commands under test are to be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)

_MOUNTS = ("cli/test_bench_", "kernel/", "mount/", "training/")


class FilesAtOnce(LoadScopeScheduling):
    """Files run beside each other, but those that mount, in one process one after the other.

    They look at all mounts of the machine, and copy them into namespaces of their own.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0].removeprefix("tests/")
        return "mounts" if file.startswith(_MOUNTS) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesAtOnce:
    return FilesAtOnce(config, log)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of the tests' own, for them and for all that they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
