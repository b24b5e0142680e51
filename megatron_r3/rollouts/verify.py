"""Check a store: its bytes, and the model that sampled it."""

from __future__ import annotations

from pathlib import Path

from megatron_r3.rollouts.plan import Model
from megatron_r3.store import RolloutStore, StoreError
from megatron_r3.store.kinship import Versions
from megatron_r3.store.shard import Shard
from megatron_r3.store.verify import check_tokens


def verify_store(directory: Path, model: Model | None = None) -> RolloutStore:
    """Read all of a store; with a model, compare MoE layers, weights and vocabulary too.

    Returns:
        The store, which is whole.

    Raises:
        ValueError: naming the file, and the rollout, layer and token if one of them is wrong.
    """
    store, versions = RolloutStore([directory], mixed_policies=True), Versions()
    for shard in store.shards:
        versions.check(shard)
    if model is not None:
        for shard in store.shards:
            _refuse_other_model(shard, model)
    store.verify()
    if model is not None and model.vocab_size is not None:
        for shard in store.shards:
            check_tokens(shard, model.vocab_size)
    return store


def _refuse_other_model(shard: Shard, model: Model) -> None:
    info, shape = shard.info, model.shape
    for name, stored, wanted in (
        ("MoE layers", list(info.moe_layers), list(shape.moe_layers)),
        ("top-k", info.topk, shape.topk),
        ("experts", info.num_experts, shape.num_experts),
    ):
        if stored != wanted:
            raise StoreError(f"{shard.path}: {name} {stored}; {model.name} has {wanted}")
    if info.router_fingerprint and model.router_fingerprint:
        pairs = zip(info.router_fingerprint, model.router_fingerprint, strict=True)
        others = [shape.moe_layers[i] for i, (a, b) in enumerate(pairs) if a != b]
        if others:
            raise StoreError(
                f"{shard.path}: sampled by other router weights than {model.name}'s in "
                f"{len(others)} of {len(shape.moe_layers)} MoE layers, the first is hidden layer "
                f"{others[0]}"
            )
    if info.policy_stamp and model.policy_stamp and info.policy_stamp != model.policy_stamp:
        raise StoreError(
            f"{shard.path}: sampled by other weights than {model.name}'s, whose routers are "
            f"the same: stamp {info.policy_stamp} there, {model.policy_stamp} here"
        )
