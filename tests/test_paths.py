"""Names of partitions in a mounted tree: reversible, and passed over by no common reader."""

from __future__ import annotations

from pathlib import PurePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsmount.errors import InvalidNameError
from fsmount.model import ROOT_PARTITION, check_partition_id
from fsmount.paths import decode_id, encode_id, manifest_path, partition_of, shard_path

components = st.one_of(
    st.text(st.sampled_from("_.%=\\ab/5FC"), min_size=1, max_size=6),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=4),
    st.sampled_from(["_val", ".hid", "__pycache__", "x._COPYING_", "._COPYING_", "label=3"]),
    st.sampled_from(["x.tar", "x.parquet", ".tar"]),
)


def _is_id(text: str) -> bool:
    try:
        check_partition_id(text)
    except InvalidNameError:
        return False
    return True


ids = st.lists(components, min_size=1, max_size=3).map("/".join).filter(_is_id)


def spark_skips(name: str) -> bool:
    """Spark's HadoopFSUtils.shouldFilterOutPathName."""
    hidden = name.startswith("_") and "=" not in name
    hidden |= name.startswith(".") or name.endswith("._COPYING_")
    return hidden and not name.startswith(("_common_metadata", "_metadata"))


def hugging_face_skips(path: str) -> bool:
    """Special directories and hidden names in datasets.data_files, for a glob that has neither."""
    parts = PurePath(path).parts
    special = any(part.startswith("__") for part in parts[:-1])
    return special or any(part.startswith(".") for part in parts)


def pyarrow_skips(name: str) -> bool:
    """`ignore_prefixes` of pyarrow.dataset as it is by default."""
    return name.startswith((".", "_"))


def is_hive_partition(name: str) -> bool:
    """DuckDB, pyarrow and Spark make a column of it."""
    return "=" in name


@given(ids)
def test_the_id_comes_back(partition: str) -> None:
    assert decode_id(encode_id(partition)) == partition
    assert partition_of(manifest_path(partition)) == partition
    assert partition_of(shard_path(partition, 7)) == partition


@given(ids, ids)
def test_two_ids_have_two_paths(one: str, other: str) -> None:
    assert (encode_id(one) == encode_id(other)) == (one == other)


@given(ids)
def test_no_reader_passes_over_a_file_or_reads_a_meaning_into_its_path(partition: str) -> None:
    for path in (manifest_path(partition), shard_path(partition, 0)):
        assert not hugging_face_skips(path)
        for name in path.split("/"):
            assert not spark_skips(name)
            assert not pyarrow_skips(name)
            assert not is_hive_partition(name)
            assert "\\" not in name
        for directory in path.split("/")[:-1]:
            assert not directory.endswith((".parquet", ".tar"))


@pytest.mark.parametrize(
    ("partition", "path"),
    [
        (ROOT_PARTITION, "root_"),
        ("_val", "%5Fval"),
        ("a/.hid/_x", "a/%2Ehid/%5Fx"),
        ("__a__", "%5F_a__"),
        ("%5Fval", "%255Fval"),
        ("100%", "100%25"),
        ("label=3/b", "label%3D3/b"),
        ("a\\b", "a%5Cb"),
        ("x._COPYING_/x._COPYING_y", "x%2E_COPYING_/x._COPYING_y"),
        ("a.parquet/b.tar/c.parquets", "a%2Eparquet/b%2Etar/c.parquets"),
        ("a b/ü.x_y-z", "a b/ü.x_y-z"),
    ],
)
def test_paths_are_as_specified(partition: str, path: str) -> None:
    assert encode_id(partition) == path


@pytest.mark.parametrize(
    ("longest", "too_long"),
    [
        ("x" * 247, "x" * 248),
        ("_" + "x" * 244, "_" + "x" * 245),
        ("=" * 82, "=" * 83),
        ("_" + "x" * 252 + "/a", "_" + "x" * 253 + "/a"),
        ("x" * 255 + "/a", "x" * 256 + "/a"),
    ],
)
def test_lengths_are_those_of_the_encoded_names(longest: str, too_long: str) -> None:
    assert check_partition_id(longest) == longest
    with pytest.raises(InvalidNameError):
        check_partition_id(too_long)
