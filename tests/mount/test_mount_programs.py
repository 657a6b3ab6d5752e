"""Programs that look at more than one mount, or at what lies in the files."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mounting import Mounter, request_for
from safetensors import safe_open
from serving import both_drivers

from fsmount.model import Version
from fsmount.mount import lifecycle
from fsmount.mount.ending import umount
from fsmount.mount.request import FUSEPY, KERNEL, MountRequest
from fsmount.store import Store
from fsmount.testing import tiny

pytestmark = [pytest.mark.mounted, pytest.mark.usefixtures("version")]


def run(*command: str, cwd: str | None = None) -> str:
    """The output of a command that must succeed and complain of nothing."""
    done = subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), (command, done.stdout)
    return done.stdout


@pytest.fixture
def mount_all(tmp_path: Path) -> Iterator[Callable[..., list[str]]]:
    """Mounts requests beside each other."""
    roots: list[str] = []

    def mount(*requests: MountRequest) -> list[str]:
        for number, request in enumerate(requests):
            root = tmp_path / f"mnt{number}"
            root.mkdir()
            lifecycle.mount(replace(request, mountpoint=str(root)))
            roots.append(str(root))
        return roots

    yield mount
    for root in roots:
        umount(root)


@pytest.mark.parametrize("other", [KERNEL, FUSEPY])
def test_two_mounts_of_one_version_do_not_differ(
    store: Store, mount_all: Callable[..., list[str]], other: str
) -> None:
    requests = [request_for(store, driver=one, list_samples=True) for one in (KERNEL, other)]
    one, two = mount_all(*requests)
    assert run("diff", "-r", "--no-dereference", one, two) == ""
    told = "%P %y %i %s %b %n %m %u %g %T@\n"
    listings = [run("find", ".", "-printf", told, cwd=root).splitlines() for root in (one, two)]
    assert listings[0] == listings[1]  # in one order, too
    assert any(line.startswith("samples/drive/a b/3.npz f ") for line in listings[0])


def expect_sample(path: str, number: int) -> None:
    """That safetensors' own reader, which maps the file, finds the arrays of a sample."""
    expected = tiny.numbered("", number).arrays
    for framework in ("np", "pt"):
        with safe_open(path, framework=framework) as file:
            assert sorted(file.keys()) == sorted(expected)
            for name, array in expected.items():
                assert np.array_equal(np.asarray(file.get_tensor(name)), array)
            part = file.get_slice("values")[10:20]
            assert np.array_equal(np.asarray(part), expected["values"][10:20])


@both_drivers
def test_safetensors_reads_what_tar_and_zstd_extract(
    store: Store, mounter: Mounter, tmp_path: Path, driver: str
) -> None:
    root = mounter(request_for(store, driver=driver))
    found = []
    shards = f"{root}/shards/drive/a b"
    for shard in sorted(os.listdir(shards)):
        run("tar", "xf", f"{shards}/{shard}", "-C", str(tmp_path))
    for path in sorted(Path(tmp_path, "drive", "a b").iterdir()):
        run("zstd", "--decompress", "--quiet", "--rm", str(path))
        member = str(path).removesuffix(".zst")
        number = int(os.path.basename(member).removesuffix(".safetensors"))
        expect_sample(member, number)
        shown = f"{root}/samples/drive/a b/{number}.safetensors"
        expect_sample(shown, number)
        assert Path(shown).read_bytes() == Path(member).read_bytes()
        found.append(number)
    assert sorted(found) == list(range(7))


def test_getfattr_tells_where_files_come_from(
    store: Store, version: Version, mounter: Mounter
) -> None:
    root = mounter(request_for(store, xattrs=True, driver=KERNEL))
    [part] = [part for part in version.partitions if part.id == "root_"]
    path = "shards/root_/000000.tar"
    told = run("getfattr", "--dump", path, cwd=root)
    assert dict(re.findall(r'user\.fsmount\.(\w+)="(.*)"', told)) == {
        "digest": f"sha256:{part.shards[0].digest}",
        "partition": "root_",
        "table": f"sha256:{version.document.table.digest}",
        "version": "v1",
    }
    only = run("getfattr", "--only-values", "--name", "user.fsmount.digest", path, cwd=root)
    assert only == f"sha256:{part.shards[0].digest}"
    everything = run("getfattr", "--recursive", "--dump", ".", cwd=root)
    files = [name for _, directories, names in os.walk(root) for name in (*directories, *names)]
    assert everything.count("# file: ") == len(files) + 1
