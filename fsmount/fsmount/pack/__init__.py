"""From a tree of samples to a published version."""

from fsmount.pack.files import Links
from fsmount.pack.options import Observer, PackOptions, Silent
from fsmount.pack.pack import pack
from fsmount.pack.report import PackReport

__all__ = ["Links", "Observer", "PackOptions", "PackReport", "Silent", "pack"]
