"""The truth test: transformers runs some rollouts of a store, and its routes are compared.

Shape suffixes (docs/glossary.md): K, L, M, N, T, V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.data.engines.shape import EngineError
from megatron_r3.data.fingerprint import policy_stamp
from megatron_r3.data.kept import KeptSets
from megatron_r3.data.store import Rollout, RolloutStore, SamplingSettings, StoreInfo
from megatron_r3.data.truth import Compared, Report
from megatron_r3.data.values import wrong_token


@dataclass(frozen=True)
class Agreement:
    """How near some rollouts of a store are to what transformers computes with the same model.

    Attributes:
        compared: the rollouts, with the routes that transformers computes.
        version: the newest policy version among the rollouts. All numbers are about this version.
            Rollouts of older versions, sampled by other weights, help to name an alarm's cause.
        means: the means over sampled tokens of `k3_kl`, `extreme` and `abs_dlogp`
            (megatron_r3.train.losses.agreement).
        note: a sentence for the user if the store has several stamps and none is the model's, or
            if policies that are newer than the model are not compared; otherwise empty.
    """

    compared: list[Compared]
    version: int
    means: dict[str, float]
    note: str = ""

    def numbers(self, report: Report) -> dict[str, Any]:
        """The `agreement` of `rollouts inspect --json`; `routes` has for each MoE layer the share
        of recorded rows in which transformers chooses the same experts.
        """
        own = [c.rollout for c in self.compared if c.rollout.policy_version == self.version]
        tables = report.tables if len(own) == len(self.compared) else report.newest
        return {
            "policy_version": self.version,
            "rollouts": len(own),
            "tokens": sum(int(rollout.response_N.sum()) for rollout in own),
            "rows": int(tables.all_rows.rows),
            "routes": [1 - share.share for share in tables.layers.values()],
            **self.means,
        }


def compare_store(
    store: RolloutStore, model: Path, num_rollouts: int, before: Path | None = None
) -> Agreement:
    """Run some rollouts, spread over the store, through transformers, and compare the routes.

    An engine that computes a model wrongly still returns routes that look right: distinct ids in
    range. Only another implementation, run with the same weights, shows that the routes are wrong.

    Args:
        num_rollouts: how many rollouts are run at most.
        before: the model before the last update of its weights; None to compare with `model` only.

    Raises:
        EngineError: transformers cannot read the model; or the model has other MoE layers than the
            store, or too small a vocabulary for the store's tokens.
        ValueError: the store has several stamps, and the model's stamp cannot be computed.
    """
    version, note = _version_of(store, model)
    rollouts = {store.name(i): store.rollout(i) for i in _chosen(store, num_rollouts, version)}
    where = str(store.directories[0])
    return replace(compare_rollouts(rollouts, store.info, model, before, where), note=note)


def compare_rollouts(
    rollouts: dict[str, Rollout],
    info: StoreInfo,
    model: Path,
    before: Path | None = None,
    where: str = "the rollouts",
) -> Agreement:
    """Run rollouts through transformers, and compare the routes (`compare_store`).

    Args:
        rollouts: the rollouts by name, as messages name them.
        info: the header that the rollouts' shard has, or will have.
        where: what messages call the place of all rollouts, for example the store's directory.

    Raises:
        EngineError: for the reasons of `compare_store`.
    """
    runs = _runs(model, rollouts, info, where)
    older = {} if before is None else _runs(before, rollouts, info, where)
    sums, tokens, compared = dict.fromkeys(("k3_kl", "extreme", "abs_dlogp"), 0.0), 0, []
    version = max(rollout.policy_version for rollout in rollouts.values())
    for name, rollout in rollouts.items():
        ids_LTK, logprobs_T = runs[name]
        ids_before = older[name][0] if older else None
        compared.append(Compared(rollout, ids_LTK, name, ids_before))
        if rollout.policy_version != version:
            continue
        added = _agreement_sums(rollout, logprobs_T)
        sums = {name: total + added[name] for name, total in sums.items()}
        tokens += int(rollout.response_N.sum())
    means = {name: total / max(tokens, 1) for name, total in sums.items()}
    return Agreement(compared, version, means)


def _runs(
    model: Path, rollouts: dict[str, Rollout], info: StoreInfo, where: str
) -> dict[str, tuple[np.ndarray, Any]]:
    """The live routes `[L, T, K]` and log-probs `[T]` of each rollout, by the rollout's name."""
    import torch

    from megatron_r3.collect.generate import load_model
    from megatron_r3.data.engines.transformers import capture_routes

    network = load_model(model, kind=None)
    vocab_size = network.get_input_embeddings().num_embeddings
    runs = {}
    with capture_routes(network) as captured, torch.no_grad():
        if captured.moe_layers != info.moe_layers:
            raise EngineError(
                f"{model} has the MoE layers {list(captured.moe_layers)}, and {where} has routes "
                f"of {list(info.moe_layers)}: give the model that sampled"
            )
        for name, rollout in rollouts.items():
            wrong = wrong_token(rollout.tokens_N, vocab_size)
            if wrong is not None:
                raise EngineError(f"{model}: {name}: token {wrong[0]} {wrong[1]}")
            if rollout.kept is not None and (out := wrong_token(rollout.kept.ids_V, vocab_size)):
                raise EngineError(f"{model}: {name}: a token of a kept set {out[1]}")
            logprobs_T = _logprobs(network, rollout, info.sampling)
            runs[name] = captured.take()[0].cpu().numpy(), logprobs_T
    return runs


def _version_of(store: RolloutStore, model: Path) -> tuple[int, str]:
    """The policy version that the model is compared with, and a note on that for the user.

    The version is the newest one among the shards with the model's stamp. It is the store's newest
    one if no shard has that stamp, or all shards have the same stamp.
    """
    newest = int(store.column("policy_version").max())
    of_stamp: dict[str, int] = {}
    for shard in store.shards:
        version = int(shard.tensors["policy_version"].max())
        of_stamp[shard.info.policy_stamp] = max(version, of_stamp.get(shard.info.policy_stamp, 0))
    if len(of_stamp) == 1:
        return newest, ""
    version = of_stamp.get(policy_stamp(model), -1)
    if version < 0:
        return newest, f"no shard has the stamp of {model}, which is compared with version {newest}"
    after = f"{model} sampled policy version {version}: later versions are not compared"
    return version, after if version < newest else ""


def _chosen(store: RolloutStore, num_rollouts: int, version: int) -> list[int]:
    """The indices of up to `num_rollouts` rollouts, spread over the store.

    Up to half of the rollouts are of versions before `version`; all others are of `version`, which
    should have the model's weights.
    """
    version_M = store.column("policy_version")
    newest, others = np.flatnonzero(version_M == version), np.flatnonzero(version_M < version)
    of_others = min(num_rollouts // 2, len(others))
    spread = [
        members[np.linspace(0, len(members) - 1, number).astype(int)]
        for members, number in ((newest, num_rollouts - of_others), (others, of_others))
        if number
    ]
    return np.unique(np.concatenate(spread)).tolist()


def _logprobs(network: Any, rollout: Rollout, sampling: SamplingSettings) -> Any:
    """Run a rollout; return the log-prob of the token that each row predicts, float32 `[T]`.

    The log-probs are of the processed distribution (temperature, kept sets) if those of the store
    are; otherwise they are of the raw logits.
    """
    import torch

    ids_N = torch.from_numpy(rollout.tokens_N.astype(np.int64))
    # A token's logits predict the next token: row 0 predicts token 1.
    logits = network(ids_N[None, :-1], use_cache=False).logits[0].float()
    if sampling.logprobs_of == "processed":
        logits = logits / (1.0 if sampling.temperature is None else sampling.temperature)
        if rollout.kept is not None:
            logits = logits.masked_fill(_cut_off(rollout.kept, logits.shape), float("-inf"))
    return logits.log_softmax(-1).gather(-1, ids_N[1:, None])[:, 0]


def _agreement_sums(rollout: Rollout, logprobs_T: Any) -> dict[str, float]:
    """The sums of `agreement_sums` over the sampled tokens of a rollout."""
    import torch

    from megatron_r3.train.losses.agreement import agreement_sums

    stored = torch.from_numpy(rollout.logprobs_N[1:].copy())
    mask = torch.from_numpy(rollout.response_N[1:].astype(np.float32))
    return {name: float(v) for name, v in agreement_sums(logprobs_T, stored, mask).items()}


def _cut_off(kept: KeptSets, shape: Sequence[int]) -> Any:
    """Which logits the sampler cut off, bool `[N - 1, vocabulary]`; none where no set is kept."""
    import torch

    sizes = kept.sizes_N[1:]  # row 0 predicts token 1
    cut = torch.from_numpy(np.repeat(sizes > 0, shape[1]).reshape(*shape))
    cut[np.repeat(np.arange(len(sizes)), sizes), kept.ids_V.astype(np.int64)] = False
    return cut
