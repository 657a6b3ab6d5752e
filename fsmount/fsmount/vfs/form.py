"""The forms that a sample is shown in, and how large one may be."""

from __future__ import annotations

from enum import IntEnum

LARGEST = 1 << 30  # bytes of a decoded member; a larger one is not shown


class Form(IntEnum):
    """A form; the value is its place among those of one sample."""

    SAFETENSORS = 0
    NPZ = 1
    JSON = 2

    @property
    def suffix(self) -> str:
        """What its file's name ends with."""
        return f".{self.name.lower()}"
