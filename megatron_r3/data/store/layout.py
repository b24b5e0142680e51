"""Where the tensors of a safetensors file lie: https://github.com/huggingface/safetensors.

Nothing in the file is believed before it is checked: every number is a whole number within a range,
and the tensors fill the file without overlap or hole.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import numpy as np

from megatron_r3.data.store.files import HeldFile
from megatron_r3.data.store.schema import StoreError
from megatron_r3.data.untrusted import read_json
from megatron_r3.replay.words import quoted

# safetensors' names of the types that a shard's tensors have
DTYPES: dict[str, type] = {
    **{"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "BOOL": np.bool_},
    **{"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64},
    **{"F16": np.float16, "F32": np.float32, "F64": np.float64},
}
# and of those that a tensor of a later megatron-r3 may have, whose bytes are only summed
_ITEM_BYTES = {name: np.dtype(dtype).itemsize for name, dtype in DTYPES.items()} | {
    **{"BF16": 2, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1}
}

_DTYPE_NAME = re.compile("[A-Z0-9_]{1,16}")
MOST_HEADER_BYTES = 1 << 26
_MOST_DIMENSIONS = 8


class Entry(NamedTuple):
    """Where a tensor lies.

    Attributes:
        dtype: safetensors' name of it; a newer safetensors may have names that are not known here.
        begin, end: bytes of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_layout(file: HeldFile) -> tuple[dict[str, Any], dict[str, Entry]]:
    """The header's texts, and where each tensor lies: https://github.com/huggingface/safetensors.

    A file is the length of the header (8 bytes, little-endian), the header (JSON) and the tensors'
    bytes, whose offsets count from the end of the header. Example of a header:

        {"__metadata__": {"megatron_r3": "{...}", "crc32": "123"},
         "reward": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}

    Raises:
        StoreError: the tensors do not fill the file without overlap or hole; beginning with the
            file's path.
        ValueError: the header is not JSON.
    """
    where = f"{file.path}: not a whole shard"
    if file.size < 8:
        raise _not_whole(where, f"{file.size} bytes")
    length_bytes = np.zeros(8, np.uint8)
    file.read(length_bytes, 0)
    length = int.from_bytes(length_bytes.tobytes(), "little")
    if not 2 <= length <= min(MOST_HEADER_BYTES, file.size - 8):
        raise _not_whole(where, f"a header of {length} bytes in a file of {file.size}")
    text = np.zeros(length, np.uint8)
    file.read(text, 8)
    layout = read_json(text.tobytes(), where, MOST_HEADER_BYTES)
    if not isinstance(layout, dict):
        raise _not_whole(where, "its header is no JSON object")
    metadata = layout.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _not_whole(where, "its __metadata__ is no JSON object")
    data = 8 + length  # where the tensors' bytes begin
    entries = _read_entries(layout, data)
    if entries is None:  # one of them is wrong; find out which
        entries = {name: _read_entry(name, entry, data, where) for name, entry in layout.items()}
    # in the order in which they lie, each tensor begins where the one before it ends
    end = data
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise _not_whole(
                where, f"tensor {quoted(name)} begins at byte {entry.begin}, not {end}"
            )
        end = entry.end
    if end != file.size:
        raise _not_whole(where, f"{file.size} bytes; its header describes {end}")
    return metadata, entries


def _read_entries(layout: dict[str, Any], data: int) -> dict[str, Entry] | None:
    """All entries, as `_read_entry` reads each of them; None if anything is unusual.

    A first rank reads 160,000 entries of 10,000 shards. So the types and bounds of all numbers of a
    shard are looked at together.
    """
    entries, numbers = dict[str, Entry](), list[int]()
    try:
        for name, value in layout.items():
            dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
            if (
                math.prod(shape) * _ITEM_BYTES[dtype] != end - begin
                or not isinstance(shape, list)
                or len(shape) > _MOST_DIMENSIONS
            ):
                return None
            numbers += (*shape, begin, end)
            entries[name] = Entry(dtype, tuple(shape), data + begin, data + end)
    except (TypeError, ValueError, KeyError):
        return None
    if (
        {*map(type, numbers)} - {int}
        or min(numbers, default=0) < 0
        or max(numbers, default=0) >= 2**63
    ):
        return None
    return entries


def _read_entry(name: str, value: Any, data: int, where: str) -> Entry:
    """One tensor's entry, whose offsets count from the byte `data` of the file."""
    given = value if isinstance(value, dict) else {}
    dtype, shape, offsets = given.get("dtype"), given.get("shape"), given.get("data_offsets")
    if (
        isinstance(dtype, str)
        and (dtype in _ITEM_BYTES or _DTYPE_NAME.fullmatch(dtype))
        and isinstance(shape, list)
        and len(shape) <= _MOST_DIMENSIONS
        and isinstance(offsets, list)
        and len(offsets) == 2
        and {int} == {*map(type, shape), *map(type, offsets)}  # True and 3.0 are not
        and min(*shape, *offsets) >= 0
        and max(*shape, *offsets) < 2**63
        and offsets[0] <= offsets[1]
    ):
        item_bytes = _ITEM_BYTES.get(dtype)  # None: a type of a newer safetensors
        if item_bytes is None or math.prod(shape) * item_bytes == offsets[1] - offsets[0]:
            return Entry(dtype, tuple(shape), data + offsets[0], data + offsets[1])
    raise _not_whole(
        where,
        f"tensor {quoted(name)}: {quoted(value)} is not a dtype, shape and place that agree",
    )


def _not_whole(where: str, reason: str) -> StoreError:
    return StoreError(f"{where} ({reason}); copy it again or remove it")
