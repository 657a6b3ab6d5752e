"""Metrics over samples that count: padding and skipped samples left out, ranks added up."""

from __future__ import annotations

import torch
import torch.distributed as dist


class MaskedMean:
    """The mean of a value per sample over all batches and ranks.

    `update` is called for each batch, `compute` once at the end, on every rank of `group`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._sums: torch.Tensor | None = None  # of the values, and their number; float64

    def update(self, values: torch.Tensor, valid: torch.Tensor) -> None:
        """Add `values` [batch, …] of the samples that are `valid` [batch].

        Dimensions after the first are averaged. NaN in a sample that is not valid does no harm.
        """
        if len(values) != len(valid):
            raise ValueError(f"{len(values)} values for {len(valid)} samples")
        chosen = values.detach().double().flatten(1).mean(1) if values.ndim > 1 else values.detach()
        counted = torch.where(valid, chosen.double(), 0.0)
        sums = torch.stack([counted.sum(), valid.sum().double()])
        self._sums = sums if self._sums is None else self._sums + sums

    def compute(self) -> float:
        """The mean over all ranks; NaN if no sample counted. A collective where there are ranks."""
        if not (dist.is_available() and dist.is_initialized()):
            return self.local()
        sums = self._added("cuda" if dist.get_backend(self._group) == "nccl" else "cpu")
        dist.all_reduce(sums, group=self._group)
        return _mean(sums)

    def local(self) -> float:
        """The mean over this rank's batches alone; NaN if no sample counted."""
        return _mean(self._added())

    def _added(self, device: str = "cpu") -> torch.Tensor:
        if self._sums is None:
            return torch.zeros(2, dtype=torch.float64, device=device)
        return self._sums.clone()


def _mean(sums: torch.Tensor) -> float:
    total, count = sums.tolist()
    return float(total / count) if count else float("nan")
