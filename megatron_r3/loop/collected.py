"""What the store of a run has: how many collections, and the measured numbers of each.

Shape suffixes (docs/glossary.md): E, L, M, N, U.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.data.store import RolloutStore
from megatron_r3.data.store.expert_load import expert_load
from megatron_r3.data.store.files import SHARD_GLOB
from megatron_r3.data.untrusted import read_json
from megatron_r3.loop.config import Config


class Collected:
    """Counts the stored collections of a run; reads the store only when a shard was added."""

    def __init__(self, config: Config) -> None:
        self._rollouts, self._size = config.directory.rollouts, config.rollouts_per_collection
        self._num_shards, self._whole = 0, 0

    def count(self) -> int:
        """How many collections are stored completely."""
        num_shards = len([*self._rollouts.glob(SHARD_GLOB)])
        if num_shards != self._num_shards:
            store = RolloutStore([self._rollouts], mixed_policies=True)
            self._num_shards, self._whole = num_shards, len(store) // self._size
        return self._whole


def measured(config: Config, collection: int, ends: set[int]) -> dict[str, Any]:
    """The fields of a collection's event `collected`, measured on the collection's rollouts.

    Args:
        ends: the tokens that end a response.
    """
    store = RolloutStore([config.directory.rollouts], mixed_policies=True)
    size = config.rollouts_per_collection
    indices = range(collection * size, (collection + 1) * size)
    rollouts = [store.rollout(i) for i in indices]
    reward_M = store.column("reward")[indices.start : indices.stop]
    lengths = [int(one.response_N.sum()) for one in rollouts]
    # A response of the longest length is not cut if its last token is one that ends a response.
    cut = [
        end - first >= config.sampler.max_tokens and int(one.tokens_N[end - 1]) not in ends
        for one in rollouts
        for first, end in one.spans_U2.tolist()
    ]
    return {
        "version": rollouts[0].policy_version,
        "rollouts": size,
        "tokens": sum(lengths),
        "reward": float(reward_M.mean()),
        "reward_std": float(reward_M.std()),
        "response_length": float(np.mean(lengths)),
        "length_cut": float(np.mean(cut)),
        "turns": len(cut) / size,
        "expert_load": _loads(store, indices),
    }


def told(config: Config) -> list[str]:
    """A line for each collection that has an event `collected`, in the order of collections."""
    last: dict[int, str] = {}
    for event in config.directory.read_events("collector", "collected"):
        number = int(event["collection"])
        # no `seconds` if the collector was killed before it wrote the event, and restarted
        took = f" in {event['seconds']:.1f} s" if "seconds" in event else ""
        last[number] = (
            f"collection {number}: policy {event['version']}, reward {event['reward']:.4f}, "
            f"{event['rollouts']} rollouts{took}"
        )
    return [last[number] for number in sorted(last)]


def end_tokens(model: Path) -> set[int]:
    """The tokens that end a response; empty if neither config file of the model names any."""
    for name in ("generation_config.json", "config.json"):
        file = model / name
        fields = read_json(file.read_bytes(), str(file)) if file.is_file() else {}
        ids = fields.get("eos_token_id") if isinstance(fields, dict) else None
        if ids is not None:
            return {int(one) for one in (ids if isinstance(ids, list) else [ids])}
    return set()


def _loads(store: RolloutStore, rollouts: Sequence[int]) -> list[float]:
    """For each MoE layer the tokens of the busiest expert, divided by the mean over experts.

    A mean below 1 counts as 1.
    """
    info = store.info
    counts_LE = np.zeros((len(info.moe_layers), info.num_experts), np.int64)
    for index in rollouts:
        counts_LE += expert_load(store, index)
    return (counts_LE.max(1) / np.maximum(counts_LE.mean(1), 1)).tolist()
