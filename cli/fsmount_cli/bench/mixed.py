"""What `fsmount bench mixing` measures. Imports the loader, and so torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fsmount.errors import PlanError
from fsmount_loader.mixing import TOLERANCE, Comparison, Mixing, Population, Shape
from fsmount_loader.options import Options, whole
from fsmount_loader.order import EPOCH_BITS
from fsmount_loader.plan import Plan, make_plan
from fsmount_loader.values import columns_of
from fsmount_loader.version import VersionFiles

_SCOPES = ("rank", "global")


def measured(
    version: str, given: Mapping[str, Any], world_size: int, epoch: int, column: str | None
) -> dict[str, Any]:
    """Measure a version with the options `given` of ShardDataset; the result, ready for JSON.

    Raises PlanError naming the option that can't be, and whatever planning raises.
    """
    options = Options(**given)
    whole("world_size", world_size, 1, 31)
    whole("epoch", epoch, 0, EPOCH_BITS)
    global_batch = options.global_batch(world_size)
    plan = make_plan(VersionFiles.open(version), options, alike=False)
    population = _population(plan, column)
    counts = plan.selected.rows_per_shard
    mixing = Mixing(population, counts, global_batch, world_size, options.seed, epoch)
    settings = {
        "version": plan.files.root,
        "where": options.where,
        "samples": len(plan.rows),
        "partitions": int(np.count_nonzero(population.shares)),
        "global_batch_size": global_batch,
        "world_size": world_size,
        "seed": options.seed,
        "epoch": epoch,
        "column": column,
    }
    return {"settings": settings, **_compare(plan, mixing, options), **_suggest(plan, mixing)}


def _population(plan: Plan, column: str | None) -> Population:
    selected = plan.selected
    partition = np.repeat(selected.shard_partition, selected.rows_per_shard)
    if column is None:
        return Population.of(partition)
    values = columns_of(plan.files, [column], selected)[column]
    if not isinstance(values, np.ndarray):
        raise PlanError(f"column {column!r} is not a number in every selected sample")
    try:
        return Population.of(partition, values)
    except PlanError as error:
        raise PlanError(f"column {column!r}: {error}") from None


def _compare(plan: Plan, mixing: Mixing, options: Options) -> dict[str, Any]:
    """The measures with the options that were given, and how the default ones do."""
    shape = mixing.shape(options.streams, options.window, options.chunk_size)
    ours = mixing.compare(mixing.order(shape))
    default = mixing.shape()
    others = ours if shape == default else mixing.compare(mixing.order(default))
    worst = _worst(others)
    return {
        "options": _shape(plan, shape),
        **{scope: _measures(one) for scope, one in zip(_SCOPES, ours, strict=True)},
        "worst_ratio": _worst(ours),
        "defaults": {
            **_shape(plan, default),
            "worst_ratio": worst,
            "suffices": worst <= TOLERANCE,
        },
    }


def _suggest(plan: Plan, mixing: Mixing) -> dict[str, Any]:
    suggestions = [
        {**_shape(plan, one.shape), "worst_ratio": one.worst, "suffices": one.suffices}
        for one in mixing.suggest()
    ]
    return {"tolerance": TOLERANCE, "suggestions": suggestions}


def _shape(plan: Plan, shape: Shape) -> dict[str, int]:
    """The options, and what the page cache should have room for."""
    rows = min(shape.open_rows, len(plan.rows))
    return {
        "streams": shape.streams,
        "window": shape.window,
        "chunk_size": shape.chunk_size,
        "page_cache_bytes": round(rows * float(plan.rows.size.mean())),
    }


def _measures(found: Comparison) -> dict[str, dict[str, float]]:
    names = ["partitions", "js_distance", "variance"]
    if found.ours.column_variance is not None:
        names.append("column_variance")
    return {
        name: {
            "ours": getattr(found.ours, name),
            "independent": getattr(found.independent, name),
            "ratio": found.ratio(name),
        }
        for name in names
    }


def _worst(found: Sequence[Comparison]) -> float:
    return max(one.worst for one in found)
