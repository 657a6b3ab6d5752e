"""Read every sample of a version from a store, without fsmount.

Usage: python read_store.py STORE TAG

Prints a line a sample: the SHA-256 of its member, its key, its tensors. Needs only the standard
library, zstandard and pyarrow. docs/format.md says what is read here.
"""

import hashlib
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard


def read_object(store, digest):
    data = (store / "objects" / digest[:2] / digest).read_bytes()
    assert hashlib.sha256(data).hexdigest() == digest
    return data


def read_parquet(store, digest):
    with pq.ParquetFile(pa.BufferReader(read_object(store, digest))) as file:
        return file.read(use_threads=False)  # no thread is left to run when the program ends


def read_tensors(member):
    """The tensors of a member as (name, dtype, shape, bytes)."""
    start = 8 + int.from_bytes(member[:8], "little")
    header = json.loads(member[8:start])
    notes = header.pop("__metadata__", {})
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        note = json.loads(notes.get(f"numpy.{name}", "{}"))
        dtype = note.get("descr", entry["dtype"])
        yield name, dtype, entry["shape"], member[start + begin : start + end]


def main(store, tag):
    document = json.loads((store / "versions" / f"{tag}.json").read_text())
    assert document["format"] == 1
    for partition in read_parquet(store, document["table"]["digest"]).to_pylist():
        shards = [read_object(store, shard["digest"]) for shard in partition["shards"]]
        for row in read_parquet(store, partition["manifest"]).to_pylist():
            at = row["__offset__"]
            payload = shards[row["__shard__"]][at : at + row["__size__"]]
            member = zstandard.ZstdDecompressor().decompress(payload)
            assert hashlib.sha256(member).digest() == row["__sha256__"]
            shown = [f"{name}:{dtype}{shape}" for name, dtype, shape, _ in read_tensors(member)]
            print(row["__sha256__"].hex(), json.dumps(row["__key__"]), *shown)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python read_store.py STORE TAG")
    main(Path(sys.argv[1]), sys.argv[2])
