"""Check a store: its bytes, the model that sampled it, and its routes against transformers.

Shape suffixes (docs/glossary.md): K, L, N, T, V.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.engines.shape import EngineError
from megatron_r3.kept import KeptSets
from megatron_r3.rollouts.plan import Model
from megatron_r3.store import Rollout, RolloutStore, SamplingSettings, StoreError
from megatron_r3.store.shard import Shard
from megatron_r3.untrusted import one_line
from megatron_r3.values import wrong_token

# A bfloat16 engine and transformers share 80 % of the routes of any layer, or more.
ALARMING_SHARE = 0.5


def verify_store(directory: Path, model: Model | None = None) -> RolloutStore:
    """Read all of a store; with a model, compare MoE layers, weights and vocabulary too.

    Returns:
        The store, which is whole.

    Raises:
        ValueError: naming the file, and the rollout, layer and token if one of them is wrong.
    """
    store = RolloutStore([directory], mixed_policies=True)
    if model is not None:
        for shard in store.shards:
            _refuse_other_model(shard, model)
    store.verify()
    if model is not None and model.vocab_size is not None:
        for shard in store.shards:
            shard.check_tokens(model.vocab_size)
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


def measure_agreement(directory: Path, model: Path, num_rollouts: int) -> dict[str, Any]:
    """Run some rollouts, spread over the store, through transformers with live routing.

    An engine that computes a model wrongly still returns routes that look right: distinct ids in
    range. Only another implementation of the same weights shows that they are wrong.

    Returns:
        `rollouts`, `tokens`: how many were compared. `routes`: for each MoE layer the share of
        recorded rows with the same set of experts. `k3_kl`, `extreme`, `abs_dlogp`: means over the
        sampled tokens (megatron_r3.training.losses.agreement).

    Raises:
        EngineError: transformers cannot read the model, or the model has other MoE layers than the
            store, or a smaller vocabulary.
    """
    import torch

    from megatron_r3.engines.transformers import capture_routes

    store = RolloutStore([directory], mixed_policies=True)
    chosen = np.unique(np.linspace(0, len(store) - 1, num_rollouts).astype(int))
    network = _load(model)
    vocab_size = network.get_input_embeddings().num_embeddings
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
            wrong = wrong_token(rollout.tokens_N, vocab_size)
            if wrong is not None:
                raise EngineError(f"{model}: {store.name(index)}: token {wrong[0]} {wrong[1]}")
            if rollout.kept is not None and (out := wrong_token(rollout.kept.ids_V, vocab_size)):
                raise EngineError(f"{model}: {store.name(index)}: a kept set: {out[1]}")
            added = _log_prob_sums(network, rollout, store.info.sampling)
            sums = {name: value + added[name] for name, value in sums.items()}
            # Sorted, because the order of the experts in a row carries no meaning.
            live_LTK = np.sort(captured.take()[0].cpu().numpy(), -1)
            stored_LTK = np.sort(rollout.routes.ids_LTK, -1)
            recorded_T = rollout.routes.recorded_T
            same_L += (live_LTK == stored_LTK).all(-1)[:, recorded_T].sum(-1)
            rows += int(recorded_T.sum())
            tokens += int(rollout.response_N.sum())
    return {
        "rollouts": len(chosen),
        "tokens": tokens,
        "routes": (same_L / max(rows, 1)).tolist(),
        **{name: value / max(tokens, 1) for name, value in sums.items()},
    }


def _log_prob_sums(network: Any, rollout: Rollout, sampling: SamplingSettings) -> dict[str, float]:
    """Run a rollout; the sums of `agreement_sums` over its sampled tokens.

    If the stored log-probs are those of the distribution that was sampled, so are these.
    """
    import torch

    from megatron_r3.training.losses.agreement import agreement_sums

    ids_N = torch.from_numpy(rollout.tokens_N.astype(np.int64))
    # The logits of a token are about the next one: row 0 predicts token 1.
    logits = network(ids_N[None, :-1], use_cache=False).logits[0].float()
    if sampling.logprobs_of == "processed":
        logits = logits / (1.0 if sampling.temperature is None else sampling.temperature)
        if rollout.kept is not None:
            logits = logits.masked_fill(_cut_off(rollout.kept, logits.shape), float("-inf"))
    logprobs = logits.log_softmax(-1).gather(-1, ids_N[1:, None])[:, 0]
    stored = torch.from_numpy(rollout.logprobs_N[1:].copy())
    mask = torch.from_numpy(rollout.response_N[1:].astype(np.float32))
    return {name: float(value) for name, value in agreement_sums(logprobs, stored, mask).items()}


def _cut_off(kept: KeptSets, shape: Sequence[int]) -> Any:
    """Which logits `[N - 1, vocabulary]` the sampler had cut off, bool."""
    import torch

    sizes = kept.sizes_N[1:]  # row 0 predicts token 1
    cut = torch.from_numpy(np.repeat(sizes > 0, shape[1]).reshape(*shape))
    cut[np.repeat(np.arange(len(sizes)), sizes), kept.ids_V.astype(np.int64)] = False
    return cut


def _load(model: Path) -> Any:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise EngineError(
            f"inspect --model takes transformers: pip install 'transformers>=5' ({error})"
        ) from error
    try:
        return AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    except Exception as error:  # a wrong config or wrong weights raise errors of any kind
        reason = one_line(f"{type(error).__name__}: {error}", 300)
        raise EngineError(f"{model}: transformers cannot load it: {reason}") from error


def agreement_warnings(directory: Path, measured: dict[str, Any], layers: list[int]) -> list[str]:
    """The layers to look at before training on these rollouts; empty if all of them agree.

    Args:
        measured: by `measure_agreement`.
        layers: the hidden layers that the shares in `measured` are about.
    """
    return [
        f"{directory}: in layer {layer} only {share:.1%} of the recorded routes are those that "
        "transformers chooses with the same weights: another model, or an engine that is wrong"
        for layer, share in zip(layers, measured["routes"], strict=True)
        if share < ALARMING_SHARE
    ]
