"""From a tree of samples to a published version."""

from fsmount.pack.files import Links
from fsmount.pack.pack import Observer, PackOptions, PackReport, Silent, pack

__all__ = ["Links", "Observer", "PackOptions", "PackReport", "Silent", "pack"]
