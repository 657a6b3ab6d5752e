"""What a pack works on: the listed source, the base, and what the options make of both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fsmount.errors import InvalidNameError, SourceError, VersionNotFoundError
from fsmount.formats.checked import is_unicode
from fsmount.model import DirectoryRule, Partition, Recipe, Ref, Version
from fsmount.pack.options import LATEST, PackOptions
from fsmount.pack.plan import check_sidecars, group
from fsmount.pack.setting import Setting
from fsmount.pack.source import Listing, NpzTree, SourceSample
from fsmount.store import Store


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is packed, onto what, and how."""

    tree: NpzTree
    listing: Listing
    groups: Mapping[str, tuple[SourceSample, ...]]  # the listed samples by partition
    setting: Setting
    base: Version | None
    latest: str | None  # what `latest` names so far

    @property
    def before(self) -> tuple[Partition, ...]:
        """The base's partitions."""
        return () if self.base is None else self.base.partitions

    @property
    def comparable(self) -> tuple[Partition, ...]:
        """Those of the base's partitions that can stand beside new ones."""
        fits = self.base is not None and self.setting.fits(self.base)
        return self.before if fits else ()


def read_inputs(source: str, store: str, options: PackOptions) -> Inputs:
    """List the tree at `source` and read the base; nothing is written. Raises as `pack`."""
    tree = NpzTree(_real_path(source), options.links)
    namespace = _namespace(tree, options)
    listing = _scan(tree, os.path.realpath(store), options)
    base, latest = _base(store, options.base)
    setting = _setting(base, namespace, options)
    return Inputs(tree, listing, group(listing.samples, setting.rule), setting, base, latest)


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
        if ref is not None and ref != LATEST:
            raise VersionNotFoundError(f"no version {str(ref)!r} to build on: no store at {path}")
        return None, None
    store = Store.open(path)
    latest = store.latest()
    if ref is None or (ref == LATEST and latest is None):
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
