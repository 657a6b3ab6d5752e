"""From a tree of samples to a published version."""

from fsmount.pack.pack import Observer, PackOptions, PackReport, Silent, pack

__all__ = ["Observer", "PackOptions", "PackReport", "Silent", "pack"]
