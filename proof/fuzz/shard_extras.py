"""Impossible values in the tensors that only some rollouts need, under checksums that are right.

The forgeries are those of `shard_bytes`, which has the other tensors.

Shape suffixes (docs/glossary.md): C, N.
"""

from __future__ import annotations

import math
import random

import numpy as np

from proof.fuzz.shard_parts import ShardFile

VOCABULARY = 64  # of the shards that are changed here


def _kept(shard: ShardFile, rng: random.Random) -> str:
    if "kept_ids" not in shard.tensors:
        return _without(shard)
    kind = rng.choice(("id", "twice", "size", "count", "logprob"))
    if kind == "id":
        value = rng.choice((-1, VOCABULARY, 2**31 - 1, -(2**31)))
        shard.tensors["kept_ids"][rng.randrange(len(shard.tensors["kept_ids"]))] = value
    elif kind == "twice":  # the sets of 2 ids or more: the second is the first again
        sizes_N = shard.tensors["kept_sizes"]
        token = int(rng.choice(np.flatnonzero(sizes_N > 1).tolist()))
        first = int(sizes_N[:token].sum())
        shard.tensors["kept_ids"][first + 1] = shard.tensors["kept_ids"][first]
    elif kind == "size":
        where = rng.randrange(len(shard.tensors["kept_sizes"]))
        shard.tensors["kept_sizes"][where] += rng.choice((1, -1, 99, -99, 2**30))
    elif kind == "count":
        shard.tensors["num_kept"][rng.randrange(4)] = rng.choice((0, -1, 1, 10**9, 2**62))
    else:
        shard.body["info"]["sampling"]["logprobs_of"] = rng.choice((None, "raw", "", 3))
    return kind


def _versions(shard: ShardFile, rng: random.Random) -> str:
    if "versions" not in shard.tensors:
        return _without(shard)
    spans_C2 = shard.tensors["versions"].reshape(-1, 2)
    span = rng.randrange(len(spans_C2))
    spans_C2[span] = rng.choice(((-1, 7), (0, 7), (2**40, 9), (spans_C2[span, 0], -1)))
    return f"{spans_C2[span].tolist()}"


def _advantage(shard: ShardFile, rng: random.Random) -> str:
    if "advantage" not in shard.tensors:
        return _without(shard)
    shard.tensors["advantage"][rng.randrange(4)] = rng.choice((math.inf, -math.inf))
    return "infinite"


def _without(shard: ShardFile) -> str:
    """A shard without any of these tensors: it gets one of them, alone and of a wrong shape."""
    shard.tensors["num_kept"] = np.zeros(3, np.int64)
    shard.body["crc32"]["num_kept"] = 0
    return "num_kept alone"


FORGERIES = {"kept sets": _kept, "version spans": _versions, "advantage": _advantage}
