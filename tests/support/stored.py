"""Rollouts that the tests of the store write, and shards that are whole and say something wrong."""

import json
import os
import struct
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


def sum_of(data):
    """The sum of a part, by docs/rollout-store.md, in Python's own numbers."""
    data, total, state = data + bytes(-len(data) % 4), 0, 0
    for (word,) in struct.iter_unpack("<I", data):
        number = state = (state + 0x9E3779B97F4A7C15) % 2**64
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
        total += word * (number ^ number >> 31)
    return total % 2**64 >> 32


def part_sums(tensors):
    """The tables of sums of a shard's other tensors, by docs/rollout-store.md, not yet combined
    with the number of the shard.

    Written out by itself, so that a fault of the writer cannot hide in it.
    """
    tables = {"route_sums": [], "token_sums": [], "kept_sums": []}
    row, token, kept = 0, 0, 0
    for rollout, length in enumerate(tensors["num_tokens"].reshape(-1).tolist()):
        for start in range(0, length, 64):
            end = min(start + 64, length)
            tokens = slice(token + start, token + end)
            rows = slice(row + start, row + min(end, length - 1))
            of_tokens = [tensors[n][rows if n == "recorded" else tokens] for n in PER_TOKEN]
            tables["route_sums"].append([layer[rows] for layer in tensors["routes"]])
            tables["token_sums"].append(of_tokens)
            if "kept_ids" in tensors:
                sizes = tensors["kept_sizes"][token : token + length]
                offsets = np.cumsum([0, *sizes.tolist()])
                mine = tensors["kept_ids"][kept : kept + max(int(tensors["num_kept"][rollout]), 0)]
                ids = mine[offsets[start] : offsets[min(end, len(sizes))]]
                tables["kept_sums"].append([sizes[start:end], ids])
        row, token = row + length - 1, token + length
        kept += int(tensors["num_kept"][rollout])
    return {
        name: np.array([[sum_of(one.tobytes()) for one in of_part] for of_part in table], np.uint32)
        for name, table in tables.items()
        if table
    }


def header_of(path):
    with safe_open(path, "numpy") as file:
        return json.loads(file.metadata()["megatron_r3"])


def rewrite(path, info=None, **changes):
    """Give a shard other tensors or another info, and checksums that fit them.

    Only its meaning is wrong then. A tensor that is None is left out.
    """
    body, tensors = header_of(path), {**load_file(path), **changes}
    tensors = {name: np.ascontiguousarray(t) for name, t in tensors.items() if t is not None}
    lengths = tensors["num_tokens"]
    if lengths.dtype == np.int64 and lengths.min() > 0 and lengths.max() <= len(tensors["tokens"]):
        tables = {n: t for n, t in part_sums(tensors).items() if n not in changes}
        others = [n for n in sorted(tensors) if n not in ("route_sums", "token_sums", "kept_sums")]
        sums = np.array([zlib.crc32(tensors[name].tobytes()) for name in others], "<u4")
        tensors |= {n: t ^ np.uint32(zlib.crc32(sums.tobytes())) for n, t in tables.items()}
    body["crc32"] = {name: zlib.crc32(tensor.tobytes()) for name, tensor in tensors.items()}
    if "recorded" in tensors:
        body["recorded_rows"] = int((tensors["recorded"] == 1).sum())
    if info is not None:
        body["info"] = asdict(info)
    save_file(tensors, path, {"megatron_r3": "", "crc32": ""})
    rewrite_header(path, body)


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
