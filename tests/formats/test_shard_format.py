"""The shard: names that tar and WebDataset read as they are meant, bytes that never vary."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path
from urllib.parse import unquote

import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import keys

from fsmount.errors import FormatError, InvalidNameError
from fsmount.formats import shard
from fsmount.model import check_key

KEYS = [
    *("a/b", "-rf", "a b/c d", "a.b/c.d.e", "100%", "%41", "日本/é", "new\nline/x", "\x7f", "..."),
    *("x" * 239, "日" * 79, "d" * 200 + "/" + "e" * 200, "__a__/b", "__a__", "a/__b__/c", "__/c"),
    *("%5F_a__/b", "a\\b", "a/ ", "UPPER/Case", ".hidden", "a/.npz"),
]
LONG = [
    *("x" * 240, "x" * 239 + "y", "." * 80, "a" * 61 + "." * 60, "日" * 80, "a" + "日" * 84),
    *("d" * 255 + "/x", "\n" * 255 + "/x", "__" + "m" * 251 + "__/x", "." * 255 + "/" + "." * 255),
    *("x" * 204 + "%" * 20, "x" * 203 + "%" * 20, "x" * 202 + "%" * 20, "x" * 204 + "é" * 20),
    *("y.safetensors.zst" * 15 + "/x", "%~" * 100),
]


def tar_of(names: list[str]) -> bytes:
    """A shard whose members are their keys' UTF-8."""
    members = [(shard.member_name(key), key.encode()) for key in names]
    parts = [
        part
        for name, data in members
        for part in (shard.member_header(name, len(data)), data, shard.padding(len(data)))
    ]
    return b"".join([*parts, shard.END])


@given(keys())
def test_a_member_names_one_key(key: str) -> None:
    name = shard.member_name(key)
    if "%~" in name:
        with pytest.raises(FormatError):
            shard.key_of(name)
    else:
        assert shard.key_of(name) == key
    assert name.count("/") == key.count("/")
    base = name.rpartition("/")[2]
    assert base.index(".") == len(base) - len(".safetensors.zst")
    assert not any(ord(char) < 32 or char == "\x7f" for char in name)


@given(st.one_of(keys(), st.text(max_size=20)), st.sampled_from(["", ".safetensors.zst", ".tar"]))
def test_any_other_name_is_a_format_error(stem: str, suffix: str) -> None:
    name = stem + suffix
    try:
        key = shard.key_of(name)
    except FormatError:
        return
    assert check_key(key) == key
    assert shard.member_name(key) == name


@pytest.mark.parametrize(
    "name",
    [
        "%FF",
        "%ff",
        "%2e%2e/x",
        "../x",
        "/x",
        "a//b",
        "./x",
        "",
        "%00",
        "a%2Fb",
        "%41",
        "a.b",
        "\ud800",
    ],
)
def test_hostile_names_are_refused(name: str) -> None:
    with pytest.raises(FormatError):
        shard.key_of(name + ".safetensors.zst")


@given(st.lists(keys(), max_size=8, unique=True))
@settings(max_examples=50)
def test_tarfile_and_webdataset_read_what_was_written(names: list[str]) -> None:
    data = tar_of(names)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        found = [(m.name, tar.extractfile(m).read()) for m in tar]  # type: ignore[union-attr]
        assert all((m.mtime, m.mode, m.uid, m.gid, m.uname) == (0, 0o444, 0, 0, "") for m in tar)
    assert [name for name, _ in found] == list(map(shard.member_name, names))
    assert [content for _, content in found] == [key.encode() for key in names]
    check_webdataset(names, data)


def check_webdataset(names: list[str], data: bytes) -> None:
    """WebDataset makes one sample of each member, with the key it can be told from."""
    streams = [{"url": "shard", "stream": io.BytesIO(data)}]
    groups = webdataset.tariterators.group_by_keys(
        webdataset.tariterators.tar_file_expander(iter(streams))
    )
    seen = {group["__key__"]: group["safetensors.zst"] for group in groups}
    members = {key: shard.member_name(key).removesuffix(".safetensors.zst") for key in names}
    assert seen == {member: key.encode() for key, member in members.items()}
    assert all(unquote(member) == key for key, member in members.items() if "%~" not in member)


def test_odd_keys_in_plain_tar_and_webdataset(tmp_path: Path) -> None:
    data = tar_of(KEYS)
    check_webdataset(KEYS, data)
    (tmp_path / "shard.tar").write_bytes(data)
    command = ["tar", "--list", "--quoting-style=literal", "-f", str(tmp_path / "shard.tar")]
    listed = subprocess.run(command, capture_output=True, check=True)
    assert listed.stderr == b""
    assert listed.stdout.decode().splitlines() == [shard.member_name(key) for key in KEYS]
    for key in KEYS:
        extract = [
            "tar",
            "--no-unquote",
            "-xOf",
            str(tmp_path / "shard.tar"),
            "--",
            shard.member_name(key),
        ]
        assert subprocess.run(extract, capture_output=True, check=True).stdout == key.encode()


def test_keys_too_long_for_a_file_in_plain_tar_and_webdataset(tmp_path: Path) -> None:
    names = [shard.member_name(key) for key in LONG]
    assert len(set(names)) == len(LONG)
    data = tar_of(LONG)
    (tmp_path / "shard.tar").write_bytes(data)
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xf", str(tmp_path / "shard.tar"), "-C", tmp_path / "out"], check=True)
    for name, key in zip(names, LONG, strict=True):
        assert (tmp_path / "out" / name).read_bytes() == key.encode()
    check_webdataset(LONG, data)


def test_a_component_is_cut_as_specified() -> None:
    end = hashlib.sha256(b"x" * 240).hexdigest()[:32]
    assert shard.member_name("x" * 239) == "x" * 239 + ".safetensors.zst"
    assert shard.member_name("x" * 240) == "x" * 205 + f"%~{end}.safetensors.zst"
    torn = "x" * 203 + "." * 20
    end = hashlib.sha256(torn.encode()).hexdigest()[:32]
    assert shard.member_name(torn) == "x" * 203 + f"%~{end}.safetensors.zst"
    above = "a" * 219 + "日" * 11 + "%"
    assert shard.member_name(f"{above}/b") == f"{above}/b.safetensors.zst".replace("%", "%25")
    above += "%"
    end = hashlib.sha256(above.encode()).hexdigest()[:32]
    assert shard.member_name(f"{above}/b") == "a" * 219 + f"%~{end}/b.safetensors.zst"


def test_bytes_are_as_specified() -> None:
    assert len(shard.member_header("a.safetensors.zst", 1)) == 512
    assert (
        hashlib.sha256(tar_of(KEYS)).hexdigest()
        == "35a81018d257942e58a7ed51aab15e4860f55bb7f0aa4100f0e906edff99e384"
    )
    big = shard.member_header("a.safetensors.zst", 8 << 30)
    assert b"17 size=8589934592\n" in big or b"19 size=8589934592\n" in big


def test_padding_fills_blocks() -> None:
    assert [len(shard.padding(size)) for size in (0, 1, 511, 512, 513)] == [0, 511, 1, 0, 511]


@given(st.lists(keys(), max_size=20, unique=True), st.randoms())
def test_member_order_depends_on_keys_and_seed_alone(names: list[str], random: object) -> None:
    ordered = shard.member_order(names, 0)
    assert sorted(ordered) == sorted(names)
    random.shuffle(names)  # type: ignore[attr-defined]
    assert shard.member_order(names, 0) == ordered


def test_member_order_is_as_specified() -> None:
    names = [f"a/{i}" for i in range(8)]
    assert [names.index(key) for key in shard.member_order(names, 0)] == [3, 7, 6, 4, 1, 0, 2, 5]
    last = shard.member_order(names, (1 << 64) - 1)
    assert [names.index(key) for key in last] == [2, 6, 7, 5, 0, 1, 3, 4]


def test_check_key_refuses_what_no_key_may_be() -> None:
    for text in ("", "/", "a/", "/a", "a//b", ".", "..", "a/../b", "a\0b", "\ud800", "é" * 128):
        with pytest.raises(InvalidNameError):
            check_key(text)
