"""What a policy loss adds to its gain: a KL term to a reference policy, and an entropy term.

Shape suffixes (docs/glossary.md): B, S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_r3.train.losses.terms import LossTerms, bounded_log_ratio

# Estimators of KL(pi || ref) from d = log(ref / pi) of a token that pi drew: J. Schulman,
# "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html. GRPO has k3 in the
# loss (arXiv 2402.03300, equation 4). The gradient of k1 in the loss has a mean of 0.
KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: torch.expm1(d) - d,
}
PLACES = ("loss", "advantage")


@dataclass(frozen=True)
class PenaltyOptions:
    """The KL term and the entropy term; a term is off if its coefficient is None.

    Attributes:
        kl: the coefficient of the KL of a token; with 0 the KL is only measured.
        kl_estimator: a name of `KL_ESTIMATORS`.
        kl_place: "loss": the loss of a token grows by kl times its KL, with gradient.
            "advantage": the advantage of a token falls by kl times its KL under the old policy.
        entropy: the coefficient of the entropy of a token; the loss falls by the product.
    """

    kl: float | None = None
    kl_estimator: str = "k3"
    kl_place: str = "loss"
    entropy: float | None = None


def reference_kl(terms: LossTerms, logprobs_BS: Tensor, estimator: str) -> Tensor:
    """The KL of each token from a policy to the reference, `[B, S]`; 0 outside of responses.

    Args:
        logprobs_BS: the log-probs of the policy.
        estimator: a name of `KL_ESTIMATORS`.
    """
    assert terms.reference_logprobs_BS is not None, "there is no reference"
    log_ratio_BS = bounded_log_ratio(terms.reference_logprobs_BS, logprobs_BS, terms.mask_BS)
    return KL_ESTIMATORS[estimator](log_ratio_BS)


def lower_advantages(terms: LossTerms, options: PenaltyOptions) -> LossTerms:
    """The terms, with advantages that are lowered by the KL if `kl_place` is "advantage"."""
    if options.kl is None or options.kl_place != "advantage":
        return terms
    kl_BS = reference_kl(terms, terms.old_logprobs_BS, options.kl_estimator)
    return replace(terms, advantages_BS=terms.advantages_BS - options.kl * kl_BS)


def penalty(terms: LossTerms, options: PenaltyOptions) -> Tensor:
    """The KL term of each token, if it is in the loss, plus the entropy term, `[B, S]`."""
    added_BS = torch.zeros_like(terms.logprobs_BS)
    if options.kl and options.kl_place == "loss":
        kl_BS = reference_kl(terms, terms.logprobs_BS, options.kl_estimator)
        added_BS = added_BS + options.kl * kl_BS
    if options.entropy:
        assert terms.entropy_BS is not None, "no entropy was computed"
        entropy_BS = torch.where(terms.mask_BS > 0, terms.entropy_BS, 0.0)
        added_BS = added_BS - options.entropy * entropy_BS
    return added_BS
