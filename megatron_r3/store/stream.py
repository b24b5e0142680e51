"""A safetensors file written as its bytes come, with their checksums in its own header.

The library's writer wants every tensor whole in memory, and copies it once more; routes are
gigabytes. Format: https://github.com/huggingface/safetensors (length, JSON header, data).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from zlib_ng import zlib_ng

__all__ = ["Streamed", "write_safetensors"]

_NAMES = {"int64": "I64", "int32": "I32", "float32": "F32", "uint16": "U16", "uint8": "U8"}
_MOST_PIECES = os.sysconf("SC_IOV_MAX")  # of one write


@dataclass(frozen=True)
class Streamed:
    """A tensor that is written in pieces.

    Attributes:
        parts: lists of contiguous arrays whose bytes follow each other; a list is written at once.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    parts: Iterable[list[np.ndarray]]

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    file: BinaryIO,
    tensors: Mapping[str, Streamed],
    metadata_of: Callable[[Mapping[str, int]], dict[str, str]],
) -> None:
    """Write a whole file.

    Args:
        file: unbuffered, empty, open for writing.
        metadata_of: the header's texts from the CRC-32 of each tensor.
    """
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # all are aligned
    entries, end = {}, 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        kind = _NAMES[str(tensor.dtype)]
        entries[name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": [begin, end]}

    def header(crc32: Mapping[str, int]) -> bytes:
        return json.dumps({"__metadata__": metadata_of(crc32), **entries}).encode()

    longest = len(header(dict.fromkeys(names, 2**32 - 1))) + 16  # its own checksum has digits too
    length = -(-longest // 8) * 8
    os.posix_fallocate(file.fileno(), 0, 8 + length + end)
    file.seek(8 + length)
    crc32 = {}
    for name in names:
        crc32[name] = 0
        for arrays in tensors[name].parts:
            for array in arrays:
                crc32[name] = zlib_ng.crc32(array.data, crc32[name])
            _write_all(file, arrays)
    assert file.tell() == 8 + length + end, "a tensor has other bytes than its shape says"
    file.seek(0)
    text = length.to_bytes(8, "little") + header(crc32).ljust(length)
    _write_all(file, [np.frombuffer(text, np.uint8)])


def _write_all(file: BinaryIO, arrays: list[np.ndarray]) -> None:
    pieces = [array.data for array in arrays]
    for start in range(0, len(pieces), _MOST_PIECES):
        some = pieces[start : start + _MOST_PIECES]
        rest = sum(piece.nbytes for piece in some) - os.writev(file.fileno(), some)
        if rest:  # more than a system writes at once, or a disk that is full, which then says so
            bytes_left = memoryview(b"".join(some))[-rest:]
            while len(bytes_left):
                bytes_left = bytes_left[file.write(bytes_left) :]
