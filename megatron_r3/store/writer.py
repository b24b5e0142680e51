"""Write shards: atomic, checksummed, never over another one.

Shape suffixes: L MoE layers, R rows of all rollouts of a shard, K top-k, M rollouts.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
from zlib_ng import zlib_ng

from megatron_r3.store.header import BLOCKS
from megatron_r3.store.names import SHARD_GLOB, shard_name, shards_in_order
from megatron_r3.store.schema import FORMAT, FORMAT_VERSION, Rollout, StoreError, StoreInfo
from megatron_r3.store.stream import Streamed, Written, write_tensors

__all__ = ["SHARD_GLOB", "block_sums", "checksum", "metadata_of", "write_shard"]

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
    rollout.check(where, info.vocab_size)
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
