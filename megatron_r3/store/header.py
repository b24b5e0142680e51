"""What a shard says of itself, and where its tensors lie (the safetensors format).

A file of somebody else is read here before anything of it is believed: every number is a whole one
of a range, and the tensors fill the file without overlap or hole. Then a tensor's bytes can be read
by their place, and the memory that reading takes is bounded by the size of the file.
"""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megatron_r3.store.files import HeldFile, shard_name, shard_number
from megatron_r3.store.schema import FORMAT, FORMAT_VERSION, SamplingSettings, StoreError, StoreInfo
from megatron_r3.untrusted import one_line, read_json

DTYPES: dict[str, type] = {
    **{"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "BOOL": np.bool_},
    **{"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64},
    **{"F16": np.float16, "F32": np.float32, "F64": np.float64},
}
ITEM_BYTES = {name: np.dtype(dtype).itemsize for name, dtype in DTYPES.items()} | {
    **{"BF16": 2, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1}
}
PER_ROLLOUT = {
    **dict.fromkeys(("group", "num_tokens", "num_turns", "policy_version", "sample"), "I64"),
    "reward": "F32",
}
# for each rollout, `block_crc32` has the sum of its rows in each layer of `routes`, then of its
# slice of each of these
BLOCKS = {"tokens": "I32", "response": "U8", "logprobs": "F32", "recorded": "U8"}
TENSORS = {**PER_ROLLOUT, **BLOCKS, "turns": "I32", "routes": ""}  # of version 2 and later
SINCE_3 = {"prompt_digest": "I64", "block_crc32": "U32"}

_DTYPE = re.compile("[A-Z0-9_]{1,16}")
_MOST_HEADER = 1 << 26  # bytes
_MOST_DIMENSIONS = 8
_VERSIONS = (2, FORMAT_VERSION)


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies.

    Attributes:
        dtype: as safetensors calls it; one that is not in ITEM_BYTES is of a newer safetensors.
        begin, end: bytes of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A shard's header, read and checked.

    Attributes:
        version: of the format.
        crc32: of each tensor's bytes; from version 3 on not of `routes` and BLOCKS.
        identity: 16 hex digits of the SHA-256 of the header's text, which has all checksums.
    """

    version: int
    info: StoreInfo
    entries: Mapping[str, Entry]
    crc32: Mapping[str, int]
    identity: str

    @property
    def tensors(self) -> dict[str, str]:
        """The names and dtypes of the tensors that a shard of this version must have."""
        return TENSORS if self.version < FORMAT_VERSION else {**TENSORS, **SINCE_3}


def read_header(file: HeldFile) -> Header:
    """Read and check the header of a shard.

    Raises:
        StoreError: beginning with the file's path.
    """
    path = file.path
    try:
        metadata, entries = _read_layout(file)
        body, text = _read_body(metadata, str(path))
        version = _check_version(body, str(path))
        fields_of_info = _dict(body, "info", str(path))
        if version >= FORMAT_VERSION:
            _check_number(file, body)
            _check_must_know(body, str(path))
        info = _read_info(fields_of_info, str(path))
        sums = _dict(body, "crc32", str(path))
        for name, value in sums.items():
            if not _is_whole(value, 2**32 - 1):
                raise StoreError(f"{path}: crc32 of {_quoted(name)}: {_quoted(value)} is no CRC-32")
    except StoreError:
        raise
    except ValueError as error:  # JSON that is none; it begins with the path
        raise StoreError(f"{error}; copy the shard again or remove it") from error
    identity = hashlib.sha256(text).hexdigest()[:16]
    header = Header(version, info, entries, sums, identity)
    _check_names(header, str(path))
    return header


def _read_layout(file: HeldFile) -> tuple[dict[str, Any], dict[str, Entry]]:
    """The header's texts, and where each tensor lies: https://github.com/huggingface/safetensors.

    A file is the length of the header (8 bytes, little-endian), the header (JSON) and the tensors'
    bytes, whose offsets count from the end of the header.
    """
    where = f"{file.path}: not a whole shard"
    if file.size < 8:
        raise StoreError(f"{where} ({file.size} bytes); copy it again or remove it")
    first = np.zeros(8, np.uint8)
    file.read(first, 0)
    length = int.from_bytes(first.tobytes(), "little")
    if not 2 <= length <= min(_MOST_HEADER, file.size - 8):
        raise StoreError(
            f"{where} (a header of {length} bytes in a file of {file.size}); copy it again or "
            "remove it"
        )
    text = np.zeros(length, np.uint8)
    file.read(text, 8)
    layout = read_json(text.tobytes(), where, _MOST_HEADER)
    if not isinstance(layout, dict):
        raise StoreError(f"{where} (its header is no JSON object); copy it again or remove it")
    metadata = layout.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise StoreError(
            f"{where} (its __metadata__ is no JSON object); copy it again or remove it"
        )
    entries = {name: _entry(name, entry, 8 + length, where) for name, entry in layout.items()}
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise StoreError(
                f"{where} (tensor {_quoted(name)} begins at byte {entry.begin}, not {end}); copy "
                "it again or remove it"
            )
        end = entry.end
    if end != file.size:
        raise StoreError(
            f"{where} ({file.size} bytes; its header describes {end}); copy it again or remove it"
        )
    return metadata, entries


def _entry(name: str, given: Any, data: int, where: str) -> Entry:
    entry = given if isinstance(given, dict) else {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    right = (
        isinstance(dtype, str)
        and _DTYPE.fullmatch(dtype)
        and isinstance(shape, list)
        and len(shape) <= _MOST_DIMENSIONS
        and all(_is_whole(size) for size in shape)
        and isinstance(offsets, list)
        and len(offsets) == 2
        and all(_is_whole(offset) for offset in offsets)
        and offsets[0] <= offsets[1]
    )
    if right:
        item_bytes = ITEM_BYTES.get(dtype)  # type: ignore[arg-type]
        size = offsets[1] - offsets[0]  # type: ignore[index]
        right = item_bytes is None or math.prod(shape) * item_bytes == size  # type: ignore[arg-type]
    if not right:
        raise StoreError(
            f"{where} (tensor {_quoted(name)}: {_quoted(given)} is no dtype, shape and place that "
            "belong together); copy it again or remove it"
        )
    return Entry(dtype, tuple(shape), data + offsets[0], data + offsets[1])  # type: ignore[arg-type, index]


def _read_body(metadata: dict[str, Any], where: str) -> tuple[dict[str, Any], bytes]:
    """The shard's own header, and its text."""
    text = metadata.get("megatron_r3")
    if not isinstance(text, str) or not text:
        raise StoreError(f"{where}: a safetensors file, but not a rollout shard")
    data = text.encode(errors="surrogatepass")
    if str(zlib.crc32(data)) != metadata.get("crc32"):
        raise StoreError(f"{where}: the header is damaged; copy the shard again or remove it")
    body = read_json(data, f"{where}: the header", _MOST_HEADER)
    if not isinstance(body, dict):
        raise StoreError(f"{where}: the header is no JSON object")
    return body, data


def _check_version(body: dict[str, Any], where: str) -> int:
    version = body.get("version")
    if body.get("format") != FORMAT or type(version) is not int or version not in _VERSIONS:
        raise StoreError(
            f"{where}: {_quoted(body.get('format'))} version {_quoted(version)}; this megatron-r3 "
            f"reads {FORMAT!r} versions {' and '.join(map(str, _VERSIONS))}"
        )
    return version


def _check_number(file: HeldFile, body: dict[str, Any]) -> None:
    number = body.get("number")
    if not _is_whole(number):
        raise StoreError(f"{file.path}: number {_quoted(number)} is not the number of a shard")
    if number != shard_number(file.path):
        raise StoreError(
            f"{file.path}: says that it is shard {number}; was it renamed or copied? Give it back "
            f"the name {shard_name(number)}, or remove the copy"  # type: ignore[arg-type]
        )


def _check_must_know(body: dict[str, Any], where: str) -> None:
    """Refuse a shard that cannot be understood without something that this reader ignores."""
    names = body.get("must_know")
    if not isinstance(names, list):
        raise StoreError(f"{where}: must_know {_quoted(names)} is no list of names")
    known = {"format", "version", "number", "info", "crc32", "must_know", *TENSORS, *SINCE_3}
    known |= {field.name for kind in (StoreInfo, SamplingSettings) for field in fields(kind)}
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise StoreError(
                f"{where}: needs {_quoted(name)}, which this megatron-r3 does not know: update it"
            )


def _read_info(given: dict[str, Any], where: str) -> StoreInfo:
    """What the header says of its store; keys that are not known are left out."""
    known = {field.name for field in fields(StoreInfo)}
    values: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k in known
    }
    settings = {field.name for field in fields(SamplingSettings)}
    if "sampling" in values:
        sampling = _dict(given, "sampling", where)
        values["sampling"] = SamplingSettings(
            **{k: v for k, v in sampling.items() if k in settings}
        )
    needed = ("num_experts", "topk", "moe_layers", "engine", "engine_version")
    for name in needed:
        if name not in values:
            raise StoreError(f"{where}: info has no {name}; copy the shard again or remove it")
    info = StoreInfo(**values)
    info.check(where)
    return info


def _check_names(header: Header, where: str) -> None:
    """Refuse tensors that are missing, and tensors without a checksum."""
    needed, found = header.tensors, header.entries.keys()
    if needed.keys() - found or (header.version < FORMAT_VERSION and found - needed.keys()):
        raise StoreError(
            f"{where}: tensors {_quoted(sorted(found), 400)}; a shard of version {header.version} "
            f"has {sorted(needed)}"
        )
    in_blocks = {"routes", *BLOCKS} if header.version >= FORMAT_VERSION else set()
    for name in sorted(found - in_blocks - header.crc32.keys()):
        raise StoreError(f"{where}: crc32 has no checksum of {_quoted(name)}")


def _dict(values: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    value = values.get(name)
    if not isinstance(value, dict):
        raise StoreError(f"{where}: {name} is no JSON object; got {_quoted(value)}")
    return value


def _is_whole(value: Any, most: int = 2**63 - 1) -> bool:
    """A whole number of this range; True is none."""
    return type(value) is int and 0 <= value <= most


def _quoted(value: Any, most: int = 120) -> str:
    return one_line(repr(value), most)
