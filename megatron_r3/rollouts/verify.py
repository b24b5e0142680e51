"""Check a store: every byte and id, that no rollout is there twice, and that it is a model's."""

from __future__ import annotations

from pathlib import Path

from megatron_r3.rollouts.model import Model
from megatron_r3.store import RolloutStore, StoreError
from megatron_r3.store.shard import Shard

__all__ = ["verify_store"]


def verify_store(directory: Path, model: Model | None = None) -> RolloutStore:
    """Read all of a store; with a model, compare its MoE layers and its weights too.

    Returns:
        The store, which is whole.

    Raises:
        ValueError: naming the file, and the rollout, layer and token where there is one.
    """
    store = RolloutStore([directory], mixed_policies=True)
    if model is not None:
        _check_model(store, model)
    store.verify()
    if model is not None and model.vocab_size is not None:
        for shard in store.shards:
            shard.check_tokens(model.vocab_size)
    return store


def _check_model(store: RolloutStore, model: Model) -> None:
    shape = model.shape
    for shard in store.shards:
        info = shard.info
        for name, got, wanted in (
            ("MoE layers", list(info.moe_layers), list(shape.moe_layers)),
            ("top-k", info.topk, shape.topk),
            ("experts", info.num_experts, shape.num_experts),
        ):
            if got != wanted:
                raise StoreError(f"{shard.path}: {name} {got}; {model.name} has {wanted}")
        _refuse_other_routers(shard, model)
        if info.policy_stamp and model.policy_stamp and info.policy_stamp != model.policy_stamp:
            raise StoreError(
                f"{shard.path}: sampled by other weights than {model.name}'s, whose routers are "
                f"the same: stamp {info.policy_stamp} there, {model.policy_stamp} here"
            )


def _refuse_other_routers(shard: Shard, model: Model) -> None:
    info, shape = shard.info, model.shape
    if info.router_fingerprint and model.router_fingerprint:
        pairs = zip(info.router_fingerprint, model.router_fingerprint, strict=True)
        other = [shape.moe_layers[i] for i, (a, b) in enumerate(pairs) if a != b]
        if other:
            raise StoreError(
                f"{shard.path}: sampled by other router weights than {model.name}'s in "
                f"{len(other)} of {len(shape.moe_layers)} MoE layers, the first is hidden layer "
                f"{other[0]}"
            )
