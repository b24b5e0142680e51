"""Rollouts that the tests of the store write, and shards that are whole and say something wrong."""

import json
import os
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from megatron_r3.data.store import Rollout, RolloutStore, StoreInfo
from megatron_r3.replay.routes import Routes


def opened(directory):
    """A store, every byte of it checked."""
    store = RolloutStore([directory])
    store.verify()
    return store


INFO = StoreInfo(16, 4, (1, 2, 5), "vllm", "0.30.0", "tiny", ("aa" * 8, "bb" * 8, "cc" * 8))
OTHER = tuple(digit * 16 for digit in "def")  # router digests of another policy


def make_rollout(num_tokens, seed=0, experts=16, group=0, reward=1.0, sample=0):
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(experts)[:4] for _ in range(3 * (num_tokens - 1))]
    routes = Routes.from_array(np.array(rows).reshape(3, num_tokens - 1, 4), experts)
    response = np.arange(num_tokens) >= 2
    logprobs = np.where(response, -rng.random(num_tokens), 0).astype(np.float32)
    tokens = rng.integers(0, 50, num_tokens).astype(np.int32)
    return Rollout(tokens, response, logprobs, reward, group, 7, routes, sample)


ROLLOUTS = [
    make_rollout(n, seed=n, group=n % 2, reward=n / 10, sample=i)
    for i, n in enumerate((5, 9, 3, 12, 4))
]


PER_TOKEN = ("tokens", "response", "logprobs", "recorded")  # the order of their sums


def files_open(store):
    """The names of the shards' files of a store that this process has open, each once for each."""
    there = {str(shard.path.resolve()): shard.path.name for shard in store.shards}
    links = [Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd")]
    held = [os.readlink(link) for link in links if link.is_symlink()]
    return sorted(there[path] for path in held if path in there)


def block_sums(tensors):
    """The `block_crc32` of a shard's other tensors, uint32 `[M, L + 4]`, by docs/rollout-store.md.

    Written out by itself, so that a fault of the writer cannot hide in it.
    """
    sums, row, token = [], 0, 0
    for length in tensors["num_tokens"].reshape(-1).tolist():
        rows, tokens = slice(row, row + length - 1), slice(token, token + length)
        parts = [layer[rows] for layer in tensors["routes"]]
        parts += [tensors[name][rows if name == "recorded" else tokens] for name in PER_TOKEN]
        sums.append([zlib.crc32(part.tobytes()) for part in parts])
        row, token = row + length - 1, token + length
    return np.array(sums, np.uint32)


def part_sums(tensors):
    """The `part_crc32` of a shard's other tensors, uint32, by docs/rollout-store.md.

    Written out by itself, so that a fault of the writer cannot hide in it.
    """
    seed = zlib.crc32(tensors["block_crc32"].tobytes())
    sums, row, token = [], 0, 0
    for length in tensors["num_tokens"].reshape(-1).tolist():
        rows, tokens = slice(row, row + length - 1), slice(token, token + length)
        columns = [layer[rows] for layer in tensors["routes"]]
        columns += [tensors[name][rows if name == "recorded" else tokens] for name in PER_TOKEN]
        for column in columns:
            for start in range(0, length, 64):
                sums.append(zlib.crc32(column[start : start + 64].tobytes(), seed))
        row, token = row + length - 1, token + length
    return np.array(sums, np.uint32)


def metadata_of(info, tensors, number=0):
    """The header's texts for a shard of these tensors, `block_crc32` included."""
    whole = tensors.keys() - {"routes", *PER_TOKEN}
    body = {
        "format": "megatron-r3 rollouts",
        "version": 3,
        "number": number,
        "info": asdict(info),
        "crc32": {name: zlib.crc32(tensors[name].tobytes()) for name in whole},
        "must_know": [],
    }
    text = json.dumps(body)
    return {"megatron_r3": text, "crc32": str(zlib.crc32(text.encode()))}


def rewrite(path, info=INFO, **changes):
    """Give a shard other tensors, and checksums that fit them: only its meaning is wrong."""
    tensors = {**load_file(path), **changes}
    shapes_fit = tensors["num_tokens"].sum() == len(tensors["tokens"]) == len(tensors["logprobs"])
    if shapes_fit and "block_crc32" not in changes and tensors["num_tokens"].dtype == np.int64:
        tensors["block_crc32"] = block_sums(tensors)
        whole = tensors["num_tokens"].max() <= len(tensors["tokens"])
        if whole and "part_crc32" in tensors and changes.keys() != {"part_crc32"}:
            tensors["part_crc32"] = part_sums(tensors)
    save_file(tensors, path, metadata_of(info, tensors, int(path.name[6:11])))


def header_of(path):
    with safe_open(path, "numpy") as file:
        return json.loads(file.metadata()["megatron_r3"])


def rewrite_header(path, text):
    """Give a shard another header, JSON or its text, with a checksum that fits."""
    text = text if isinstance(text, str) else json.dumps(text)
    metadata = {"megatron_r3": text, "crc32": str(zlib.crc32(text.encode()))}
    save_file(load_file(path), path, metadata)


def rewrite_layout(path, change):
    """Change the JSON in which safetensors says where the tensors lie."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


# two groups of two rollouts, and one of one
GROUPED_ROLLOUTS = [
    replace(make_rollout(n, seed=n, group=i // 2, reward=float(i)), sample=i % 2)
    for i, n in enumerate((5, 9, 3, 12, 4))
]
