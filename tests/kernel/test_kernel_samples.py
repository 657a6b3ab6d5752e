"""`samples/` of a real mount: what is decoded dies elsewhere, and needs no file of the package."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from kernel_mounts import Mounter, config_for, mounted, read, reads, wait_for
from processes import children_of, kill_whoever_reads

import fsmount
from fsmount.model import Version
from fsmount.mount.kernel.prepare import prepare_store
from fsmount.store import Store
from fsmount.testing import tiny
from fsmount.vfs.filesystem import Owner
from fsmount.vfs.parted import Look

pytestmark = pytest.mark.mounted

HEAVY = 64 << 20  # bytes of an array; decoding it takes long enough to be killed meanwhile


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Version]:
    """A sample that takes long, and others that do not, in shards of their own."""
    store = Store.create(str(tmp_path_factory.mktemp("data") / "store"))
    samples = [
        tiny.Sample("d/heavy", {"x": np.zeros(HEAVY, np.uint8)}),
        *(tiny.numbered(f"d/light{n}", n) for n in range(3)),
    ]
    return store, tiny.publish(store, "v1", {"d": samples}, samples_a_shard=1)


def test_a_sample_that_kills_what_decodes_it_is_an_error_of_its_own(
    mount: Mounter, heavy: tuple[Store, Version]
) -> None:
    store, version = heavy
    served = mount(store)
    digest = max(version.partitions[0].shards, key=lambda shard: shard.size).digest
    server, ended = served.server, threading.Event()
    assert len(read(f"{served.root}/samples/d/light0.npz")) > 0
    killing = threading.Thread(
        target=kill_whoever_reads, args=(server, store.objects.path(digest), ended)
    )
    killing.start()
    try:
        with pytest.raises(OSError, match="Input/output error") as caught:
            read(f"{served.root}/samples/d/heavy.safetensors")
        assert caught.value.errno == errno.EIO
        assert len(read(f"{served.root}/samples/d/light1.npz")) > 0
    finally:
        ended.set()
        killing.join()
    assert served.server == server
    assert "d/heavy" in served.log_text()
    assert digest in served.log_text()
    assert "was killed by signal 9, twice" in served.log_text()
    assert len(read(f"{served.root}/samples/d/heavy.safetensors")) > HEAVY


def test_a_sample_whose_size_cannot_be_told_is_listed_with_the_others(
    mount: Mounter, tmp_path: Path
) -> None:
    content = [tiny.Sample("d/0", {"x": np.zeros(1)}), tiny.Sample("d/1", {"x\0y": np.zeros(1)})]
    store = Store.create(str(tmp_path / "hostile"))
    tiny.publish(store, "v1", {"d": content})
    served = mount(store, list_samples=True)
    directory = f"{served.root}/samples/d"
    names = ["0.npz", "0.safetensors", "1.npz", "1.safetensors"]
    listed = subprocess.run(["ls", "-l", directory], capture_output=True, text=True, check=False)
    assert [line.split()[-1] for line in listed.stdout.splitlines()[1:]] == names
    assert "1.npz': Input/output error" in listed.stderr
    assert len(read(f"{directory}/0.npz")) == os.path.getsize(f"{directory}/0.npz")
    assert len(read(f"{directory}/1.safetensors")) > 0
    with pytest.raises(OSError, match="Input/output error"):
        read(f"{directory}/1.npz")
    assert "sample 'd/1': 'x\\x00y' can't be the name of an array in an .npz" in served.log_text()


def test_sizes_come_with_the_listing(mount: Mounter, tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "many"))
    tiny.publish(store, "v1", {"d": [tiny.numbered(f"d/{n}", n, size=1) for n in range(300)]})
    served = mount(store)
    directory = f"{served.root}/samples/d"
    assert os.path.getsize(f"{directory}/7.npz") == len(read(f"{directory}/7.npz"))
    before = reads(served)
    names = os.listdir(directory)  # all of them before the first is looked at, as `find` does
    assert all(os.path.getsize(f"{directory}/{name}") > 0 for name in names)
    assert len(names) == 750
    assert reads(served) - before < len(names) / 4


def test_an_open_sample_outlives_its_server(mount: Mounter, heavy: tuple[Store, Version]) -> None:
    served = mount(heavy[0])
    expected = read(f"{served.root}/samples/d/light0.npz")
    with open(f"{served.root}/samples/d/light0.npz", "rb", 0) as file:
        for _ in range(2):
            os.kill(served.server, signal.SIGKILL)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert os.pread(file.fileno(), len(expected), 0) == expected
    assert "unforeseen" not in served.log_text()


def test_the_package_may_go_while_it_is_mounted(
    heavy: tuple[Store, Version], tmp_path: Path
) -> None:
    package, root = tmp_path / "package", tmp_path / "mnt"
    shutil.copytree(os.path.dirname(fsmount.__file__), package / "fsmount")
    root.mkdir()
    config = config_for(heavy[0], str(root))
    environment = {**os.environ, "PYTHONPATH": str(package)}
    with mounted(config, str(tmp_path / "log"), env=environment) as served:
        wait_for(lambda: any(map(is_ready, children_of(served.server))))
        shutil.rmtree(package)
        assert read(f"{root}/samples/d/light0.json") == b'{"number": 0, "name": "n0"}\n'
        with np.load(f"{root}/samples/d/light1.npz") as arrays:
            assert arrays["label"] == 1
        starter = next(filter(is_ready, children_of(served.server)))
        os.kill(served.server, signal.SIGKILL)
        with np.load(f"{root}/samples/d/light2.npz") as arrays:
            assert arrays["label"] == 2
        assert is_ready(starter)
        assert served.log_text().count("Traceback") == 0


def is_ready(pid: int) -> bool:
    """Whether a process has imported all that it needs to start helpers: it has a name then."""
    with open(f"/proc/{pid}/comm", encoding="ascii") as file:
        return file.read() == "fsmount-samples\n"


def test_a_mount_of_all_versions_needs_no_file_of_the_package(
    heavy: tuple[Store, Version], tmp_path: Path
) -> None:
    package, root = tmp_path / "package", tmp_path / "mnt"
    shutil.copytree(os.path.dirname(fsmount.__file__), package / "fsmount")
    root.mkdir()
    config = prepare_store(heavy[0], str(root), heavy[0].path, Look(Owner.of_process()))
    environment = {**os.environ, "PYTHONPATH": str(package)}
    with mounted(config, str(tmp_path / "log"), env=environment) as served:
        wait_for(lambda: any(map(is_ready, children_of(served.server))))
        shutil.rmtree(package)
        assert "samples" not in os.listdir(f"{root}/versions/v1")
        assert len(read(f"{root}/versions/v1/samples/d/light0.npz")) > 0
