"""Writes a shard: its tensors piece by piece, then its header, then its name.

Routes may be gigabytes. So they are written from the rollouts' own arrays, layer by layer. The
writer of the safetensors library would need all of them joined in memory. The header has checksums
of all that was written. So it is written last, into a space that was kept free for it. A shard gets
its name when all its bytes are on disk. So readers see the whole shard or no shard, and no shard is
overwritten.

Shape suffixes (docs/glossary.md): C, K, L, M, N, T, U, V.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from zlib_ng import zlib_ng

from megatron_r3.data.kept import KeptSets
from megatron_r3.data.rollout import Rollout
from megatron_r3.data.store.files import shard_name, shards_in_order
from megatron_r3.data.store.header import (
    DTYPE_NAMES,
    KEPT_SUMS,
    ROUTE_SUMS,
    TOKEN_SUMS,
    check_logprobs_of,
    mask_of,
)
from megatron_r3.data.store.link import give_name
from megatron_r3.data.store.part_sums import kept_sums, part_sums, sums_of
from megatron_r3.data.store.schema import FORMAT, FORMAT_VERSION, StoreError, StoreInfo

_LARGEST_NUMBER = 10**9 - 1  # of a shard: nine digits, the most that its name can have
_LARGEST_CRC32 = 2**32 - 1
_COMPACT = (",", ":")  # JSON without spaces: every rank that opens a shard reads its header
_MOST_PIECES = os.sysconf("SC_IOV_MAX")  # in one call of writev; 1024 on Linux


def write_shard(directory: Path, info: StoreInfo, rollouts: Sequence[Rollout]) -> Path:
    """Append one shard to the store; readers see it whole or not at all.

    Returns:
        The new file, `shard-NNNNN.safetensors`.

    Raises:
        StoreError: `info` is impossible, or a rollout does not fit it; a rollout has impossible
            values; two of these rollouts have one name; the directory lacks a shard; or the shard
            cannot be written there.
    """
    info.check(str(directory))
    _check_rollouts(str(directory), info, rollouts)
    try:
        number = len(shards_in_order(directory))
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=".shard-", suffix=".tmp")
        try:
            with open(descriptor, "wb", buffering=0) as file:
                crc32: dict[str, int] = {}
                tensors = _tensors(rollouts, crc32)
                recorded = sum(int(r.routes.recorded_T.sum()) for r in rollouts)
                metadata = partial(_metadata, info, recorded)
                # the longest texts that the header can have, to keep space free for it
                longest = metadata(dict.fromkeys(tensors, _LARGEST_CRC32), _LARGEST_NUMBER)
                longest["crc32"] = str(_LARGEST_CRC32)
                written = write_tensors(file, tensors, longest, crc32)
                os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner may read
                return _link_next(directory, temporary, number, partial(metadata, crc32), written)
        finally:
            # NFS may lose the answer to unlink: the client asks again, and there is no such file.
            with suppress(FileNotFoundError):
                os.unlink(temporary)
    except OSError as error:
        raise StoreError(f"{directory}: no shard can be written ({error.strerror})") from error


def _check_rollouts(where: str, info: StoreInfo, rollouts: Sequence[Rollout]) -> None:
    if not rollouts:
        raise StoreError(f"{where}: a shard holds at least one rollout")
    check_logprobs_of(info, any(r.kept is not None for r in rollouts), where)
    expected = (len(info.moe_layers), info.topk, info.num_experts)
    names: dict[tuple[int, int, int], int] = {}
    for index, rollout in enumerate(rollouts):
        try:
            rollout.check(f"{where}: rollout {index}", info.vocab_size)
        except ValueError as error:
            raise StoreError(str(error)) from error
        got = (rollout.routes.num_layers, rollout.routes.topk, rollout.routes.num_experts)
        if got != expected:
            raise StoreError(
                f"{where}: rollout {index}: its routes have (layers, topk, experts) {got}; "
                f"the store has {expected}"
            )
        name = (rollout.policy_version, rollout.group, rollout.sample)
        if (other := names.setdefault(name, index)) != index:
            raise StoreError(
                f"{where}: rollout {index} is sample {name[2]} of group {name[1]}, policy version "
                f"{name[0]}: the same as rollout {other}; number the samples of a group"
            )


def _link_next(
    directory: Path,
    temporary: str,
    number: int,
    metadata: Callable[[int], dict[str, str]],
    written: Written,
) -> Path:
    """Give the file the next free shard number.

    The header has the number too. Example: two writers find three shards, and each writes a header
    with the number 3. The first writer that links gets the name of shard 3. The second writer then
    puts 4 into its header, and links again.
    """
    while True:
        written.write_header(metadata(number))
        os.fsync(written.file.fileno())  # the bytes are on disk before the name is
        path = directory / shard_name(number)
        if give_name(written.file, temporary, path):
            return path
        number += 1


def _metadata(
    info: StoreInfo, recorded_rows: int, crc32: Mapping[str, int], number: int
) -> dict[str, str]:
    """The two texts of the header: the shard's description, and the checksum of this text."""
    body = json.dumps(
        {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "number": number,
            "info": asdict(info),
            "recorded_rows": recorded_rows,
            "crc32": dict(crc32),
        },
        sort_keys=True,
        separators=_COMPACT,
    )
    return {"megatron_r3": body, "crc32": str(zlib.crc32(body.encode()))}


def _tensors(rollouts: Sequence[Rollout], crc32: Mapping[str, int]) -> dict[str, Streamed]:
    """A shard's tensors in the order in which they are written.

    The tables of part sums come last: each sum is XORed with a number that is computed from the
    checksums of all other tensors (`mask_of`).

    Args:
        crc32: by name, the CRC-32 of each tensor; the caller adds them while it writes.
    """
    routes = rollouts[0].routes
    kept = [r.kept or KeptSets.none(len(r.tokens_N)) for r in rollouts]
    tensors = _per_rollout(rollouts, kept)
    per_token: dict[str, np.ndarray] = {
        "tokens": np.concatenate([r.tokens_N for r in rollouts]).astype(np.int32),
        "response": np.concatenate([r.response_N for r in rollouts]).astype(np.uint8),
        "logprobs": np.concatenate([r.logprobs_N for r in rollouts]).astype(np.float32),
        "recorded": np.concatenate([r.routes.recorded_T for r in rollouts]).astype(np.uint8),
    }
    tokens_M = tensors["num_tokens"]
    sums = [sums_of(t[None], tokens_M, of_rows=n == "recorded") for n, t in per_token.items()]
    of_routes = [part_sums(r.routes.ids_LTK, len(r.tokens_N)) for r in rollouts]
    by_tensor = {TOKEN_SUMS: np.concatenate(sums), ROUTE_SUMS: np.concatenate(of_routes, 1)}
    if any(r.kept is not None for r in rollouts):
        whole = KeptSets.joined(kept)
        per_token |= {"kept_sizes": whole.sizes_N, "kept_ids": whole.ids_V}
        by_tensor[KEPT_SUMS] = np.concatenate([kept_sums(k) for k in kept], 1)
    tables = {name: np.ascontiguousarray(table.T) for name, table in by_tensor.items()}
    shape = (routes.num_layers, len(per_token["recorded"]), routes.topk)
    layers = ([r.routes.ids_LTK[layer] for r in rollouts] for layer in range(routes.num_layers))
    return {
        **{n: Streamed(t.dtype, t.shape, [[t]]) for n, t in (tensors | per_token).items()},
        "routes": Streamed(routes.ids_LTK.dtype, shape, layers),
        **{n: Streamed(t.dtype, t.shape, _masked(t, crc32)) for n, t in tables.items()},
    }


def _per_rollout(rollouts: Sequence[Rollout], kept: Sequence[KeptSets]) -> dict[str, np.ndarray]:
    """The tensors that have a number or pairs for each rollout (turns and version spans)."""
    no_spans_C2 = np.zeros((0, 2), np.int64)
    spans = [no_spans_C2 if r.versions_C2 is None else r.versions_C2 for r in rollouts]
    given = [np.nan if r.advantage is None else r.advantage for r in rollouts]
    return {
        "turns": np.concatenate([r.spans_U2 for r in rollouts]).reshape(-1),
        "versions": np.concatenate(spans).reshape(-1),
        "num_tokens": np.array([len(r.tokens_N) for r in rollouts], np.int64),
        "num_turns": np.array([len(r.spans_U2) for r in rollouts], np.int64),
        "num_versions": np.array([len(versions_C2) for versions_C2 in spans], np.int64),
        "num_kept": np.array([len(k.ids_V) for k in kept], np.int64),
        "reward": np.array([r.reward for r in rollouts], np.float32),
        "advantage": np.array(given, np.float32),
        "group": np.array([r.group for r in rollouts], np.int64),
        "sample": np.array([r.sample for r in rollouts], np.int64),
        "policy_version": np.array([r.policy_version for r in rollouts], np.int64),
        "prompt_digest": np.array([r.prompt_digest for r in rollouts], np.int64),
    }


def _masked(sums: np.ndarray, crc32: Mapping[str, int]) -> Iterator[list[np.ndarray]]:
    """A table of part sums, XORed with the mask; `crc32` must have all other tensors by then."""
    yield [sums ^ np.uint32(mask_of(crc32))]


@dataclass(frozen=True)
class Streamed:
    """A tensor that is written in pieces.

    Attributes:
        parts: lists of contiguous arrays, in the order of their bytes. The arrays of one list are
            written together. The next list is taken only when the lists before it are written.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    parts: Iterable[list[np.ndarray]]


@dataclass(frozen=True)
class Written:
    """A safetensors file in which all tensors are written, and the header can still change.

    Attributes:
        entries: the type, shape and place of each tensor, as the header has them.
        header_bytes: how many bytes were kept free for the header.
    """

    file: BinaryIO
    entries: Mapping[str, Any]
    header_bytes: int

    def write_header(self, metadata: Mapping[str, str]) -> None:
        """Write the header, over an earlier header if there is one."""
        text = _header(metadata, self.entries)
        assert len(text) <= self.header_bytes, "the header has longer texts than were announced"
        # the format allows spaces behind the JSON
        whole = self.header_bytes.to_bytes(8, "little") + text.ljust(self.header_bytes)
        self.file.seek(0)
        _write_all(self.file, [np.frombuffer(whole, np.uint8)])


def write_tensors(
    file: BinaryIO,
    tensors: Mapping[str, Streamed],
    longest: Mapping[str, str],
    crc32: dict[str, int],
) -> Written:
    """Write all tensors; `Written.write_header` then completes the file.

    A safetensors file (https://github.com/huggingface/safetensors) is the length of the header in
    8 bytes, the header as JSON, and the tensors' bytes without a gap. Tensors are written in the
    order of `tensors`, but lie in the file with the widest type first, so that each is aligned.

    Args:
        file: unbuffered, empty, open for writing.
        longest: the texts of the header, each as long as it can become.
        crc32: gets the CRC-32 of each tensor that is written, by name.

    Raises:
        OSError: the file cannot be written.
    """
    entries: dict[str, Any] = {}
    data_bytes = 0
    for name in sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize):
        dtype, shape = tensors[name].dtype, tensors[name].shape
        begin, data_bytes = data_bytes, data_bytes + math.prod(shape) * dtype.itemsize
        places = [begin, data_bytes]
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": places}
    header_bytes = -(-len(_header(longest, entries)) // 8) * 8  # a multiple of 8, for alignment
    data = 8 + header_bytes  # where the tensors' bytes begin
    os.posix_fallocate(file.fileno(), 0, data + data_bytes)  # a full disk is an error here, early
    for name, tensor in tensors.items():
        begin, end = entries[name]["data_offsets"]
        file.seek(data + begin)
        total = 0
        for arrays in tensor.parts:
            for array in arrays:
                total = zlib_ng.crc32(array.data, total)
            _write_all(file, arrays)
        assert file.tell() == data + end, f"{name} has other bytes than its shape says"
        crc32[name] = total
    return Written(file, entries, header_bytes)


def _header(metadata: Mapping[str, str], entries: Mapping[str, Any]) -> bytes:
    whole = {"__metadata__": dict(metadata), **entries}
    return json.dumps(whole, separators=_COMPACT).encode()


def _write_all(file: BinaryIO, arrays: list[np.ndarray]) -> None:
    """Write arrays one after the other, many of them with one system call."""
    pieces = [array.data for array in arrays]
    for start in range(0, len(pieces), _MOST_PIECES):
        batch = pieces[start : start + _MOST_PIECES]
        missing = sum(piece.nbytes for piece in batch) - os.writev(file.fileno(), batch)
        if missing:
            # The system takes at most 2 GiB at once, or the disk is full. Go on with the rest; on a
            # full disk the next write raises.
            rest = memoryview(b"".join(batch))[-missing:]
            while len(rest):
                rest = rest[file.write(rest) :]
