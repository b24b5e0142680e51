"""What a shard says of itself, and where its tensors lie (the safetensors format)."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.store.schema import FORMAT, FORMAT_VERSION, SamplingSettings, StoreError, StoreInfo

__all__ = ["DTYPES", "map_tensor", "read_body", "read_entries", "read_info"]

DTYPES: dict[str, type] = {
    **{"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "BOOL": np.bool_},
    **{"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64},
    **{"F16": np.float16, "F32": np.float32, "F64": np.float64},
}


def read_body(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    """A shard's own header, its checksum compared.

    Raises:
        StoreError: it is damaged, of another format or of another version.
    """
    text = metadata.get("megatron_r3", "")
    if not text:
        raise StoreError(f"{path}: a safetensors file, but not a rollout shard")
    if str(zlib.crc32(text.encode())) != metadata.get("crc32"):
        raise StoreError(f"{path}: the header is damaged; copy the shard again or remove it")
    body: dict[str, Any] = json.loads(text)
    if (body["format"], body["version"]) != (FORMAT, FORMAT_VERSION):
        raise StoreError(
            f"{path}: {body['format']!r} version {body['version']}; this megatron-r3 reads "
            f"{FORMAT!r} version {FORMAT_VERSION}"
        )
    return body


def read_info(fields: dict[str, Any]) -> StoreInfo:
    """What the header says of its store."""
    as_tuples: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()
    }
    if isinstance(fields.get("sampling"), dict):
        as_tuples["sampling"] = SamplingSettings(**fields["sampling"])
    info = StoreInfo(**as_tuples)
    info.check()
    return info


def read_entries(path: Path) -> tuple[dict[str, Any], int]:
    """Each tensor's dtype, shape and place, and where the data begins (the safetensors format)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def map_tensor(path: Path, entry: dict[str, Any], begin: int) -> np.ndarray:
    """A tensor where it lies in the file; one that is empty is not mapped."""
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    if 0 in shape:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", begin + entry["data_offsets"][0], shape)
