"""The wire format, against the kernel's own header and against itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsmount.errors import MountError
from fsmount.mount.kernel import protocol
from fsmount.mount.kernel.negotiate import missed, negotiate
from fsmount.mount.kernel.protocol import Init, InitFlag, Notify, Opcode, OpenFlag
from fsmount.vfs.filesystem import FOREVER, Attr, Entry, Kind, Usage

HEADER = "/usr/include/linux/fuse.h"
SIZES = {
    "struct fuse_in_header": protocol.IN_HEADER.size,
    "struct fuse_out_header": protocol.OUT_HEADER.size,
    "struct fuse_init_out": protocol.INIT_OUT.size,
    "struct fuse_attr": protocol.ATTR.size,
    "struct fuse_entry_out": protocol.ENTRY_OUT.size + protocol.ATTR.size,
    "struct fuse_attr_out": protocol.ATTR_OUT.size + protocol.ATTR.size,
    "struct fuse_open_in": protocol.OPEN_IN.size,
    "struct fuse_open_out": protocol.OPEN_OUT.size,
    "struct fuse_read_in": protocol.READ_IN.size,
    "struct fuse_release_in": protocol.RELEASE_IN.size,
    "struct fuse_statfs_out": protocol.STATFS_OUT.size,
    "struct fuse_access_in": protocol.ACCESS_IN.size,
    "struct fuse_getxattr_in": protocol.GETXATTR_IN.size,
    "struct fuse_getxattr_out": protocol.GETXATTR_OUT.size,
    "struct fuse_interrupt_in": protocol.INTERRUPT_IN.size,
    "struct fuse_notify_inval_inode_out": protocol.INVAL_INODE_OUT.size,
    "struct fuse_dirent": protocol.DIRENT.size,
    "struct fuse_direntplus": len(protocol.UNTOLD) + protocol.DIRENT.size,
    "struct fuse_init_in": protocol.INIT_IN.size,
    "struct fuse_backing_map": protocol.BACKING_MAP.size,
}
SINCE = {"struct fuse_init_in": 36, "struct fuse_backing_map": 40}  # minor versions
NUMBERS = {
    **{f"FUSE_{opcode.name}": opcode.value for opcode in Opcode},
    **{f"FUSE_{flag.name}": flag.value for flag in InitFlag},
    **{f"FOPEN_{flag.name}": flag.value for flag in OpenFlag},
    **{f"FUSE_NOTIFY_{code.name}": code.value for code in Notify},
    "FUSE_DEV_IOC_BACKING_OPEN": protocol.BACKING_OPEN,
    "FUSE_DEV_IOC_BACKING_CLOSE": protocol.BACKING_CLOSE,
    "FUSE_UNIQUE_RESEND": protocol.RESENT,
}


def header_minor() -> int:
    text = Path(HEADER).read_text(encoding="utf-8")
    found = re.search(r"#define FUSE_KERNEL_MINOR_VERSION (\d+)", text)
    assert found is not None
    return int(found[1])


@pytest.mark.skipif(
    not (os.path.exists(HEADER) and shutil.which("cc")), reason="no compiler or kernel header"
)
def test_sizes_and_numbers_are_those_of_the_kernels_header(tmp_path: Path) -> None:
    """A header older than a number does not know it: only what it defines is compared."""
    text = Path(HEADER).read_text(encoding="utf-8")
    minor = header_minor()
    sizes = {name: size for name, size in SIZES.items() if SINCE.get(name, 0) <= minor}
    numbers = {name: value for name, value in NUMBERS.items() if re.search(rf"\b{name}\b", text)}
    checks = [
        f'_Static_assert(sizeof({name}) == {size}, "{name}");' for name, size in sizes.items()
    ]
    checks += [
        f'_Static_assert((unsigned long long)({name}) == {value}ULL, "{name}");'
        for name, value in numbers.items()
    ]
    source = tmp_path / "check.c"
    source.write_text("\n".join([f"#include <{HEADER[13:]}>", "#include <sys/ioctl.h>", *checks]))
    done = subprocess.run(
        ["cc", "-fsyntax-only", str(source)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(numbers) > 30


NEW = InitFlag.PASSTHROUGH | InitFlag.HAS_RESEND  # what the oldest distributions' headers lack


def test_numbers_that_old_headers_lack() -> None:
    assert NEW == 1 << 37 | 1 << 39
    assert OpenFlag.PASSTHROUGH == 1 << 7
    assert Notify.RESEND == 7
    assert protocol.BACKING_OPEN == 0x4010E501
    assert protocol.BACKING_CLOSE == 0x4004E502
    assert protocol.BACKING_MAP.size == 16


def offer(flags: int, minor: int = 44) -> Init:
    body = protocol.INIT_IN.pack(7, minor, 1 << 17, flags & 0xFFFFFFFF, flags >> 32)
    return protocol.parse_init(memoryview(body))


def test_all_that_is_offered_is_taken_one_by_one() -> None:
    everything = sum(InitFlag)
    _, whole = negotiate(offer(everything), passthrough=True)
    assert whole.passthrough
    assert whole.resend
    assert missed(whole, passthrough=True) == []
    assert whole.no_opendir
    for flag in InitFlag:
        if flag not in whole.flags or flag is InitFlag.INIT_EXT:
            continue
        _, less = negotiate(offer(everything & ~flag), passthrough=True)
        assert less.flags == whole.flags & ~flag
    _, plain = negotiate(offer(everything), passthrough=False)
    assert plain.flags == whole.flags & ~InitFlag.PASSTHROUGH


def test_a_kernel_without_extended_flags() -> None:
    old = protocol.parse_init(memoryview(protocol.INIT_IN.pack(7, 31, 1 << 17, 1, 1 << 5)[:16]))
    answer, features = negotiate(old, passthrough=True)
    assert (answer.minor, features.minor, features.request) == (40, 31, 128 << 10)
    assert features.flags == InitFlag.ASYNC_READ
    assert not features.no_opendir
    assert len(missed(features, passthrough=True)) == 6
    assert len(missed(features, passthrough=False)) == 5
    for major, minor in ((7, 22), (8, 0), (6, 99)):
        with pytest.raises(MountError, match=f"speaks FUSE {major}.{minor}"):
            negotiate(Init(major, minor, 0, InitFlag(0)), passthrough=True)


def test_answer_to_init() -> None:
    answer, _ = negotiate(offer(sum(InitFlag)), passthrough=True)
    packed = protocol.pack_init(answer)
    assert len(packed) == 64
    found = protocol.INIT_OUT.unpack(packed)
    assert found[:3] == (7, 40, 1 << 20)
    assert found[3] | found[10] << 32 == answer.flags
    assert found[8] == 256  # pages
    assert found[11] == 1  # stack depth


@given(
    st.builds(
        Attr,
        node=st.integers(1, (1 << 64) - 1),
        kind=st.sampled_from(Kind),
        mode=st.integers(0, 0o177777),
        nlink=st.integers(1, 1 << 31),
        uid=st.integers(0, (1 << 32) - 2),
        gid=st.integers(0, (1 << 32) - 2),
        size=st.integers(0, (1 << 63) - 1),
        time_ns=st.integers(0, 1 << 62),
    ),
    st.one_of(st.just(FOREVER), st.floats(0, 1e6)),
)
def test_attributes_and_validity(attr: Attr, ttl: float) -> None:
    entry = Entry(attr, ttl)
    packed = protocol.pack_entry(entry)
    node, generation, for_name, for_attr, *fractions = protocol.ENTRY_OUT.unpack_from(packed)
    assert (node, generation, for_name) == (attr.node, 0, for_attr)
    assert all(0 <= fraction < 10**9 for fraction in fractions)
    if ttl == FOREVER:
        assert for_name > 365 * 86400
    else:
        assert abs(for_name + fractions[0] / 1e9 - ttl) < 1e-6 * max(1, ttl)
    found = protocol.ATTR.unpack_from(packed, protocol.ENTRY_OUT.size)
    assert found[:3] == (attr.node, attr.size, attr.blocks)
    assert found[3] * 10**9 + found[6] == attr.time_ns
    assert found[9:13] == (attr.mode, attr.nlink, attr.uid, attr.gid)
    assert protocol.pack_attr_answer(entry)[protocol.ATTR_OUT.size :] == packed[-88:]


def test_small_answers() -> None:
    assert protocol.OUT_HEADER.unpack(protocol.pack_header(7, 5)) == (21, 0, 7)
    assert protocol.OUT_HEADER.unpack(protocol.pack_header(7, 0, 2)) == (16, -2, 7)
    assert protocol.OUT_HEADER.unpack(protocol.pack_notify(Notify.RESEND)) == (16, 7, 0)
    dropped = protocol.pack_inval_inode(1 << 40)
    assert protocol.OUT_HEADER.unpack_from(dropped) == (len(dropped), 2, 0)
    assert dropped[16:] == (1 << 40).to_bytes(8, sys.byteorder) + bytes(16)  # from 0 to the end
    assert protocol.STATFS_OUT.unpack(protocol.pack_statfs(Usage(9, 4)))[:5] == (9, 0, 0, 4, 0)
    absent = protocol.pack_absent(FOREVER)
    assert len(absent) == 128
    assert absent[:8] == bytes(8)


@given(st.binary(min_size=1, max_size=255), st.integers(1, (1 << 63) - 1))
def test_dirents_are_aligned(name: bytes, offset: int) -> None:
    packed = protocol.pack_dirent(5, Kind.FILE, name, offset)
    assert len(packed) % 8 == 0
    assert protocol.DIRENT.unpack_from(packed) == (5, offset, len(name), 8)
    assert packed[24 : 24 + len(name)] == name
