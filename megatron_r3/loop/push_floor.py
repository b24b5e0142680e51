"""What a push of weights may differ from the trainer by, from the pushes that were right before.

Shape suffixes (docs/glossary.md): N, P.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megatron_r3.loop.probe import ENOUGH, Difference, Probe, abs_dlogp, same_so_far

# A sampler that begins with a policy is compared with these, since nothing of it is known yet.
# Measured: an engine in bfloat16 is up to 0.08 from a float32 model of random weights (0.3 with
# MLA), and at least 0.8 of its routes are the same; wrong rotary kernels leave 0.03 to 0.12.
MOST_DLOGP, MOST_DISAGREEMENT = 0.3, 0.4
# How far one push may be above the median, and above the largest, of those before; the larger of
# the two is the limit. Measured: the 4600 right pushes of the comparison (docs/comparison.md), in
# float32, bfloat16 and float8, were at most 0.86 of it.
FACTORS = (2.5, 1.5)
# The same where the tokens after near ties of routers are not left out. A few of them make most of
# the mean: the pushes of one right run in bfloat16 showed 0.027, 0.084, 0.037, 0.078 and 0.141.
FACTORS_OF_ALL_TOKENS = (3.0, 2.0)
# In float32 nothing usually differs; then a few near ties of routers may. The routes of one layer
# vary more than the mean of all layers: the same pushes were at most 0.77 of a layer's limit.
ROOM_DLOGP, ROOM_DISAGREEMENT, ROOM_OF_LAYER = 2e-6, 0.03, 0.05
# Tokens after one with other experts are left out of the mean. This is the most that they may add
# to the mean of all tokens. Measured in 3736 right pushes: up to 0.12 in bfloat16, 0.22 in float8.
MOST_AFTER_OTHER_EXPERTS = 0.3
# And the most of their own mean (measured: 0.87), unless they are fewer than this share: 2 tokens
# of 152 that the policy hardly ever takes were 2.1 apart in a right push.
MOST_OF_THEIR_MEAN, FEW = 1.0, 0.05
# A sampler that did not take the new weights is as near to the policy before as right samplers are
# to theirs. It is refused if its difference to the policy before is below this part of the other,
# and so many of the tokens are nearer to the policy before.
CLOSER, MOST_TOKENS = 0.7, 0.55
_REMEMBERED = 8


@dataclass
class Floor:
    """What usually differs between a sampler and the trainer, from the pushes so far.

    Attributes:
        before: the differences of the last pushes that were accepted, newest last.
    """

    before: list[Difference] = field(default_factory=list)

    def limits(self, push: Difference) -> tuple[float, float]:
        """The largest |dlogp| and share of other routes that a push may show.

        Its mean is compared with means of the same tokens: without those that are left out, or of
        all where it leaves none out because they are too many.
        """
        if not self.before:
            return MOST_DLOGP, MOST_DISAGREEMENT
        alike = [one.abs_dlogp for one in self.before if one.left_out is not None]
        factors = FACTORS
        if push.left_out is None or not alike:
            factors = FACTORS_OF_ALL_TOKENS
            alike = [
                one.abs_dlogp if one.abs_dlogp_all is None else one.abs_dlogp_all
                for one in self.before
            ]
        routes = _above([one.disagreement for one in self.before])
        return _above(alike, factors) + ROOM_DLOGP, routes + ROOM_DISAGREEMENT

    def layer_limits(self) -> list[float]:
        """The largest share of other routes that a push may show, for each MoE layer.

        A router that kept its old weights, or an expert that is wrong, changes the routes of one
        layer and of those after it, which may be little in the mean of all layers. Empty where
        nothing is known yet.
        """
        by_layer = zip(*(one.agreement for one in self.before), strict=True)
        return [_above([1 - same for same in pushes]) + ROOM_OF_LAYER for pushes in by_layer]

    def judge(self, push: Difference) -> list[str]:
        """What is wrong with a push, in words with both numbers; empty if it is accepted."""
        dlogp, routes = self.limits(push)
        usual = "no push was compared before" if not self.before else "by what pushes showed"
        wrong = []
        if not push.abs_dlogp <= dlogp:  # NaN is wrong too
            wrong.append(f"mean |dlogp| {push.abs_dlogp:.3g}, at most {dlogp:.3g} ({usual})")
        left_out = push.left_out or 0.0
        added = left_out * push.dlogp_left_out
        if left_out >= FEW and not push.dlogp_left_out <= MOST_OF_THEIR_MEAN:
            wrong.append(
                f"after tokens with other experts mean |dlogp| {push.dlogp_left_out:.3g}, at most "
                f"{MOST_OF_THEIR_MEAN:g}"
            )
        if not added <= MOST_AFTER_OTHER_EXPERTS:
            wrong.append(
                f"tokens after one with other experts add {added:.3g} to the mean |dlogp|, at most "
                f"{MOST_AFTER_OTHER_EXPERTS:g}"
            )
        if not push.disagreement <= routes:
            layers = ", ".join(f"{share:.3f}" for share in push.agreement)
            wrong.append(
                f"{push.disagreement:.3g} of the routes differ, at most {routes:.3g} ({usual}); "
                f"the same by MoE layer: {layers}"
            )
        limits = self.layer_limits()
        for layer, (same, most) in enumerate(zip(push.agreement, limits, strict=False)):
            if not 1 - same <= most:
                wrong.append(
                    f"in MoE layer {layer} {1 - same:.3g} of the routes differ, at most {most:.3g} "
                    f"({usual})"
                )
        return wrong + self._judge_cache(push)

    def _judge_cache(self, push: Difference) -> list[str]:
        dlogp, routes = self.limits(push)
        old = "the engine's prefix cache is of older weights"
        wrong = []
        if not push.cached_dlogp <= dlogp:
            wrong.append(
                f"with kept keys and values |dlogp| {push.cached_dlogp:.3g}, at most {dlogp:.3g}: "
                f"{old}"
            )
        if not push.cached_disagreement <= routes:
            wrong.append(
                f"with kept keys and values {push.cached_disagreement:.3g} of the routes differ, "
                f"at most {routes:.3g}: {old}"
            )
        return wrong

    def accept(self, push: Difference) -> None:
        """Remember a push that was right."""
        self.before = [*self.before, push][-_REMEMBERED:]


def _above(before: list[float], factors: tuple[float, float] = FACTORS) -> float:
    return max(factors[0] * float(np.median(before)), factors[1] * max(before))


def still_before(sampler: Probe, now: Probe, before: Probe) -> str:
    """Why a sampler seems to have the policy before, in words with both numbers; empty if not.

    It finds a load that changed nothing also where the two policies differ by no more than the
    sampler rounds. Example: a sampler in bfloat16 is 0.010 from its policy, and the policies are
    0.012 apart. With the new weights it is 0.010 from the new one and some 0.016 from the one
    before; with the old weights the other way round, and 0.010 is below 0.7 times 0.016.

    A mean alone can be that of a few tokens after a near tie of routers which went as it did in the
    policy before: a right sampler in bfloat16 was 0.092 and 0.055 from the two, and 41 % of its
    tokens nearer to the policy before. So most tokens must be nearer to it too, and tokens that
    follow one with other experts than in either policy are left out of the mean, unless they are
    too many.
    """
    to_now_PN, to_before_PN = abs_dlogp(sampler, now), abs_dlogp(sampler, before)
    nearer = float((to_before_PN < to_now_PN).mean())
    counted_PN = same_so_far(sampler, now) & same_so_far(sampler, before)
    if counted_PN.mean() < ENOUGH:
        counted_PN = np.ones_like(counted_PN)
    to_now, to_before = float(to_now_PN[counted_PN].mean()), float(to_before_PN[counted_PN].mean())
    if to_now <= ROOM_DLOGP or not to_before < CLOSER * to_now or nearer < MOST_TOKENS:
        return ""
    return (
        f"mean |dlogp| {to_now:.3g} to this policy and {to_before:.3g} to the one before, and "
        f"{nearer:.0%} of the tokens nearer to the one before: it has the weights of before"
    )
