"""Check a store: its bytes, and the model that sampled it.

Shape suffixes (docs/glossary.md): M.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

Policies = Model | Callable[[int], Model | None]  # one model, or the model of each policy version


@dataclass(frozen=True)
class Checked:
    """What `rollouts verify` prints: what was checked, and warnings of what could not be."""

    text: str
    warnings: list[str]


def read_policies(path: Path, **shape: Any) -> Policies:
    """Read what stores are compared with: one model, or the published policies of a run.

    For a transformers directory this is its model. For a folder of published policies it is a
    function that takes a policy version, and returns the model of that version, or None if the
    version has no folder. A model is read when the function is first called with its version.

    Args:
        shape: what a config does not say, as in `ModelShape.from_hf_config`.

    Raises:
        ValueError: naming the file that cannot be used.
    """
    if not published(path):
        return read_model(path, **shape)

    @cache
    def of_version(version: int) -> Model | None:
        folder = path / version_name(version)
        return read_model(folder, **shape) if folder.is_dir() else None

    return of_version


def verify_store(directory: Path, policies: Policies | None = None) -> Checked:
    """Read all of a store; with policies, compare MoE layers, weights and vocabulary too.

    Raises:
        ValueError: naming the file, and the wrong rollout, layer or token.
    """
    store, versions = RolloutStore([directory], mixed_policies=True), Versions()
    for shard in store.shards:
        versions.check(shard)
    pairs = [
        (shard, None if policies is None else _model_of(shard, policies)) for shard in store.shards
    ]
    for shard, model in pairs:
        if model is not None:
            _refuse_other_model(shard, model)
    for shard, model in pairs:
        vocab_size = None if model is None else model.vocab_size
        verify_shard(shard, ReadChecks(vocab_size or 0))
    text = f"{len(store)} rollouts in {len(store.shards)} shards, every byte and id"
    if policies is None:
        return Checked(text, [])
    return _said(text, pairs)


def _model_of(shard: Shard, policies: Policies) -> Model | None:
    """The model that sampled a shard; None if the shard's version has no folder, or if the shard
    has several versions, because its header does not say to which of these its stamp belongs.
    """
    if isinstance(policies, Model):
        return policies
    oldest = int(shard.tensors["policy_version"].min())
    return policies(oldest) if oldest == int(shard.newest_version_M.max()) else None


def _said(text: str, pairs: list[tuple[Shard, Model | None]]) -> Checked:
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
    return Checked(text, warnings)


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
            f"{shard.path}: sampled by other weights than {model.name}'s, whose routers are "
            f"the same: the shard's stamp is {info.policy_stamp}, the model's is "
            f"{model.policy_stamp}: give --model the weights that sampled"
        )
