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


@dataclass(frozen=True)
class Streamed:
    """A tensor that is written in pieces.

    Attributes:
        parts: contiguous arrays whose bytes follow each other; each may reuse the memory of the
            one before.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    parts: Iterable[np.ndarray]

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
        for part in tensors[name].parts:
            crc32[name] = zlib_ng.crc32(part.data, crc32[name])
            _write_all(file, part)
    assert file.tell() == 8 + length + end, "a tensor has other bytes than its shape says"
    file.seek(0)
    text = length.to_bytes(8, "little") + header(crc32).ljust(length)
    _write_all(file, np.frombuffer(text, np.uint8))


def _write_all(file: BinaryIO, part: np.ndarray) -> None:
    rest = memoryview(part.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    while len(rest):
        rest = rest[file.write(rest) :]
