"""A safetensors file written as its bytes come; its header, with their checksums, comes last.

The library's writer wants every tensor whole in memory, and copies it once more; routes are
gigabytes. Format: https://github.com/huggingface/safetensors (length, JSON header, data).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from zlib_ng import zlib_ng

__all__ = ["Streamed", "Written", "write_tensors"]

_NAMES = {
    **{"int64": "I64", "int32": "I32", "uint32": "U32", "uint16": "U16", "uint8": "U8"},
    "float32": "F32",
}
_MOST_PIECES = os.sysconf("SC_IOV_MAX")  # of one write


@dataclass(frozen=True)
class Streamed:
    """A tensor that is written in pieces.

    Attributes:
        parts: lists of contiguous arrays whose bytes follow each other; a list is written at once.
            They are asked for when all tensors before this one are written.
        summed: whether the CRC-32 of its bytes is wanted.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    parts: Iterable[list[np.ndarray]]
    summed: bool = True

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """A file whose tensors are written and whose header is not yet, or may change.

    Attributes:
        entries: of each tensor the type, shape and place, as the header says them.
        length: of the header, in bytes.
        crc32: of the tensors of which it was wanted.
    """

    file: BinaryIO
    entries: Mapping[str, Any]
    length: int
    crc32: Mapping[str, int]

    def write_header(self, metadata: Mapping[str, str]) -> None:
        """Write the header, over another one if there is one."""
        text = _header(metadata, self.entries)
        assert len(text) <= self.length, "the header has more texts than were announced"
        whole = self.length.to_bytes(8, "little") + text.ljust(self.length)
        self.file.seek(0)
        _write_all(self.file, [np.frombuffer(whole, np.uint8)])


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, Streamed], longest: Mapping[str, str]
) -> Written:
    """Write all tensors, in the order in which they are given; `write_header` ends the file.

    Args:
        file: unbuffered, empty, open for writing.
        longest: the header's texts as long as they can become.
    """
    entries: dict[str, Any] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize):  # all are aligned
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        kind = _NAMES[str(tensor.dtype)]
        entries[name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": [begin, end]}
    length = -(-len(_header(longest, entries)) // 8) * 8
    os.posix_fallocate(file.fileno(), 0, 8 + length + end)
    crc32 = {}
    for name, tensor in tensors.items():
        begin, end = entries[name]["data_offsets"]
        file.seek(8 + length + begin)
        total = 0
        for arrays in tensor.parts:
            for array in arrays if tensor.summed else ():
                total = zlib_ng.crc32(array.data, total)
            _write_all(file, arrays)
        assert file.tell() == 8 + length + end, f"{name} has other bytes than its shape says"
        if tensor.summed:
            crc32[name] = total
    return Written(file, entries, length, crc32)


def _header(metadata: Mapping[str, str], entries: Mapping[str, Any]) -> bytes:
    return json.dumps({"__metadata__": dict(metadata), **entries}).encode()


def _write_all(file: BinaryIO, arrays: list[np.ndarray]) -> None:
    pieces = [array.data for array in arrays]
    for start in range(0, len(pieces), _MOST_PIECES):
        some = pieces[start : start + _MOST_PIECES]
        rest = sum(piece.nbytes for piece in some) - os.writev(file.fileno(), some)
        if rest:  # more than a system writes at once, or a disk that is full, which then says so
            bytes_left = memoryview(b"".join(some))[-rest:]
            while len(bytes_left):
                bytes_left = bytes_left[file.write(bytes_left) :]
