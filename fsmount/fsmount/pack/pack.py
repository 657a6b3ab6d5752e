"""Packing a source into a store: list, plan, build, publish."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from fsmount.diff import Changes
from fsmount.errors import InvalidNameError, PackError, SourceError, VersionNotFoundError
from fsmount.formats.checked import is_unicode
from fsmount.formats.kinds import unify_dumped
from fsmount.formats.table import PartitionTable
from fsmount.model import (
    DirectoryRule,
    LatestRef,
    Parent,
    Partition,
    Recipe,
    Ref,
    Rule,
    Version,
    VersionDocument,
    check_tag,
)
from fsmount.pack import workers
from fsmount.pack.changes import changes_by_partition
from fsmount.pack.conform import conform
from fsmount.pack.faults import Faults
from fsmount.pack.files import Links
from fsmount.pack.memory import Memory
from fsmount.pack.plan import Known, Plan, check_sidecars, group, make_plan
from fsmount.pack.progress import Progress
from fsmount.pack.proof import Proof
from fsmount.pack.publish import publish
from fsmount.pack.setting import Setting
from fsmount.pack.settled import file_clock
from fsmount.pack.source import MAX_SAMPLE_BYTES, Listing, NpzTree, SourceSample
from fsmount.pack.task import Built, Context, Failed, Outcome
from fsmount.store import Lease, Store
from fsmount.store.inside import store_path

_log = logging.getLogger(__name__)
_LATEST = LatestRef()


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How to pack. What is None is as the base has it, or else the default."""

    tag: str
    base: Ref | None = _LATEST  # None: no base; latest of an empty store: no base either
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


@dataclass(frozen=True, slots=True)
class PackReport:
    """What a pack did. The lists are partition ids in order; bytes are of the whole version."""

    document: VersionDocument
    published: bool  # False: the version was there already, complete
    latest: str | None  # what `latest` names now; another tag if it moved meanwhile
    changes: Mapping[str, Changes]  # of samples, against the base, by partition that differs
    built: tuple[str, ...]
    refreshed: tuple[str, ...]  # new manifest, old shards
    reused: tuple[str, ...]
    kept: tuple[str, ...]  # in the base, not in the source
    dropped: tuple[str, ...]  # in the base, not in the version
    samples_read: int
    ignored_files: int  # neither a sample nor a sidecar
    seconds: float


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


def pack(source: str, store: str, options: PackOptions, observer: Observer) -> PackReport:
    """Pack the tree at `source` into the store at `store` (made if missing) and publish it.

    Nothing is published unless every sample was read back from its shard and found equal to its
    source. Files that can't be packed don't stop the others: all are told in one error, with a note
    for each of the first 20, and what was built is reused by the next run.

    Raises SourceError (and SidecarError, SourceChangedError, PartitionError) naming the file,
    RuleMismatchError, PackWorkerError, StoreWriteError, and as `Store.publish` does.
    """
    started = time.monotonic()
    store = store_path(store)
    if (options.workers or 1) > (os.cpu_count() or 1):
        _log.warning("%d workers on %d cores", options.workers, os.cpu_count())
    tree = NpzTree(_real_path(source), options.links)
    namespace = _namespace(tree, options)
    listing = _scan(tree, os.path.realpath(store), options)
    base, latest = _base(store, options.base)
    setting = _setting(base, namespace, options)
    groups = group(listing.samples, setting.rule)
    target = Store.create(store)
    target.sweep()
    memory = Memory.of(target.path, setting.namespace, setting.rule, setting.recipe)
    known = _known(memory, groups, base if base and setting.fits(base) else None)
    with _lease(target, base, known) as lease, target.staging(lease) as staging:
        drop = options.sync or options.replace_all
        proof = Proof(target, lease)
        plan = make_plan(groups, known, proof.is_sound, force=options.force, drop_vanished=drop)
        proof.check_kept(plan.kept)
        context = Context(
            tree=tree,
            recipe=setting.recipe,
            objects=target.objects,
            memory=memory,
            clock=file_clock(tree.root, staging),
            staging=staging,
            force=options.force,
            max_sample_bytes=options.max_sample_bytes,
            fields=unify_dumped(part.fields for part in plan.known()),
        )
        built = _build(plan, context, options.workers, observer, lease)

        def tick(manifests: int) -> None:
            lease.renew()
            observer.rewriting(manifests)

        parts = conform(_merge(plan, built), target.objects, memory, staging, tick)
        content = PartitionTable(setting.rule, setting.namespace, setting.recipe, parts)
        document, published = publish(
            target,
            content,
            tag=options.tag,
            parent=_parent(base),
            message=options.message,
            replaces=latest,
            staging=staging,
        )
        before = () if base is None else base.partitions
        changes = changes_by_partition(target.objects, before, content.partitions)
    return PackReport(
        document=document,
        published=published,
        latest=target.latest(),
        changes=changes,
        built=_ids(built, Outcome.BUILT),
        refreshed=_ids(built, Outcome.REFRESHED),
        reused=tuple(sorted((*_names(plan.reused), *_ids(built, Outcome.UNCHANGED)))),
        kept=_names(plan.kept),
        dropped=_vanished(before, content.partitions),
        samples_read=sum(item.samples_read for item in built),
        ignored_files=listing.ignored,
        seconds=time.monotonic() - started,
    )


def _scan(tree: NpzTree, store: str, options: PackOptions) -> Listing:
    listing = tree.scan(skip=store)
    if not listing.samples:
        why = f", but {listing.misnamed!r}: its suffix must be .npz" if listing.misnamed else ""
        raise SourceError(f"{tree.root}: no .npz file in it{why}")
    if options.require_sidecars:
        check_sidecars(listing.samples)
    return listing


def _real_path(source: str) -> str:
    if not source:  # an unset variable, not the working directory
        raise SourceError("no source: the path is empty")
    try:
        return os.path.realpath(source)
    except FileNotFoundError:
        raise SourceError(
            f"no source {source}: the working directory is gone; give an absolute path"
        ) from None


def _namespace(tree: NpzTree, options: PackOptions) -> str:
    """What the source is called, once all that is given as text is seen to fit a document."""
    namespace = tree.root if options.source_namespace is None else options.source_namespace
    _check_text("source namespace", namespace)
    _check_text("message", options.message)
    if not namespace:
        raise InvalidNameError("the source namespace is empty")
    return namespace


def _check_text(what: str, text: str) -> None:
    """A path or an argument need not be UTF-8, but a document is."""
    if not is_unicode(text):
        raise InvalidNameError(f"the {what} is not UTF-8: {text!r}")


def _base(path: str, ref: Ref | None) -> tuple[Version | None, str | None]:
    """The base in the store at `path`, if there is one yet, and what `latest` names there."""
    if not Store.exists(path):
        if ref is not None and ref != _LATEST:
            raise VersionNotFoundError(f"no version {str(ref)!r} to build on: no store at {path}")
        return None, None
    store = Store.open(path)
    latest = store.latest()
    if ref is None or (ref == _LATEST and latest is None):
        return None, latest
    return store.version(ref), latest


def _setting(base: Version | None, namespace: str, options: PackOptions) -> Setting:
    """What the options say, and for what they leave open the base's, or else the default."""
    rule = base.document.rule if base else DirectoryRule()
    recipe = base.document.recipe if base else Recipe()
    setting = Setting(
        rule=options.rule or rule,
        namespace=namespace,
        recipe=replace(
            recipe,
            level=options.level or recipe.level,
            shard_bytes=options.shard_bytes or recipe.shard_bytes,
            order_seed=recipe.order_seed if options.order_seed is None else options.order_seed,
        ),
    )
    if base is not None and not options.replace_all:
        setting.check_fits(base)
    return setting


def _known(
    memory: Memory,
    groups: Mapping[str, tuple[SourceSample, ...]],
    base: Version | None,
) -> Known:
    remembered = {name: found for name in groups if (found := memory.partition(name)) is not None}
    return Known(
        base={} if base is None else {part.id: part for part in base.partitions},
        remembered=remembered,
        unfinished={name: Progress.of(memory, name).shards() for name in groups},
    )


def _lease(store: Store, base: Version | None, known: Known) -> Lease:
    """Hold whatever may be reused, before anything relies on it."""
    parts = (*known.base.values(), *(found.partition for found in known.remembered.values()))
    digests = {ref.digest for part in parts for ref in part.objects()}
    tables = [base.document.table.digest] if base is not None else []
    digests.update(*known.unfinished.values())
    return store.lease("pack", tables, sorted(digests))


def _build(
    plan: Plan, context: Context, count: int | None, observer: Observer, lease: Lease
) -> list[Built]:
    todo = [item for task in plan.tasks for item in task.samples]
    observer.planned(plan, len(todo), sum(item.file.size for item in todo))
    renewed = time.monotonic()

    def progress(samples: int, source_bytes: int) -> None:
        nonlocal renewed
        if time.monotonic() - renewed > lease.ttl / 4:
            lease.renew()
            renewed = time.monotonic()
        observer.advanced(samples, source_bytes)

    results = workers.run(plan.tasks, context, count, progress)
    failed = (result.faults for result in results if isinstance(result, Failed))
    sum(failed, Faults()).raise_any()
    built = [result for result in results if isinstance(result, Built)]
    if context.memory.directory is not None and not all(item.remembered for item in built):
        _log.info("what was built could not be remembered in %s", context.memory.directory)
    return built


def _merge(plan: Plan, built: list[Built]) -> tuple[Partition, ...]:
    parts = (*plan.reused, *plan.kept, *(item.partition for item in built))
    return tuple(sorted(parts, key=lambda part: part.id.encode()))


def _parent(base: Version | None) -> Parent | None:
    return None if base is None else Parent(base.document.tag, base.document.table.digest)


def _names(parts: Iterable[Partition]) -> tuple[str, ...]:
    return tuple(part.id for part in parts)


def _ids(built: list[Built], outcome: Outcome) -> tuple[str, ...]:
    return _names(item.partition for item in built if item.outcome is outcome)


def _vanished(before: Iterable[Partition], now: Iterable[Partition]) -> tuple[str, ...]:
    left = set(_names(now))
    return tuple(name for name in _names(before) if name not in left)
