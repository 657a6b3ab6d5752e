"""What the partitions of a version have in common, and whether a base has it too."""

from __future__ import annotations

from dataclasses import dataclass

from fsmount.errors import RuleMismatchError
from fsmount.model import Recipe, Rule, Version


@dataclass(frozen=True, slots=True)
class Setting:
    """What a version's partitions must have in common."""

    rule: Rule
    namespace: str
    recipe: Recipe

    def check_fits(self, base: Version) -> None:
        """Raise RuleMismatchError, which names the remedies, unless this fits `base`."""
        if not self.fits(base):
            raise RuleMismatchError(self._mismatch(base))

    def fits(self, base: Version) -> bool:
        """Whether partitions of `base` can stand beside those of this setting."""
        document = base.document
        return (self.rule, self.namespace, self.recipe) == (
            document.rule,
            document.source_namespace,
            document.recipe,
        )

    def _mismatch(self, base: Version) -> str:
        theirs, name = base.document, base.document.tag or base.document.table.digest
        pairs = (
            ("partition rule", str(theirs.rule), str(self.rule)),
            ("source namespace", repr(theirs.source_namespace), repr(self.namespace)),
            ("recipe", str(theirs.recipe), str(self.recipe)),
        )
        what = "; ".join(f"{word} {old}, not {new}" for word, old, new in pairs if old != new)
        return (
            f"the base {name!r} has {what}. If this is the same source at another place, pass "
            f"--source-namespace {theirs.source_namespace!r}, and leave rule and recipe to the "
            "base; if the new version is to hold this source alone, with a rule, namespace and "
            "recipe of its own, pass --replace-all"
        )
