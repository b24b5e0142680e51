"""Reads and checks the header of a shard: its description, and where each tensor lies in the file.

Somebody else may have written the file. So the header is used only after these checks: each number
is a whole number within a range, the tensors fill the file without overlap or hole, and the shapes
of the tensors fit each other. Then a tensor's bytes can be read by their position (`Entry`), and
reading takes no more memory than the file is long.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_r3.data.digest import short_digest
from megatron_r3.data.lazy import lazy
from megatron_r3.data.store.files import HeldFile, shard_name, shard_number
from megatron_r3.data.store.schema import (
    FORMAT,
    FORMAT_VERSION,
    SamplingSettings,
    StoreError,
    StoreInfo,
)
from megatron_r3.data.untrusted import read_json
from megatron_r3.replay.routes import id_dtype
from megatron_r3.replay.words import quoted

# safetensors' names of the types that a shard's tensors have
_CODES = {"U8": "u1", "U16": "<u2", "U32": "<u4", "I32": "<i4", "I64": "<i8", "F32": "<f4"}
DTYPES = {name: np.dtype(code) for name, code in _CODES.items()}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# The tensors of a shard and their types (docs/rollout-store.md).
PER_ROLLOUT = {
    **dict.fromkeys(("group", "num_kept", "num_tokens", "num_turns", "num_versions"), "I64"),
    **dict.fromkeys(("policy_version", "prompt_digest", "sample"), "I64"),
    **dict.fromkeys(("advantage", "reward"), "F32"),
}
# The tensors of pairs, each with the tensor that says how many pairs a rollout has
PAIRS = {"turns": "num_turns", "versions": "num_versions"}
IN_MEMORY = (*PER_ROLLOUT, *PAIRS)  # all other tensors of a shard stay in its file
PER_TOKEN = {"tokens": "I32", "response": "U8", "logprobs": "F32", "recorded": "U8"}
KEPT = {"kept_sizes": "I32", "kept_ids": "I32"}  # only if a rollout of the shard has kept sets
# The tables of part sums, which are checksums of each 64 tokens of a rollout (`part_sums.py`).
# COLUMNS says, by table, to which tensor each column belongs; the columns of ROUTE_SUMS are the
# layers of `routes`.
PART_TOKENS = 64
TOKEN_SUMS, ROUTE_SUMS, KEPT_SUMS = "token_sums", "route_sums", "kept_sums"
COLUMNS = {ROUTE_SUMS: (), TOKEN_SUMS: (*PER_TOKEN,), KEPT_SUMS: (*KEPT,)}
_TYPES = {
    **{**PER_ROLLOUT, **PER_TOKEN, "turns": "I32", "versions": "I64"},
    **{"routes": "U8 or U16", ROUTE_SUMS: "U32", TOKEN_SUMS: "U32"},  # routes: see `_check_shapes`
}
_KEPT_TYPES = {**KEPT, KEPT_SUMS: "U32"}

MOST_HEADER_BYTES = 1 << 26
_BODY = ("format", "version", "number", "recorded_rows", "info", "crc32")
_infos: dict[str, StoreInfo] = {}  # checked infos, by the repr of their objects in the headers
_MOST_INFOS = 1000  # kept in `_infos`: one for each policy of a long training


class Entry(NamedTuple):
    """A tensor's type and shape, and where the tensor's bytes lie in the file.

    Attributes:
        dtype: safetensors' name of the type.
        begin, end: the tensor's first byte, and the byte behind its last one.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A shard's header, read and checked.

    Attributes:
        entries: where each tensor lies.
        crc32: by name, the CRC-32 of each tensor's bytes.
        recorded_rows: how many rows have routes.
        identity: the first 16 hex digits of the SHA-256 of the header's text `megatron_r3`, which
            has the checksums of all tensors. So shards of one identity have the same content.
    """

    info: StoreInfo
    entries: Mapping[str, Entry]
    crc32: Mapping[str, int]
    recorded_rows: int
    identity: str

    @lazy
    def mask(self) -> int:
        """The number that is XORed into all part sums of the shard."""
        return mask_of(self.crc32)


def mask_of(crc32: Mapping[str, int]) -> int:
    """The number that is XORed into all part sums of a shard (`part_sums.py` says why).

    Args:
        crc32: by name, the CRC-32 of each tensor; the tables of part sums do not count.
    """
    names = sorted(crc32.keys() - COLUMNS.keys())
    return zlib.crc32(np.array([crc32[name] for name in names], "<u4").tobytes())


def read_header(file: HeldFile) -> Header:
    """Read and check the header of a shard.

    Raises:
        StoreError: the header is damaged, of another format, or contradicts itself or the file; the
            message begins with the file's path.
    """
    where = str(file.path)
    try:
        layout, data = _read_layout(file)
        body, text = _read_body(layout.pop("__metadata__", None), where)
        _check_body(file.path, body)
        entries = _read_entries(layout, data, file)
        info = read_info(body["info"], where)
    except StoreError:
        raise
    except ValueError as error:  # from read_json: the text is not JSON; begins with the path
        raise StoreError(f"{error}; copy the shard again or remove it") from error
    _check_names(entries, body["crc32"], where)
    _check_shapes(entries, info, where)
    check_logprobs_of(info, "kept_ids" in entries, where)
    return Header(info, entries, body["crc32"], body["recorded_rows"], short_digest(text))


def _read_layout(file: HeldFile) -> tuple[dict[str, Any], int]:
    """The JSON of a safetensors file, and the byte at which the tensors begin.

    A file (https://github.com/huggingface/safetensors) is the length of the header (8 bytes,
    little-endian), the header (JSON) and the tensors' bytes. The header says where each tensor
    lies, counted from the end of the header. Example of a header:

        {"__metadata__": {"megatron_r3": "{...}", "crc32": "123"},
         "reward": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    """
    where = f"{file.path}: not a whole shard"
    if file.size < 8:
        raise _not_whole(where, f"{file.size} bytes")
    length = int.from_bytes(file.read(np.empty(8, np.uint8), 0).tobytes(), "little")
    if not 2 <= length <= min(MOST_HEADER_BYTES, file.size - 8):
        raise _not_whole(where, f"a header of {length} bytes in a file of {file.size}")
    text = file.read(np.empty(length, np.uint8), 8).tobytes()
    layout = read_json(text, where, MOST_HEADER_BYTES)
    if not isinstance(layout, dict):
        raise _not_whole(where, "its header is no JSON object")
    return layout, 8 + length


def _read_entries(layout: dict[str, Any], data: int, file: HeldFile) -> dict[str, Entry]:
    """Where each tensor lies; together they must fill the file without overlap or hole."""
    where = f"{file.path}: not a whole shard"
    entries = {name: _read_entry(name, value, data, where) for name, value in layout.items()}
    # in the order in which they lie, each tensor begins where the one before it ends
    end = data
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.begin != end:
            raise _not_whole(
                where, f"tensor {quoted(name)} begins at byte {entry.begin}, not {end}"
            )
        end = entry.end
    if end != file.size:
        raise _not_whole(where, f"{file.size} bytes; its header describes {end}")
    return entries


def _read_entry(name: str, value: Any, data: int, where: str) -> Entry:
    """One tensor's entry; the offsets in `value` count from the byte `data` of the file."""
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = (*shape, begin, end)
        if (
            isinstance(shape, list)
            and {*map(type, numbers)} == {int}  # JSON's true and 3.0 are not
            and min(numbers) >= 0
            and math.prod(shape) * DTYPES[dtype].itemsize == end - begin
        ):
            return Entry(dtype, tuple(shape), data + begin, data + end)
    except (TypeError, ValueError, KeyError):
        pass
    raise _not_whole(
        where,
        f"tensor {quoted(name)}: {quoted(value)} is not a dtype, shape and place that fit"
        " each other",
    )


def _not_whole(where: str, reason: str) -> StoreError:
    return StoreError(f"{where} ({reason}); copy it again or remove it")


def check_logprobs_of(info: StoreInfo, has_kept_sets: bool, where: str) -> None:
    """Refuse kept sets if the log-probs are not known to be normalised over these sets.

    Raises:
        StoreError: naming `where`.
    """
    if has_kept_sets and info.sampling.logprobs_of != "processed":
        raise StoreError(
            f"{where}: has kept sets, and sampling.logprobs_of is "
            f"{quoted(info.sampling.logprobs_of)}; with kept sets it must be 'processed', because "
            "the trainer normalises over the kept sets"
        )


def _read_body(metadata: Any, where: str) -> tuple[dict[str, Any], bytes]:
    """The shard's description `megatron_r3`: as a JSON object, and as the text in the header."""
    text = metadata.get("megatron_r3") if isinstance(metadata, dict) else None
    if not isinstance(text, str) or not text:
        raise StoreError(f"{where}: a safetensors file, but not a rollout shard: move it away")
    data = text.encode(errors="surrogatepass")
    if str(zlib.crc32(data)) != metadata.get("crc32"):
        raise StoreError(f"{where}: the header is damaged; copy the shard again or remove it")
    body = read_json(data, f"{where}: the header", MOST_HEADER_BYTES)
    if not isinstance(body, dict):
        raise StoreError(f"{where}: the header is no JSON object")
    return body, data


def _check_body(path: Path, body: dict[str, Any]) -> None:
    """Refuse another format or version, and values that no header has."""
    version = body.get("version")
    # JSON's true and 5.0 equal whole numbers in Python, but no writer writes a version so
    if body.get("format") != FORMAT or type(version) is not int or version != FORMAT_VERSION:
        raise StoreError(
            f"{path}: {quoted(body.get('format'))} version {quoted(version)}; this megatron-r3 "
            f"reads {FORMAT!r} version {FORMAT_VERSION}: sample or convert the rollouts again"
        )
    _check_keys(str(path), "the header", body, _BODY)
    for name in ("number", "recorded_rows"):
        if not _is_whole(body[name]):
            raise StoreError(f"{path}: {name} {quoted(body[name])} is no whole number from 0 on")
    if body["number"] != shard_number(path):
        raise StoreError(
            f"{path}: says that it is shard {body['number']}; was it renamed or copied? Give it "
            f"back the name {shard_name(body['number'])}, or remove the copy"
        )
    crc32 = body["crc32"]
    for name, value in crc32.items() if isinstance(crc32, dict) else [("the shard", crc32)]:
        if not _is_whole(value, 2**32 - 1):
            raise StoreError(f"{path}: crc32 of {quoted(name)}: {quoted(value)} is no CRC-32")


def _check_keys(where: str, what: str, values: Any, wanted: Iterable[str]) -> None:
    if not isinstance(values, dict) or values.keys() != {*wanted}:
        got = sorted(values) if isinstance(values, dict) else values
        raise StoreError(
            f"{where}: {what} must have the keys {sorted(wanted)}; got {quoted(got, 400)}: copy "
            "the shard again or remove it"
        )


def read_info(given: Any, where: str) -> StoreInfo:
    """The `StoreInfo` that a header has as its object `info`.

    Args:
        given: the object.
        where: what the error calls the header.

    Raises:
        StoreError: a key is missing or unknown, or a value is impossible.
    """
    text = repr(given)
    if text in _infos:  # most shards of a store have the same info
        return _infos[text]
    _check_keys(where, "info", given, [field.name for field in fields(StoreInfo)])
    names = [field.name for field in fields(SamplingSettings)]
    _check_keys(where, "info.sampling", given["sampling"], names)
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }
    values["sampling"] = SamplingSettings(**given["sampling"])
    info = StoreInfo(**values)
    info.check(where)
    if len(_infos) < _MOST_INFOS:
        _infos[text] = info
    return info


def _check_names(entries: Mapping[str, Entry], crc32: Mapping[str, int], where: str) -> None:
    """Refuse tensors that are missing or unknown, and tensors without a checksum."""
    wanted = {**_TYPES, **(_KEPT_TYPES if _KEPT_TYPES.keys() & entries.keys() else {})}
    for what, names in (("tensors", entries.keys()), ("checksums of", crc32.keys())):
        if names != wanted.keys():
            raise StoreError(
                f"{where}: {what} {quoted(sorted(names), 400)}; a shard has {sorted(wanted)}"
            )


def _check_shapes(entries: Mapping[str, Entry], info: StoreInfo, where: str) -> None:
    """Refuse tensors with types or shapes that do not fit each other.

    M rollouts with N tokens together have N - M rows, because the last token of each rollout has no
    row. So the shapes of `num_tokens`, `tokens` and the sums determine all other shapes, except how
    many pairs and kept ids there are.
    """
    for name in ("num_tokens", "tokens", *PAIRS, *(n for n in KEPT if n in entries)):
        if len(entries[name].shape) != 1:
            raise StoreError(f"{where}: {name} has {len(entries[name].shape)} dimensions, not 1")
    num_rollouts, num_tokens = entries["num_tokens"].shape[0], entries["tokens"].shape[0]
    if not num_rollouts or num_tokens < 2 * num_rollouts:
        raise StoreError(
            f"{where}: {num_rollouts} rollouts with {num_tokens} tokens: a shard has "
            "rollouts, and each has at least 2 tokens"
        )
    num_layers, num_rows = len(info.moe_layers), num_tokens - num_rollouts
    # `Shard.look` checks the number of parts later, when it knows the lengths of the rollouts
    parts = (entries[TOKEN_SUMS].shape or (0,))[0]
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(PER_ROLLOUT, (num_rollouts,)),
        **dict.fromkeys((*PER_TOKEN, "kept_sizes"), (num_tokens,)),
        "recorded": (num_rows,),
        "routes": (num_layers, num_rows, info.topk),
        **{ROUTE_SUMS: (parts, num_layers), TOKEN_SUMS: (parts, len(PER_TOKEN))},
        KEPT_SUMS: (parts, len(KEPT)),
        **{name: (entries[name].shape[0] // 2 * 2,) for name in PAIRS},
    }
    ids, types = DTYPE_NAMES[np.dtype(id_dtype(info.num_experts))], {**_TYPES, **_KEPT_TYPES}
    for name, entry in entries.items():
        wanted = ids if name == "routes" else types[name]
        shape = shapes.get(name, entry.shape)
        if entry.dtype != wanted or entry.shape != shape:
            why = ": pairs have an even length" if name in PAIRS else ""
            if name in ("routes", "recorded"):
                why = ": one row for every token of a rollout but its last"
            raise StoreError(
                f"{where}: {name} is {entry.dtype} {entry.shape}; {num_rollouts} rollouts with "
                f"{num_tokens} tokens and {info.num_experts} experts need {wanted} "
                f"{shape}{why}"
            )


def _is_whole(value: Any, most: int = 2**63 - 1) -> bool:
    """Whether this is a whole number from 0 to `most`; True and 3.0 are not."""
    return type(value) is int and 0 <= value <= most
