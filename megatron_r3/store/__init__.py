"""Rollouts on disk: a directory of safetensors shards (docs/rollout-store.md)."""

from megatron_r3.kept import KeptSets
from megatron_r3.rollout import Rollout
from megatron_r3.store.follow import open_stores
from megatron_r3.store.reader import RolloutStore
from megatron_r3.store.schema import SamplingSettings, StoreError, StoreInfo
from megatron_r3.store.writer import write_shard

__all__ = [
    "KeptSets",
    "Rollout",
    "RolloutStore",
    "SamplingSettings",
    "StoreError",
    "StoreInfo",
    "open_stores",
    "write_shard",
]
