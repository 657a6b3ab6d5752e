"""A sample as an uncompressed `.npz`: deterministic, of a size and places known from its schema."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fsmount.errors import FormatError
from fsmount.formats.checked import is_unicode
from fsmount.formats.manifest import no_dtype_of_text, text_room
from fsmount.formats.sample import Field

LARGEST = (1 << 31) - 1  # bytes of a zip with plain records
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first time a zip can tell
_CENTRAL = struct.Struct("<4s4B4HL2L5H2L")
_END = struct.Struct("<4s4H2LH")
_LOCAL_SIZE = 30 + 20  # bytes of a local header, with the 64-bit sizes that we always write
_COUNT_LIMIT = (1 << 16) - 1
_NAME_LIMIT = (1 << 16) - 1  # bytes
_MODE = 0o600 << 16


@dataclass(frozen=True, slots=True)
class Member:
    """One array of an npz: its header, and where everything lies."""

    name: str
    header: bytes  # of the npy file
    start: int  # of the zip's local header
    nbytes: int  # of the array's data

    @property
    def data_at(self) -> int:
        """Where the array's bytes begin."""
        return self.start + _LOCAL_SIZE + len(_file_name(self.name)) + len(self.header)

    @property
    def end(self) -> int:
        return self.data_at + self.nbytes


def members(fields: Iterable[Field], descrs: Mapping[str, str]) -> list[Member]:
    """The members of the npz of these tensors and text arrays (name to dtype descriptor), by name.

    FormatError for a descriptor that is no text's, and for what is too large for an npz of ours.
    """
    arrays = [
        (f.name, _header(f.dtype, f.shape, fortran=f.fortran_order), f.nbytes) for f in fields
    ]
    for name, descr in descrs.items():
        dtype = _text_dtype(name, descr)
        arrays.append((name, _header(dtype, (), fortran=False), dtype.itemsize))
    found: list[Member] = []
    for name, header, nbytes in sorted(arrays):
        _check_name(name)
        if found and found[-1].name == name:
            raise FormatError(f"{name!r} is a tensor and a text array")
        found.append(Member(name, header, found[-1].end if found else 0, nbytes))
    if _size(found) > LARGEST or len(found) > _COUNT_LIMIT:
        raise FormatError(f"{len(found)} arrays of {_size(found)} bytes are too much for an .npz")
    return found


def size(fields: Sequence[Field], descrs: Mapping[str, str]) -> int:
    """The length in bytes of the npz of what is described so; FormatError as `members`."""
    return _size(members(fields, descrs))


def _size(found: Sequence[Member]) -> int:
    central = sum(_CENTRAL.size + len(_file_name(member.name)) for member in found)
    return (found[-1].end if found else 0) + central + _END.size


def _text_dtype(name: str, descr: str) -> np.dtype[Any]:
    """The dtype of a text array; FormatError unless `descr` is a text's, of a size we show."""
    if 4 * text_room(name, descr) > LARGEST:
        raise no_dtype_of_text(name, descr)
    return np.dtype(descr)


def text_bytes(name: str, descr: str, value: str) -> bytes:
    """The data of a 0-d text array; FormatError for a text that its dtype can't hold."""
    dtype = _text_dtype(name, descr)
    array: NDArray[Any] = np.array(value.encode() if dtype.kind == "S" else value, dtype)
    held = array.item()
    if (held.decode() if isinstance(held, bytes) else held) != value.rstrip("\0"):
        raise FormatError(f"text array {name!r}: a text that {descr} can't hold")
    return array.tobytes()


def local_header(member: Member, crc: int) -> bytes:
    """What stands before the data of `member`, whose npy file has the CRC-32 `crc`."""
    return _info(member, crc).FileHeader(zip64=True) + member.header


def directory(found: Sequence[Member], crcs: Mapping[str, int]) -> bytes:
    """What stands behind the members, given the CRC-32 of each npy file by the array's name."""
    start = found[-1].end if found else 0
    central = b"".join(_central_header(member, crcs[member.name]) for member in found)
    end = _END.pack(b"PK\5\6", 0, 0, len(found), len(found), len(central), start, 0)
    return central + end


def _central_header(member: Member, crc: int) -> bytes:
    local = _info(member, crc).FileHeader(zip64=True)
    version, flags, _, time, date = struct.unpack_from("<5H", local, 4)
    name = _file_name(member.name)
    length = len(member.header) + member.nbytes
    return (
        _CENTRAL.pack(
            b"PK\1\2", version, 3, version, 0, flags, 0, time, date, crc, length, length,
            len(name), 0, 0, 0, 0, _MODE, member.start,
        )
        + name
    )  # fmt: skip


def _info(member: Member, crc: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(f"{member.name}.npy", _EPOCH)
    info.CRC = crc
    info.file_size = info.compress_size = len(member.header) + member.nbytes
    return info


def _check_name(name: str) -> None:
    if "\0" in name or not is_unicode(name) or len(_file_name(name)) > _NAME_LIMIT:
        raise FormatError(f"{name[:40]!r} can't be the name of an array in an .npz")


def _file_name(name: str) -> bytes:
    return f"{name}.npy".encode()


def _header(dtype: np.dtype[Any], shape: tuple[int, ...], *, fortran: bool) -> bytes:
    sink = io.BytesIO()
    described = {
        "descr": npy.dtype_to_descr(dtype),
        "fortran_order": fortran,
        "shape": shape,
    }
    npy.write_array_header_1_0(sink, described)
    return sink.getvalue()
