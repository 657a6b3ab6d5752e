"""Loaders that Accelerate wraps around a dataset of ours, which would divide its batches again."""

from __future__ import annotations

import sys

from fsmount.errors import PlanError


def refuse_prepared(data: object) -> None:
    """Raise PlanError if it is one of Accelerate's loaders that is about to iterate over `data`.

    Nothing tells a dataset who iterates over it. But such a loader enters itself in Accelerate's
    state first, and then calls the dataset's `set_epoch`, on all ranks, or its `__iter__`.
    """
    state = sys.modules.get("accelerate.state")
    if state is None:
        return
    loader = state.GradientState().active_dataloader
    inner = getattr(loader, "dataset", None)
    if inner is data or (inner is not None and getattr(inner, "dataset", None) is data):
        loader.end()  # so that the next one to iterate is not taken for it
        raise PlanError(
            "Accelerate would divide or skip this rank's batches a second time: iterate over a "
            "ShardLoader, which it leaves as it is; with transformers' Trainer, return one from "
            "get_train_dataloader (docs/frameworks.md)"
        )
