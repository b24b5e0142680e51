"""What the policy update of one step did: sums over tokens and rollouts, reduced over all ranks.

The formulas are in docs/metrics.md. The sums stay on the device until the step is logged, so
nothing waits for the device before.

Shape suffixes (docs/glossary.md): B, M, S.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_r3.train.losses.loss import Update
from megatron_r3.train.losses.policy_loss import Clip, clipped_sums
from megatron_r3.train.losses.terms import bounded_log_ratio
from megatron_r3.train.schedule import SOURCES

Sums = dict[str, Tensor]

# For each value its two sums: the first is divided by the second. `tokens` counts response tokens.
_MEANS = {
    "loss": ("loss sum", "loss count"),
    "reward mean": ("reward", "rollouts"),
    "groups with one reward": ("uniform", "rollouts"),
    "response length": ("length", "rollouts"),
    "entropy": ("entropy", "measured tokens"),
    "reference kl": ("reference_kl", "tokens with a reference"),
    "clip fraction low": ("clip_low", "clippable"),
    "clip fraction high": ("clip_high", "clippable"),
    "ratio": ("ratio", "tokens"),
    "correction weight": ("weight", "tokens"),
    "left out by correction": ("left_out", "tokens"),
    "chi2": ("chi2", "tokens"),
    "routes from rollout": ("source rollout", "routed"),
    "routes from old policy": ("source old-policy", "routed"),
    "routes live": ("source live", "routed"),
    "sampler k3 kl": ("k3_kl", "tokens"),
    "sampler extreme": ("extreme", "tokens"),
    "sampler abs dlogp": ("abs_dlogp", "tokens"),
}
_NAMES = sorted(
    {name for pair in _MEANS.values() for name in pair}
    | {"reward2", "weight2", "trainer nll", "sampler nll", "version"}
)
_LARGEST = ("ratio max", "correction weight max", "newest version", "minus oldest version")


class UpdateMetrics:
    """The sums of one step on this rank."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._largest: list[Tensor] = []

    def add(
        self,
        update: Update,
        clip: Clip,
        entropy_BS: Tensor | None,
        batch: dict[str, Tensor],
        host: dict[str, Tensor],
    ) -> None:
        """Add a micro-batch; called on the last pipeline stage, without a wait.

        Args:
            update: what the loss of the micro-batch was computed from.
            entropy_BS: the entropy of the policy's distribution; None if it was not measured.
            batch, host: the batch on the device, and on the host.
        """
        with torch.no_grad():
            sums = {
                **_of_tokens(update, clip),
                **_of_rollouts(update, batch),
                **_on_host(host, batch),
            }
            mask_BS, kl_BS = update.terms.mask_BS, update.reference_kl_BS
            if entropy_BS is not None:
                sums["entropy"] = torch.where(mask_BS > 0, entropy_BS, 0.0).sum()
                sums["measured tokens"] = mask_BS.sum()
            if kl_BS is not None:
                sums |= {"reference_kl": kl_BS.sum(), "tokens with a reference": mask_BS.sum()}
            none = mask_BS.new_zeros(())
            self._sums.append(torch.stack([sums.get(name, none).double() for name in _NAMES]))
            weights = update.corrected.weight_BS * mask_BS
            ratios = torch.where(mask_BS > 0, update.gain.ratio_BS, 0.0)
            largest = (ratios.max(), weights.max(), *_versions_at_the_ends(host, mask_BS.device))
            self._largest.append(torch.stack([value.double() for value in largest]))

    def values(self, device: torch.device) -> dict[str, float]:
        """Return the values of the step by name, the same on all ranks, and forget the step.

        All ranks call this function together. The result is empty if no rank had a response token.
        """
        sums = torch.zeros(len(_NAMES), dtype=torch.float64, device=device)
        largest = torch.full((len(_LARGEST),), -math.inf, dtype=torch.float64, device=device)
        if self._sums:
            sums += torch.stack(self._sums).sum(0)
            largest = torch.maximum(largest, torch.stack(self._largest).amax(0))
        self._sums, self._largest = [], []
        torch.distributed.all_reduce(sums)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        of = dict(zip(_NAMES, sums.tolist(), strict=True))
        if not of["tokens"]:
            return {}
        values = {name: of[a] / of[b] for name, (a, b) in _MEANS.items() if of[b]}
        variance = of["reward2"] / of["rollouts"] - values["reward mean"] ** 2
        values["reward std"] = math.sqrt(max(variance, 0.0))
        # Kish's effective sample size, as a share: 1 where all weights are equal
        if of["weight2"]:
            values["effective sample size"] = of["weight"] ** 2 / (of["tokens"] * of["weight2"])
        for name in ("trainer", "sampler"):
            values[f"{name} perplexity"] = math.exp(min(of[f"{name} nll"] / of["tokens"], 700.0))
        values["tokens"] = of["routed"]  # prompts too; a token counts on each rank that has it
        ends = dict(zip(_LARGEST, largest.tolist(), strict=True))
        newest, oldest = ends.pop("newest version"), -ends.pop("minus oldest version")
        lag = {
            "policy lag": newest - of["version"] / of["tokens"],
            "policy lag max": newest - oldest,
        }
        return values | ends | lag


def _of_tokens(update: Update, clip: Clip) -> Sums:
    """Sums over the response tokens of a micro-batch on this rank."""
    terms, mask_BS = update.terms, update.terms.mask_BS
    on_BS = mask_BS > 0
    weight_BS = update.corrected.weight_BS * mask_BS
    log_rho_BS = bounded_log_ratio(terms.logprobs_BS, terms.sampled_logprobs_BS, mask_BS)
    return {
        "loss sum": update.average.sum.detach(),
        "loss count": update.average.count,
        "tokens": mask_BS.sum(),
        "ratio": torch.where(on_BS, update.gain.ratio_BS, 0.0).sum(),
        "weight": weight_BS.sum(),
        "weight2": (weight_BS**2).sum(),
        "left_out": (mask_BS - update.corrected.mask_BS).sum(),
        # E[rho^2] - 1 under the sampler, with rho = p_trainer / p_sampler
        "chi2": torch.where(on_BS, torch.expm1(2 * log_rho_BS), 0.0).sum(),
        "trainer nll": -torch.where(on_BS, terms.logprobs_BS, 0.0).sum(),
        "sampler nll": -torch.where(on_BS, terms.sampled_logprobs_BS, 0.0).sum(),
        **clipped_sums(update.gain, terms, clip),
        **update.agreement,
    }


def _of_rollouts(update: Update, batch: dict[str, Tensor]) -> Sums:
    """Sums over the rollouts of the micro-batch.

    Each rank that shares a rollout counts it, in numerator and denominator alike.
    """
    reward = batch["reward"].double()
    return {
        "rollouts": torch.ones_like(reward).sum(),
        "reward": reward.sum(),
        "reward2": (reward**2).sum(),
        "uniform": batch["uniform"].sum(),
        "length": update.terms.lengths_M.sum(),  # of whole rollouts, like the rewards
    }


def _on_host(host: dict[str, Tensor], batch: dict[str, Tensor]) -> Sums:
    """Sums of values on the host, moved to the device of `batch`.

    `source NAME` is how many tokens take routes of a source, `routed` how many tokens there are,
    and `version` the sum of the policy versions that sampled response tokens.
    """
    source = host["source"][host["rows"] >= 0]
    counts = torch.bincount(source, minlength=len(SOURCES))
    sums = {f"source {name}": count for name, count in zip(SOURCES, counts, strict=True)}
    version = host["version"][host["loss_mask"] > 0]
    sums |= {"routed": counts.sum(), "version": version.sum()}
    device = batch["reward"].device
    packed = torch.stack([value.double() for value in sums.values()])
    return dict(zip(sums, packed.to(device, non_blocking=True), strict=True))


def _versions_at_the_ends(host: dict[str, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """The newest policy version that sampled a response token, and minus the oldest version.

    The minus lets one MAX over ranks find the newest and the oldest version. Without a response
    token in the micro-batch on this rank, both values are -inf.
    """
    version = host["version"][host["loss_mask"] > 0].double()
    none = version.new_full((1,), -math.inf)
    ends = torch.stack([torch.cat([none, version]).max(), torch.cat([none, -version]).max()])
    newest, oldest = ends.to(device, non_blocking=True)
    return newest, oldest
