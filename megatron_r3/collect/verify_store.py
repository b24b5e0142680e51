"""Check a store: its bytes, and the model that sampled it.

Shape suffixes (docs/glossary.md): M.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from megatron_r3.collect.prompt_plan import Model, read_model
from megatron_r3.data.store import RolloutStore, StoreError
from megatron_r3.data.store.kinship import Versions
from megatron_r3.data.store.shard import Shard
from megatron_r3.data.store.verify_shard import ReadChecks, verify_shard
from megatron_r3.replay.words import one_line
from megatron_r3.train.publish_options import published, version_name

Policies = Callable[[Shard], Model | None]  # the model that sampled a shard; None if not known


def read_policies(path: Path, **shape: Any) -> Policies:
    """Read what stores are compared with: one model, or the published policies of a run.

    For a transformers directory, the returned function gives its model for every shard. For a
    folder of published policies, the function gives the model of the shard's policy version. It
    gives None if the version has no folder, or if the shard has several versions, because the
    shard's header does not say to which version its stamp belongs.

    Args:
        shape: what a config does not say, as in `ModelShape.from_hf_config`.

    Raises:
        ValueError: naming the file that cannot be used. The returned function reads a published
            policy when it first needs the policy, and raises ValueError then.
    """
    if not published(path):
        model = read_model(path, **shape)
        return lambda shard: model

    @cache
    def of_version(version: int) -> Model | None:
        folder = path / version_name(version)
        return read_model(folder, **shape) if folder.is_dir() else None

    def of_shard(shard: Shard) -> Model | None:
        oldest = int(shard.tensors["policy_version"].min())
        return of_version(oldest) if oldest == int(shard.newest_version_M.max()) else None

    return of_shard


def verify_store(directory: Path, policies: Policies | None = None) -> tuple[str, list[str]]:
    """Read all of a store; with policies, compare MoE layers, weights and vocabulary too.

    Returns:
        What was checked, as text; and warnings of what could not be checked.

    Raises:
        ValueError: naming the file, and the wrong rollout, layer or token.
    """
    store, versions = RolloutStore([directory], mixed_policies=True), Versions()
    for shard in store.shards:
        versions.check(shard)
    models = [None if policies is None else policies(shard) for shard in store.shards]
    pairs = list(zip(store.shards, models, strict=True))
    for shard, model in pairs:
        if model is not None:
            _refuse_other_model(shard, model)
    for shard, model in pairs:
        vocab_size = None if model is None else model.vocab_size
        verify_shard(shard, ReadChecks(vocab_size or 0))
    text = f"{len(store)} rollouts in {len(store.shards)} shards, every byte and id"
    return (text, []) if policies is None else _said(text, pairs)


def _said(text: str, pairs: list[tuple[Shard, Model | None]]) -> tuple[str, list[str]]:
    """The text and what was compared with the policies, with warnings of what was not compared."""
    compared = [(shard.info, model) for shard, model in pairs if model is not None]
    without = [shard.path.name for shard, model in pairs if model is None]
    warnings = []
    if compared:
        routers = all(i.router_fingerprint and m.router_fingerprint for i, m in compared)
        whole = all(i.policy_stamp and m.policy_stamp for i, m in compared)
        parts = "shape" + (
            " and weights" if whole and routers else " and router weights" if routers else ""
        )
        names = {model.name for _, model in compared}
        of_one = f", {one_line(min(names))}'s {parts}"
        text += of_one if len(names) == 1 else f", the {parts} of {len(names)} policies"
        if not routers:
            warnings.append(
                "router weights not compared: the store or the model has no fingerprint of them"
            )
    if without:
        warnings.append(
            f"{len(without)} of {len(pairs)} shards not compared, the first is {without[0]}: their "
            "policy version has no folder, or they have several versions"
        )
    return text, warnings


def _refuse_other_model(shard: Shard, model: Model) -> None:
    info, shape = shard.info, model.shape
    for name, stored, wanted in (
        ("MoE layers", list(info.moe_layers), list(shape.moe_layers)),
        ("top-k", info.topk, shape.topk),
        ("experts", info.num_experts, shape.num_experts),
    ):
        if stored != wanted:
            raise StoreError(
                f"{shard.path}: sampled by a model with {name} {stored}, and {model.name} has "
                f"{wanted}: give --model the model that sampled"
            )
    if info.router_fingerprint and model.router_fingerprint:
        pairs = zip(info.router_fingerprint, model.router_fingerprint, strict=True)
        others = [shape.moe_layers[i] for i, (a, b) in enumerate(pairs) if a != b]
        if others:
            raise StoreError(
                f"{shard.path}: sampled by other router weights than {model.name}'s in "
                f"{len(others)} of {len(shape.moe_layers)} MoE layers, the first is hidden layer "
                f"{others[0]}: give --model the weights that sampled"
            )
    if info.policy_stamp and model.policy_stamp and info.policy_stamp != model.policy_stamp:
        raise StoreError(
            f"{shard.path}: sampled by other weights than {model.name}'s, but by the same routers: "
            f"the shard's stamp is {info.policy_stamp}, the model's is "
            f"{model.policy_stamp}: give --model the weights that sampled"
        )
