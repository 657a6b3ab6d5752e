"""A sample as an uncompressed `.npz`: deterministic, and of a size known from its schema alone."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fsmount.formats.manifest import Text
from fsmount.formats.sample import Field

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first time a zip can tell
_LOCAL = 30 + 20  # bytes of a local header, with the 64-bit sizes that we always write
_CENTRAL = 46
_END = 22
_LIMIT = (1 << 31) - 1  # bytes; beyond it zipfile writes longer records
_COUNT_LIMIT = (1 << 16) - 1


def build(arrays: Mapping[str, NDArray[Any]], texts: Sequence[Text]) -> bytes:
    """The npz of `arrays` and 0-d text arrays, in order of name; numpy.load gives them back."""
    members = {**arrays, **{text.name: text_array(text) for text in texts}}
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(members):
            info = zipfile.ZipInfo(f"{name}.npy", _EPOCH)
            with archive.open(info, "w", force_zip64=True) as member:
                array = members[name]
                fortran = bool(array.flags.f_contiguous and not array.flags.c_contiguous)
                member.write(_header(array.dtype, array.shape, fortran=fortran))
                member.write(array.tobytes("F" if fortran else "C"))
    return sink.getvalue()


def size(fields: Sequence[Field], texts: Sequence[Text]) -> int | None:
    """The length in bytes of what `build` makes of arrays with these descriptions.

    None where it has to be built to be known: too large for a zip's plain records.
    """
    lengths: dict[str, int] = {}
    for field in fields:
        header = _header(field.dtype, field.shape, fortran=field.fortran_order)
        lengths[field.name] = len(header) + field.nbytes
    for text in texts:
        dtype = np.dtype(text.descr)
        lengths[text.name] = len(_header(dtype, (), fortran=False)) + dtype.itemsize
    total = _END
    for name, length in lengths.items():
        total += _LOCAL + _CENTRAL + 2 * len(f"{name}.npy".encode()) + length
    return total if total < _LIMIT and len(lengths) < _COUNT_LIMIT else None


def text_array(text: Text) -> NDArray[Any]:
    """The 0-d array of a text."""
    dtype = np.dtype(text.descr)
    return np.array(text.value.encode() if dtype.kind == "S" else text.value, dtype)


def _header(dtype: np.dtype[Any], shape: tuple[int, ...], *, fortran: bool) -> bytes:
    sink = io.BytesIO()
    described = {
        "descr": npy.dtype_to_descr(dtype),
        "fortran_order": fortran,
        "shape": shape,
    }
    npy.write_array_header_1_0(sink, described)
    return sink.getvalue()
