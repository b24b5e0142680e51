"""How far a store's sampler agrees with transformers on the same tokens and weights.

An engine that computes a model wrongly still returns routes that look right: distinct ids in
range. Only another implementation tells.

Shape suffixes: N tokens of a rollout, T rows, L MoE layers, K top-k.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.engines.shape import EngineError
from megatron_r3.store import RolloutStore
from megatron_r3.untrusted import one_line
from megatron_r3.values import wrong_token

__all__ = ["ALARMING", "measure_agreement", "warnings_of"]

ALARMING = 0.5  # a bfloat16 engine and transformers share 80 % of the routes of any layer, and more


def measure_agreement(directory: Path, model: Path, num_rollouts: int) -> dict[str, Any]:
    """Run some rollouts, spread over the store, through transformers with live routing.

    Returns:
        `rollouts`, `tokens`; `routes`: for each MoE layer the share of recorded rows with the same
        set of experts; `k3_kl`, `extreme`, `abs_dlogp` of the sampled tokens (megatron_r3.rl).

    Raises:
        EngineError: transformers cannot read the model, or it has other MoE layers than the store,
            or a smaller vocabulary.
    """
    import torch

    from megatron_r3.engines.transformers import capture_routes
    from megatron_r3.rl import agreement_sums

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
