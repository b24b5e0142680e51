"""Check a store: every byte and id, that no rollout is there twice, and that it is a model's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.engines.shape import EngineError, ModelShape
from megatron_r3.fingerprint import policy_stamp, router_fingerprint
from megatron_r3.store import RolloutStore, StoreError
from megatron_r3.store.shard import Shard
from megatron_r3.untrusted import one_line
from megatron_r3.values import wrong_token


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


# How far a store's sampler agrees with transformers on the same tokens and weights.
#
# An engine that computes a model wrongly still returns routes that look right: distinct ids in
# range. Only another implementation tells.
#
# Shape suffixes: N tokens of a rollout, T rows, L MoE layers, K top-k.

ALARMING = 0.5  # a bfloat16 engine and transformers share 80 % of the routes of any layer, and more


def measure_agreement(directory: Path, model: Path, num_rollouts: int) -> dict[str, Any]:
    """Run some rollouts, spread over the store, through transformers with live routing.

    Returns:
        `rollouts`, `tokens`; `routes`: for each MoE layer the share of recorded rows with the same
        set of experts; `k3_kl`, `extreme`, `abs_dlogp` of the sampled tokens
        (megatron_r3.training.losses).

    Raises:
        EngineError: transformers cannot read the model, or it has other MoE layers than the store,
            or a smaller vocabulary.
    """
    import torch

    from megatron_r3.engines.transformers import capture_routes
    from megatron_r3.training.losses import agreement_sums

    store = RolloutStore([directory], mixed_policies=True)
    chosen = np.unique(np.linspace(0, len(store) - 1, num_rollouts).astype(int))
    network = _load(model)
    same_L, rows, tokens = np.zeros(len(store.info.moe_layers)), 0, 0
    sums = {"k3_kl": 0.0, "extreme": 0.0, "abs_dlogp": 0.0}
    with capture_routes(network) as captured, torch.no_grad():
        if captured.moe_layers != store.info.moe_layers:
            raise EngineError(
                f"{model}: MoE layers {list(captured.moe_layers)}; {directory} has routes of "
                f"{list(store.info.moe_layers)}"
            )
        for index in chosen.tolist():
            rollout = store.rollout(index)
            wrong = wrong_token(rollout.tokens_N, network.get_input_embeddings().num_embeddings)
            if wrong is not None:
                raise EngineError(f"{model}: {store.name(index)}: token {wrong[0]} {wrong[1]}")
            ids_N = torch.from_numpy(rollout.tokens_N.astype(np.int64))
            logits = network(ids_N[None, :-1], use_cache=False).logits[0].float()
            live_LTK = np.sort(captured.take()[0].cpu().numpy(), -1)
            stored_LTK = np.sort(rollout.routes.ids_LTK, -1)
            recorded_T = rollout.routes.recorded_T
            same_L += (live_LTK == stored_LTK).all(-1)[:, recorded_T].sum(-1)
            rows += int(recorded_T.sum())
            logprobs = logits.log_softmax(-1).gather(-1, ids_N[1:, None])[:, 0]
            mask = torch.from_numpy(rollout.response_N[1:].astype(np.float32))
            found = agreement_sums(logprobs, torch.from_numpy(rollout.logprobs_N[1:].copy()), mask)
            sums = {name: sums[name] + float(found[name]) for name in sums}
            tokens += int(mask.sum())
    return {
        "rollouts": len(chosen),
        "tokens": tokens,
        "routes": (same_L / max(rows, 1)).tolist(),
        **{name: value / max(tokens, 1) for name, value in sums.items()},
    }


def _load(model: Path) -> Any:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise EngineError(f"--agreement needs transformers: {error}") from error
    try:
        return AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    except Exception as error:  # of a config or weights that are wrong: of any kind
        said = one_line(f"{type(error).__name__}: {error}", 300)
        raise EngineError(f"{model}: transformers cannot load it: {said}") from error


def warnings_of(directory: Path, measured: dict[str, Any], layers: list[int]) -> list[str]:
    """What to look at before training on these rollouts; empty where they agree."""
    return [
        f"{directory}: in layer {layer} only {share:.1%} of the recorded routes are those that "
        "transformers chooses with the same weights: another model, or an engine that is wrong"
        for layer, share in zip(layers, measured["routes"], strict=True)
        if share < ALARMING
    ]


# The model that an engine runs, as its transformers directory tells.


@dataclass(frozen=True)
class Model:
    """What a store needs to know of a model.

    Attributes:
        name: the folder's.
        shape: its MoE layers.
        router_fingerprint: of its router weights; empty without weights.
        vocab_size: None where the config does not say.
        policy_stamp: of all its weights; empty without weights.
    """

    name: str
    shape: ModelShape
    router_fingerprint: tuple[str, ...]
    vocab_size: int | None
    policy_stamp: str = ""


def read_model(path: Path) -> Model:
    """Read a transformers directory, or a config.json alone, which has no weights.

    Raises:
        EngineError: naming the file.
    """
    folder = (path if path.is_dir() else path.parent).resolve()
    shape = ModelShape.from_hf_config(path)
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        return Model(folder.name, shape, (), shape.vocab_size)
    try:
        routers = router_fingerprint(path, shape.moe_layers)
        return Model(folder.name, shape, routers, shape.vocab_size, policy_stamp(path))
    except ValueError as error:
        raise EngineError(
            f"{error}; --model {path / 'config.json'} goes without a router fingerprint"
        ) from error
