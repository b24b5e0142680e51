"""Write shards: atomic, checksummed, never over another one.

Shape suffixes: L MoE layers, R rows of all rollouts of a shard, K top-k, M rollouts.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from zlib_ng import zlib_ng

from megatron_r3.rollout import Rollout, RolloutError
from megatron_r3.store.files import shard_name, shards_in_order
from megatron_r3.store.header import BLOCKS
from megatron_r3.store.schema import FORMAT, FORMAT_VERSION, StoreError, StoreInfo

_MOST_NUMBER = 10**9 - 1  # of a shard


def write_shard(directory: Path, info: StoreInfo, rollouts: Sequence[Rollout]) -> Path:
    """Append one shard to the store; readers see it whole or not at all.

    Returns:
        The new file, `shard-NNNNN.safetensors`.

    Raises:
        StoreError: a rollout whose shapes do not belong together or do not fit `info`, or one with
            values that no rollout has; two rollouts of one name; a directory that lost a shard.
    """
    info.check(str(directory))
    if not rollouts:
        raise StoreError(f"{directory}: a shard holds at least one rollout")
    names: dict[tuple[int, int, int], int] = {}
    for index, rollout in enumerate(rollouts):
        where = f"{directory}: rollout {index}"
        _check(rollout, info, where)
        name = (rollout.policy_version, rollout.group, rollout.sample)
        if (other := names.setdefault(name, index)) != index:
            raise StoreError(
                f"{where} is sample {name[2]} of group {name[1]}, policy version {name[0]}: so is "
                f"rollout {other}; number the samples of a group"
            )
    try:
        return _publish(directory, info, _tensors(rollouts))
    except OSError as error:
        raise StoreError(f"{directory}: no shard can be written ({error.strerror})") from error


def _publish(directory: Path, info: StoreInfo, tensors: Mapping[str, Streamed]) -> Path:
    number = len(shards_in_order(directory))
    directory.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=".shard-", suffix=".tmp")
    try:
        with open(descriptor, "wb", buffering=0) as file:
            longest = _metadata(info, dict.fromkeys(tensors, 2**32 - 1), _MOST_NUMBER)
            longest["crc32"] = str(2**32 - 1)
            written = write_tensors(file, tensors, longest)
            os.chmod(temporary, 0o644)
            return _link_next(directory, temporary, number, info, written)
    finally:
        os.unlink(temporary)


def _check(rollout: Rollout, info: StoreInfo, where: str) -> None:
    try:
        rollout.check(where, info.vocab_size)
    except RolloutError as error:
        raise StoreError(str(error)) from error
    routes = rollout.routes
    got = (routes.num_layers, routes.topk, routes.num_experts)
    expected = (len(info.moe_layers), info.topk, info.num_experts)
    if got != expected:
        raise StoreError(
            f"{where}: routes of (layers, topk, experts) {got} in a store of {expected}"
        )


def _link_next(
    directory: Path, temporary: str, number: int, info: StoreInfo, written: Written
) -> Path:
    """Give the file the next free shard number: link refuses to overwrite, unlike rename.

    The header says the number too. Example: two writers find three shards, and each writes a header
    for number 3. One of them links; the other then writes number 4 over its 3 and links again.
    """
    while True:
        written.write_header(_metadata(info, written.crc32, number))
        os.fsync(written.file.fileno())
        path = directory / shard_name(number)
        try:
            os.link(temporary, path)
        except FileExistsError:
            number += 1
            continue
        folder = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return path


def _tensors(rollouts: Sequence[Rollout]) -> dict[str, Streamed]:
    """The tensors in the order in which they are written: the sums of blocks are known last."""
    per_token: dict[str, np.ndarray] = {
        "tokens": np.concatenate([r.tokens_N for r in rollouts]).astype(np.int32),
        "response": np.concatenate([r.response_N for r in rollouts]).astype(np.uint8),
        "logprobs": np.concatenate([r.logprobs_N for r in rollouts]).astype(np.float32),
        "recorded": np.concatenate([r.routes.recorded_T for r in rollouts]).astype(np.uint8),
    }
    small: dict[str, np.ndarray] = {
        "turns": np.concatenate([r.spans_U2 for r in rollouts]).reshape(-1),
        "num_tokens": np.array([len(r.tokens_N) for r in rollouts], np.int64),
        "num_turns": np.array([len(r.spans_U2) for r in rollouts], np.int64),
        "reward": np.array([r.reward for r in rollouts], np.float32),
        "group": np.array([r.group for r in rollouts], np.int64),
        "sample": np.array([r.sample for r in rollouts], np.int64),
        "policy_version": np.array([r.policy_version for r in rollouts], np.int64),
        "prompt_digest": np.array([r.prompt_digest for r in rollouts], np.int64),
    }
    first = rollouts[0].routes
    num_rows, num_layers = len(per_token["recorded"]), first.num_layers
    blocks = np.zeros((len(rollouts), num_layers + len(BLOCKS)), np.uint32)
    for column, name in enumerate(BLOCKS, num_layers):
        ends = np.cumsum(small["num_tokens"] - (name == "recorded"))
        blocks[:, column] = _sums(per_token[name], ends)
    routes = Streamed(
        first.ids_LTK.dtype,
        (num_layers, num_rows, first.topk),
        _layers(rollouts, blocks),
        summed=False,
    )
    whole = {n: Streamed(t.dtype, t.shape, [[t]]) for n, t in small.items()}
    sliced = {n: Streamed(t.dtype, t.shape, [[t]], summed=False) for n, t in per_token.items()}
    last = Streamed(blocks.dtype, blocks.shape, [[blocks]])
    return {**whole, **sliced, "routes": routes, "block_crc32": last}


def _layers(rollouts: Sequence[Rollout], blocks: np.ndarray) -> Iterator[list[np.ndarray]]:
    """The routes of all rollouts, a layer at a time, from where they lie; fills in their sums."""
    for layer in range(rollouts[0].routes.num_layers):
        pieces = [rollout.routes.ids_LTK[layer] for rollout in rollouts]
        blocks[:, layer] = [zlib_ng.crc32(piece.data) for piece in pieces]
        yield pieces


def _sums(tensor: np.ndarray, ends: np.ndarray) -> list[int]:
    """CRC-32 of the slices that end at `ends`, one behind the other."""
    return [checksum(tensor[begin:end]) for begin, end in pairwise([0, *ends.tolist()])]


def checksum(tensor: np.ndarray) -> int:
    """CRC-32 of a tensor's bytes in C order."""
    return int(zlib_ng.crc32(np.ascontiguousarray(tensor).data))


def block_sums(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """The `block_crc32` of a shard's other tensors, uint32 `[M, L + 4]`."""
    num_tokens = tensors["num_tokens"].astype(object)  # Python's numbers: these do not wrap
    layers = [_sums(layer, np.cumsum(num_tokens - 1)) for layer in tensors["routes"]]
    others = [_sums(tensors[n], np.cumsum(num_tokens - (n == "recorded"))) for n in BLOCKS]
    return np.array([*layers, *others], np.uint32).T.copy()


def metadata_of(
    info: StoreInfo, tensors: Mapping[str, np.ndarray], number: int = 0
) -> dict[str, str]:
    """The header of a shard of these tensors, `block_crc32` included."""
    whole = tensors.keys() - {"routes", *BLOCKS}
    return _metadata(info, {name: checksum(tensors[name]) for name in whole}, number)


def _metadata(info: StoreInfo, crc32: Mapping[str, int], number: int) -> dict[str, str]:
    """The store's info, a checksum of each tensor, the shard's number; and their checksum."""
    body = json.dumps(
        {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "number": number,
            "info": asdict(info),
            "crc32": dict(crc32),
            "must_know": [],
        },
        sort_keys=True,
    )
    return {"megatron_r3": body, "crc32": str(zlib.crc32(body.encode()))}


# A safetensors file written as its bytes come; its header, with their checksums, comes last.
#
# The library's writer wants every tensor whole in memory, and copies it once more; routes are
# gigabytes. Format: https://github.com/huggingface/safetensors (length, JSON header, data).

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
