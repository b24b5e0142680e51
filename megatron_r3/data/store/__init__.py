"""Rollouts on disk: a directory of safetensors shards (docs/rollout-store.md)."""

from megatron_r3.data.kept import KeptSets
from megatron_r3.data.rollout import Rollout
from megatron_r3.data.store.follow import open_stores
from megatron_r3.data.store.reader import RolloutStore
from megatron_r3.data.store.schema import SamplingSettings, StoreError, StoreInfo
from megatron_r3.data.store.writer import write_shard

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
