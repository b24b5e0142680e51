"""The header of a shard: what the shard says of itself, and where each of its tensors lies.

Somebody else may have written the file, so nothing in it is believed before it is checked: every
number is a whole number within a range, the tensors fill the file without overlap or hole, and the
shapes of the tensors fit each other. Afterwards a tensor's bytes can be read by their place, and
reading takes no more memory than the file is long.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from megatron_r3.data.digest import short_digest
from megatron_r3.data.lazy import lazy
from megatron_r3.data.store.files import HeldFile, shard_name, shard_number
from megatron_r3.data.store.layout import DTYPES, MOST_HEADER_BYTES, Entry, read_layout
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

# The tensors of a shard and their types (docs/rollout-store.md).
PER_ROLLOUT = {
    **dict.fromkeys(("group", "num_tokens", "num_turns", "policy_version", "sample"), "I64"),
    "reward": "F32",
}
# `block_crc32` has a sum of each rollout's rows in every layer of `routes`, then of its slice of
# each of these, in this order.
PER_TOKEN = {"tokens": "I32", "response": "U8", "logprobs": "F32", "recorded": "U8"}
_TENSORS = {**PER_ROLLOUT, **PER_TOKEN, "turns": "I32", "routes": ""}  # "": see `id_dtype`
_SINCE_3 = {"prompt_digest": "I64", "block_crc32": "U32"}
# Tensors that a shard has where one of its rollouts needs them, in sets that come together. They
# are named in `must_know`, so a megatron-r3 that does not know them refuses the shard.
OPTIONAL = {
    "kept_ids": {"num_kept": "I64", "kept_sizes": "I32", "kept_ids": "I32", "kept_crc32": "U32"},
    "versions": {"num_versions": "I64", "versions": "I64"},
    "advantage": {"advantage": "F32"},
}
# How many rows take each expert, which routes say too. So it is not in `must_know`: a shard may
# lack it, and a megatron-r3 that does not know it leaves it out.
EXPERT_LOAD = "expert_load"
_LOAD_DTYPES = ("U16", "U32")
# The sums of each `PART_TOKENS` tokens of a rollout (`part_sums.py`). A reader of some rows
# compares theirs alone. It may be missing like the load.
PART_CRC32 = "part_crc32"
PART_TOKENS = 64
_OPTIONAL_TENSORS = {n: dtype for tensors in OPTIONAL.values() for n, dtype in tensors.items()}

_VERSIONS = (2, FORMAT_VERSION)
_infos: dict[str, StoreInfo] = {}  # those that were checked, by what the headers say
_MOST_INFOS = 1000  # policies of a long training


def num_parts(num_tokens: Any) -> Any:
    """How many parts of 64 tokens rollouts of these numbers of tokens have. Example: 65 has 2."""
    return -(-num_tokens // PART_TOKENS)


@dataclass(frozen=True)
class Header:
    """A shard's header, read and checked.

    Attributes:
        version: of the format.
        entries: where each tensor lies.
        crc32: of each tensor's bytes; from version 3 on without `routes` and PER_TOKEN, whose sums
            are in the tensor `block_crc32`.
        must_know: the names that a reader has to know.
        recorded_rows: how many rows have routes; None in a shard of an earlier megatron-r3.
        identity: 16 hex digits of the SHA-256 of the header's text. The text holds the checksums of
            all tensors, so two shards of one identity have the same content.
    """

    version: int
    info: StoreInfo
    entries: Mapping[str, Entry]
    crc32: Mapping[str, int]
    must_know: frozenset[str]
    recorded_rows: int | None
    identity: str

    @lazy
    def tensors(self) -> dict[str, str]:
        """The names and types of the tensors that this shard must have."""
        if self.version < FORMAT_VERSION:
            return _TENSORS
        tensors, present = {**_TENSORS, **_SINCE_3}, self.entries.keys() | self.must_know
        for together in OPTIONAL.values():
            if together.keys() & present:
                tensors |= together
        return tensors


def read_header(file: HeldFile) -> Header:
    """Read and check the header of a shard.

    Raises:
        StoreError: beginning with the file's path.
    """
    where = str(file.path)
    try:
        metadata, entries = read_layout(file)
        body, text = _read_body(metadata, where)
        version = _read_version(body, where)
        info_values = _dict(body, "info", where)
        must_know: frozenset[str] = frozenset()
        recorded_rows = None
        if version >= FORMAT_VERSION:
            _check_number(file.path, body)
            must_know = _read_must_know(body, where)
            recorded_rows = _read_recorded_rows(body, where)
        info = read_info(info_values, where)
        crc32 = _dict(body, "crc32", where)
        for name, value in crc32.items():
            if not _is_whole(value, 2**32 - 1):
                raise StoreError(f"{where}: crc32 of {quoted(name)}: {quoted(value)} is no CRC-32")
    except StoreError:
        raise
    except ValueError as error:  # from read_json: the text is not JSON; begins with the path
        raise StoreError(f"{error}; copy the shard again or remove it") from error
    identity = short_digest(text)
    header = Header(version, info, entries, crc32, must_know, recorded_rows, identity)
    _check_names(header, where)
    _check_shapes(header, where)
    check_logprobs_of(info, "kept_ids" in header.tensors, where)
    return header


def check_logprobs_of(info: StoreInfo, has_kept_sets: bool, where: str) -> None:
    """Refuse kept sets beside log-probs that are not known to be normalised over them."""
    if has_kept_sets and info.sampling.logprobs_of != "processed":
        raise StoreError(
            f"{where}: has kept sets, and sampling.logprobs_of is "
            f"{quoted(info.sampling.logprobs_of)}: it must be 'processed', because the trainer "
            "normalises over the kept sets"
        )


def _read_body(metadata: dict[str, Any], where: str) -> tuple[dict[str, Any], bytes]:
    """What the shard says of itself: as a JSON object, and as the text in the header."""
    text = metadata.get("megatron_r3")
    if not isinstance(text, str) or not text:
        raise StoreError(f"{where}: a safetensors file, but not a rollout shard")
    data = text.encode(errors="surrogatepass")
    if str(zlib.crc32(data)) != metadata.get("crc32"):
        raise StoreError(f"{where}: the header is damaged; copy the shard again or remove it")
    body = read_json(data, f"{where}: the header", MOST_HEADER_BYTES)
    if not isinstance(body, dict):
        raise StoreError(f"{where}: the header is no JSON object")
    return body, data


def _read_version(body: dict[str, Any], where: str) -> int:
    version = body.get("version")
    # JSON's true and 3.0 equal whole numbers in Python, but no writer writes a version so
    if body.get("format") != FORMAT or type(version) is not int or version not in _VERSIONS:
        raise StoreError(
            f"{where}: {quoted(body.get('format'))} version {quoted(version)}; this megatron-r3 "
            f"reads {FORMAT!r} versions {' and '.join(map(str, _VERSIONS))}"
        )
    return version


def _check_number(path: Path, body: dict[str, Any]) -> None:
    number = body.get("number")
    if not _is_whole(number):
        raise StoreError(f"{path}: number {quoted(number)} is not the number of a shard")
    if number != shard_number(path):
        raise StoreError(
            f"{path}: says that it is shard {number}; was it renamed or copied? Give it back "
            f"the name {shard_name(number)}, or remove the copy"  # type: ignore[arg-type]
        )


def _read_must_know(body: dict[str, Any], where: str) -> frozenset[str]:
    """What `must_know` names; a shard that names what this reader does not know is refused."""
    names = body.get("must_know")
    if not isinstance(names, list):
        raise StoreError(f"{where}: must_know {quoted(names)} is no list of names")
    for name in names:
        if not isinstance(name, str) or name not in _known_names():
            raise StoreError(
                f"{where}: needs {quoted(name)}, which this megatron-r3 does not know: "
                "update megatron-r3"
            )
    return frozenset(names)


def _read_recorded_rows(body: dict[str, Any], where: str) -> int | None:
    count = body.get("recorded_rows")
    if count is not None and not _is_whole(count):
        raise StoreError(f"{where}: recorded_rows {quoted(count)} is no number of rows")
    return count


def read_info(given: dict[str, Any], where: str) -> StoreInfo:
    """What a header says of its store; keys that are not known are left out.

    Args:
        given: the object `info` of the header.
        where: for the error.

    Raises:
        StoreError: a key is missing, or a value cannot be.
    """
    text = repr(given)
    if text in _infos:  # the shards of a store say the same
        return _infos[text]
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if name in _field_names(StoreInfo)
    }
    if "sampling" in values:
        sampling, known = _dict(given, "sampling", where), _field_names(SamplingSettings)
        values["sampling"] = SamplingSettings(**{k: v for k, v in sampling.items() if k in known})
    for name in ("num_experts", "topk", "moe_layers", "engine", "engine_version"):
        if name not in values:
            raise StoreError(f"{where}: info has no {name}; copy the shard again or remove it")
    info = StoreInfo(**values)
    info.check(where)
    if len(_infos) < _MOST_INFOS:
        _infos[text] = info
    return info


def _check_names(header: Header, where: str) -> None:
    """Refuse tensors that are missing, and tensors without a checksum."""
    needed, present = header.tensors.keys(), header.entries.keys()
    if needed - present or (header.version < FORMAT_VERSION and present - needed):
        raise StoreError(
            f"{where}: tensors {quoted(sorted(present), 400)}; a shard of version "
            f"{header.version} has {sorted(needed)}"
        )
    in_blocks = {"routes", *PER_TOKEN} if header.version >= FORMAT_VERSION else set()
    for name in sorted(present - in_blocks - header.crc32.keys()):
        raise StoreError(f"{where}: crc32 has no checksum of {quoted(name)}")


def _check_shapes(header: Header, where: str) -> None:
    """Refuse tensors whose types or shapes do not fit each other.

    M rollouts with N tokens in all have N - M rows, because the last token of each rollout has no
    row. So the shapes of `num_tokens`, `tokens` and `turns` determine those of all tensors.
    """
    entries, info = header.entries, header.info
    # tensors of any length, by how many numbers belong together
    ragged = {"turns": 2, "kept_ids": 1, "versions": 2}
    ragged = {name: width for name, width in ragged.items() if name in header.tensors}
    for name in ("num_tokens", "tokens", *ragged):
        if len(entries[name].shape) != 1:
            raise StoreError(f"{where}: {name} has {len(entries[name].shape)} dimensions, not 1")
    num_rollouts, num_tokens = entries["num_tokens"].shape[0], entries["tokens"].shape[0]
    if not num_rollouts or num_tokens < 2 * num_rollouts:
        raise StoreError(
            f"{where}: {num_rollouts} rollouts with {num_tokens} tokens: a shard has "
            "rollouts, and each has at least 2 tokens"
        )
    num_layers, num_rows = len(info.moe_layers), num_tokens - num_rollouts
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys((*PER_ROLLOUT, "prompt_digest"), (num_rollouts,)),
        **dict.fromkeys(PER_TOKEN, (num_tokens,)),
        "recorded": (num_rows,),
        "routes": (num_layers, num_rows, info.topk),
        "block_crc32": (num_rollouts, num_layers + len(PER_TOKEN)),
        **dict.fromkeys(("num_kept", "num_versions", "advantage"), (num_rollouts,)),
        "kept_sizes": (num_tokens,),
        "kept_crc32": (num_rollouts, 2),
        # an odd length does not fit pairs
        **{n: (entries[n].shape[0] // width * width,) for n, width in ragged.items()},
    }
    ids = next(name for name, dtype in DTYPES.items() if dtype == id_dtype(info.num_experts))
    for name, dtype in header.tensors.items():
        entry = entries[name]
        if (entry.dtype, entry.shape) != (dtype or ids, shapes[name]):
            one_row = ": one row for every token of a rollout but its last"
            raise StoreError(
                f"{where}: {name} is {entry.dtype} {entry.shape}; {num_rollouts} rollouts "
                f"with {num_tokens} tokens and {info.num_experts} experts need "
                f"{dtype or ids} {shapes[name]}{one_row if name in ('routes', 'recorded') else ''}"
            )
    _check_parts(header, where)
    load, load_shape = entries.get(EXPERT_LOAD), (num_rollouts, num_layers, info.num_experts)
    if load is not None and (load.dtype not in _LOAD_DTYPES or load.shape != load_shape):
        raise StoreError(
            f"{where}: {EXPERT_LOAD} is {load.dtype} {load.shape}; {num_rollouts} rollouts with "
            f"{num_layers} MoE layers and {info.num_experts} experts need "
            f"{' or '.join(_LOAD_DTYPES)} {load_shape}"
        )


def _check_parts(header: Header, where: str) -> None:
    """Refuse sums of parts of a wrong type. How many there must be is known with the lengths."""
    entry = header.entries.get(PART_CRC32)
    if entry is not None and (entry.dtype != "U32" or len(entry.shape) != 1):
        raise StoreError(f"{where}: {PART_CRC32} is {entry.dtype} {entry.shape}, not U32 [sums]")


@cache
def _field_names(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind))


@cache
def _known_names() -> frozenset[str]:
    """What `must_know` may name."""
    known = {"format", "version", "number", "info", "crc32", "must_know", "recorded_rows"}
    known |= {*_TENSORS, *_SINCE_3, *_OPTIONAL_TENSORS, EXPERT_LOAD, PART_CRC32}
    return frozenset(known) | _field_names(StoreInfo) | _field_names(SamplingSettings)


def _dict(values: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    value = values.get(name)
    if not isinstance(value, dict):
        raise StoreError(f"{where}: {name} is no JSON object; got {quoted(value)}")
    return value


def _is_whole(value: Any, most: int = 2**63 - 1) -> bool:
    """Whether this is a whole number from 0 to `most`; True and 3.0 are not."""
    return type(value) is int and 0 <= value <= most
