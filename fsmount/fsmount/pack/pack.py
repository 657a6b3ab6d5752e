"""Packing a source into a store: list, plan, build, publish."""

from __future__ import annotations

import logging
import os
import time

from fsmount.formats.kinds import unify_dumped
from fsmount.formats.table import PartitionTable
from fsmount.model import Parent, Partition, Version
from fsmount.pack import workers
from fsmount.pack.changes import changes_by_partition
from fsmount.pack.conform import conform
from fsmount.pack.faults import Faults
from fsmount.pack.inputs import Inputs, read_inputs
from fsmount.pack.memory import Memory
from fsmount.pack.options import Observer, PackOptions
from fsmount.pack.plan import Known, Plan, make_plan
from fsmount.pack.progress import Progress
from fsmount.pack.proof import Proof
from fsmount.pack.publish import publish
from fsmount.pack.renewal import Renewal
from fsmount.pack.report import PackReport, ids_by_outcome
from fsmount.pack.settled import file_clock
from fsmount.pack.task import Built, Context, Failed
from fsmount.store import Lease, Store
from fsmount.store.inside import StorePath, store_path

_log = logging.getLogger(__name__)


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
    given = read_inputs(source, store, options)
    target = Store.create(store)
    target.sweep()
    setting = given.setting
    memory = Memory.of(target.path, setting.namespace, setting.rule, setting.recipe)
    known = _known(memory, given)
    with _lease(target, given.base, known) as lease, target.staging(lease) as staging:
        renew = Renewal(lease)
        plan = _plan(given, known, Proof(target, renew), options)
        context = _context(given, plan, options, target=target, memory=memory, staging=staging)
        built = _build(plan, context, options.workers, observer, renew)

        def tick(manifests: int) -> None:
            renew()
            observer.rewriting(manifests)

        parts = conform(_merge(plan, built), target.objects, memory, staging, tick)
        content = PartitionTable(setting.rule, setting.namespace, setting.recipe, parts)
        document, published = publish(
            target,
            content,
            tag=options.tag,
            parent=_parent(given.base),
            message=options.message,
            replaces=given.latest,
            staging=staging,
        )
        changes = changes_by_partition(target.objects, given.before, parts)
    return PackReport(
        document=document,
        published=published,
        latest=target.latest(),
        changes=changes,
        **ids_by_outcome(plan, built, given.before),
        samples_read=sum(item.samples_read for item in built),
        ignored_files=given.listing.ignored,
        seconds=time.monotonic() - started,
    )


def _known(memory: Memory, given: Inputs) -> Known:
    found = {name: memory.partition(name) for name in given.groups}
    return Known(
        base={part.id: part for part in given.comparable},
        remembered={name: one for name, one in found.items() if one is not None},
        unfinished={name: Progress.of(memory, name).shards() for name in given.groups},
    )


def _lease(store: Store, base: Version | None, known: Known) -> Lease:
    """Hold whatever may be reused, before anything relies on it."""
    parts = (*known.base.values(), *(found.partition for found in known.remembered.values()))
    digests = {ref.digest for part in parts for ref in part.objects()}
    tables = [base.document.table.digest] if base is not None else []
    digests.update(*known.unfinished.values())
    return store.lease("pack", tables, sorted(digests))


def _plan(given: Inputs, known: Known, proof: Proof, options: PackOptions) -> Plan:
    drop = options.sync or options.replace_all
    plan = make_plan(given.groups, known, proof.is_sound, force=options.force, drop_vanished=drop)
    proof.check_kept(plan.kept)
    return plan


def _context(
    given: Inputs,
    plan: Plan,
    options: PackOptions,
    *,
    target: Store,
    memory: Memory,
    staging: StorePath,
) -> Context:
    return Context(
        tree=given.tree,
        recipe=given.setting.recipe,
        objects=target.objects,
        memory=memory,
        clock=file_clock(given.tree.root, staging),
        staging=staging,
        force=options.force,
        max_sample_bytes=options.max_sample_bytes,
        fields=unify_dumped(part.fields for part in plan.known()),
    )


def _build(
    plan: Plan, context: Context, count: int | None, observer: Observer, renew: Renewal
) -> list[Built]:
    todo = [item for task in plan.tasks for item in task.samples]
    observer.planned(plan, len(todo), sum(item.file.size for item in todo))

    def progress(samples: int, source_bytes: int) -> None:
        renew()
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
