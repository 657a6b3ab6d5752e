"""How to pack, and who is told how it goes along."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fsmount.errors import PackError
from fsmount.model import LatestRef, Ref, Rule, check_tag
from fsmount.pack.files import Links
from fsmount.pack.plan import Plan
from fsmount.pack.source import MAX_SAMPLE_BYTES

LATEST = LatestRef()


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How to pack. What is None is as the base has it, or else the default."""

    tag: str
    base: Ref | None = LATEST  # None: no base; latest of an empty store: no base either
    rule: Rule | None = None
    level: int | None = None  # of zstd
    shard_bytes: int | None = None  # raw bytes of a shard at most
    order_seed: int | None = None
    source_namespace: str | None = None  # None: the source's real path
    replace_all: bool = False  # the version is this source alone, whatever the base has
    sync: bool = False  # drop the base's partitions that the source no longer has
    force: bool = False  # read every file, whatever is remembered
    require_sidecars: bool = False
    links: Links = Links.FOLLOW
    max_sample_bytes: int = MAX_SAMPLE_BYTES  # of a sample's arrays; a larger one is an error
    workers: int | None = 1  # processes; None: one a core, if starting them pays
    message: str = ""

    def __post_init__(self) -> None:
        check_tag(self.tag)
        if self.max_sample_bytes < 1:
            raise PackError(f"max_sample_bytes must be at least 1, not {self.max_sample_bytes}")
        if self.workers is not None and self.workers < 1:
            raise PackError(f"workers must be at least 1, not {self.workers}")


class Observer(Protocol):
    """Told how a pack goes along."""

    def planned(self, plan: Plan, samples: int, source_bytes: int) -> None:
        """The plan is made; so many samples and bytes of source files have to be looked at."""
        ...

    def advanced(self, samples: int, source_bytes: int) -> None:
        """So many of these are done."""
        ...

    def rewriting(self, manifests: int) -> None:
        """The version's fields changed: so many manifests are still to be written anew."""
        ...


class Silent:
    """An observer that says nothing."""

    def planned(self, plan: Plan, samples: int, source_bytes: int) -> None:
        """Say nothing."""

    def advanced(self, samples: int, source_bytes: int) -> None:
        """Say nothing."""

    def rewriting(self, manifests: int) -> None:
        """Say nothing."""
