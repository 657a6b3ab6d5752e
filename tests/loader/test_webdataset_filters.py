"""The webdataset library's filters over our stream, and what docs/webdataset.md tells of them."""

from __future__ import annotations

import gc
import inspect
import pickle
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import webdataset as wds
from pages import run_examples
from test_dataset import ALL
from test_webdataset import MEMBER, is_valid, number, ranks
from torch.utils.data import DataLoader

from fsmount.errors import PlanError
from fsmount_loader.webdataset import ShardSamples, decoder, spread, tensor_decoder

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

PAGE = (Path(__file__).parents[2] / "docs" / "webdataset.md").read_text()


def double(array: Any) -> Any:
    return 2 * array


def read_member(stream: Any) -> Any:
    return decoder("." + MEMBER, stream.read())


def arrays_of(one: Any) -> Any:
    return one[MEMBER]


def key_and_arrays(one: Any) -> Any:
    return {"key": one["__key__"], **one[MEMBER]}


def first_values(batch: Any) -> list[int]:
    assert batch["x"].shape[1:] == (3,)
    assert batch["x"].shape[0] == batch["label"].shape[0]
    return [int(value) for value in batch["x"][:, 0]]


Chain = Callable[[ShardSamples], Any]

# Each ends in samples that `read` makes numbers of.
CHAINS: dict[str, tuple[Chain, Callable[[Any], Iterable[int]]]] = {
    "decode": (lambda s: s.decode(), lambda one: [number(one[MEMBER])]),
    "decode to tensors": (
        lambda s: s.decode(tensor_decoder, only=MEMBER),
        lambda one: [number(one[MEMBER])],
    ),
    "shuffle": (
        lambda s: s.shuffle(5, initial=5, seed=1).decode(),
        lambda one: [number(one[MEMBER])],
    ),
    "map and to_tuple": (
        lambda s: s.decode().map(spread).to_tuple("x", "json"),
        lambda one: [int(one[0][0])] if one[1]["n"] == one[0][0] else [],
    ),
    "map_dict": (
        lambda s: s.decode().map(spread).map_dict(x=double),
        lambda one: [number(one) // 2],
    ),
    "map_tuple": (
        lambda s: s.decode().map(spread).to_tuple("x").map_tuple(double),
        lambda one: [int(one[0][0]) // 2],
    ),
    "batched": (lambda s: s.decode().map(key_and_arrays).batched(4), first_values),
    "unbatched": (
        lambda s: s.decode().map(spread).to_tuple("x", "label").batched(4).unbatched(),
        lambda one: [int(one[0][0])],
    ),
    "listed": (
        lambda s: s.decode().listed(4),
        lambda some: [number(one[MEMBER]) for one in some],
    ),
    "unlisted": (
        lambda s: s.decode().listed(4).unlisted(),
        lambda one: [number(one[MEMBER])],
    ),
    "rename": (lambda s: s.decode().rename(arrays=MEMBER), lambda one: [number(one["arrays"])]),
    "rename_keys": (
        lambda s: s.decode().rename_keys(data="*.zst", beside="json"),
        lambda one: [number(one["data"])],
    ),
    "extract_keys": (lambda s: s.decode().extract_keys("*.zst"), lambda one: [number(one[0])]),
    "xdecode": (
        lambda s: s.xdecode(("json", False), (MEMBER, read_member)),
        lambda one: [number(one[MEMBER])],
    ),
    "select": (lambda s: s.select(is_valid).decode(), lambda one: [number(one[MEMBER])]),
    "slice": (lambda s: s.slice(100).decode(), lambda one: [number(one[MEMBER])]),
    "rsample": (lambda s: s.rsample(1.0).decode(), lambda one: [number(one[MEMBER])]),
    "mcached": (lambda s: s.decode().mcached(), lambda one: [number(one[MEMBER])]),
    "associate": (
        lambda s: s.compose(wds.associate({})).decode(),
        lambda one: [number(one[MEMBER])],
    ),
    "functions": (
        lambda s: wds.DataPipeline(s, wds.detshuffle(5), wds.decode(decoder), wds.map(arrays_of)),
        lambda arrays: [number(arrays)],
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_each_sample_once_through_each_filter(small: Path, name: str) -> None:
    make, read = CHAINS[name]
    for workers in ((0, 0), (1, 2)):  # of each rank
        seen: list[int] = []
        for samples, count in zip(ranks(small, batch_size=1), workers, strict=True):
            loader = DataLoader(make(samples), batch_size=None, num_workers=count)
            seen += chain.from_iterable(map(read, loader))
        assert sorted(seen) == ALL


def test_with_epoch_makes_counts_equal_again(small: Path) -> None:
    def some(one: Any) -> bool:
        return number(one[MEMBER]) % 5 == 0

    filtered = [source.decode().select(some) for source in ranks(small)]
    counts = [len(list(stream)) for stream in filtered]
    assert counts[0] != counts[1]
    assert [len(list(stream.with_epoch(6))) for stream in filtered] == [6, 6]


@pytest.mark.parametrize(
    "stage",
    [
        wds.split_by_node,
        wds.split_by_worker,
        wds.single_node_only,
        partial(wds.split_by_node, group=None),
    ],
)
def test_splitting_a_second_time_is_refused(small: Path, stage: Any) -> None:
    source = ShardSamples(small, batch_size=1)
    for pipeline in (source, source.shuffle(3).decode()):
        with pytest.raises(PlanError, match="gives each rank and each worker its own"):
            pipeline.compose(stage)


def test_spread_names_what_it_can_t_do() -> None:
    with pytest.raises(PlanError, match="'a/1' has no decoded safetensors"):
        spread({"__key__": "a/1", MEMBER: b""})
    with pytest.raises(PlanError, match="'a/1': two entries are 'json'"):
        spread({"__key__": "a/1", "json": {}, MEMBER: {"json": np.zeros(1)}})


def test_a_web_loader_shuffles_over_workers(small: Path) -> None:
    source = ShardSamples(small, batch_size=3)
    stream = source.decode(tensor_decoder).map(spread).to_tuple("x").batched(3)
    loader = wds.WebLoader(stream, batch_size=None, num_workers=2)
    batches = list(loader.unbatched().shuffle(18, seed=1).batched(9))
    assert [len(x) for (x,) in batches] == [9, 9]
    assert sorted(int(n) for (x,) in batches for n in x[:, 0]) == ALL


def test_a_pipeline_can_be_pickled(small: Path) -> None:
    stream = ShardSamples(small, batch_size=3).shuffle(2, seed=1).decode().map(spread)
    copied = pickle.loads(pickle.dumps(stream))  # noqa: S301 - our own
    assert list(map(number, copied)) == list(map(number, stream))


def test_accelerate_s_loaders_are_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = ShardSamples(small, batch_size=3).decode()
    loader = SimpleNamespace(dataset=SimpleNamespace(dataset=stream), end=lambda: None)
    state = SimpleNamespace(GradientState=lambda: SimpleNamespace(active_dataloader=loader))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    with pytest.raises(PlanError, match="Accelerate"):
        list(stream)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the library leaves files open
def test_the_page_s_examples_run(tmp_path: Path) -> None:
    names = run_examples(PAGE, tmp_path)
    assert (names["epoch"], names["seen"], names["state"]["position"]) == (2, 2, 8)
    assert names["x"].shape == (4, 3)
    assert len(names["arrays"]) == 8
    names.clear()
    gc.collect()


def test_the_page_tells_all_filters_and_entries(small: Path) -> None:
    told = set(re.findall(r"`(\w+)`", re.search(r"as methods: (.*?)\. ", PAGE)[1]))  # type: ignore[index]
    assert told == {name for name, _ in inspect.getmembers(wds.FluidInterface, inspect.isfunction)}
    entries = re.findall(r"^\| `([\w.]+)` \|", PAGE, re.MULTILINE)
    assert entries[:6] == list(next(iter(ShardSamples(small, batch_size=1, columns=["n"]))))
