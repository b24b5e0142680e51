"""What a push of weights may differ from the trainer by, from the pushes that were right before.

There is one rule (`megatron_r3/data/truth/limit.py`): at most three times the median of the last
eight right pushes, plus a room. It is asked of the log-probs, of the routes of each MoE layer, and
of both once more with the keys and values that the engine kept.

Shape suffixes (docs/glossary.md): N, M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_r3.data.truth.limit import MOST_ROUTES, ROOM_ROUTES, Limit
from megatron_r3.loop.probe import ENOUGH, Difference, Probe, abs_dlogp, same_so_far

REMEMBERED = 8  # pushes
# In nats. Right engines in bfloat16 are up to 0.08 from a float32 model, with MLA 0.3; two engines
# in float32 are less than 1e-5 apart, and a tensor that was not loaded makes more.
MOST_DLOGP, ROOM_DLOGP = 0.3, 1e-5
# A sampler that did not take the new weights is as near to the policy before as right samplers are
# to theirs. It is refused if its difference to the policy before is below this part of the other,
# and so many of the tokens are nearer to the policy before. One alone refused right pushes.
CLOSER, MOST_TOKENS = 0.7, 0.55

_WEIGHTS = "it has other weights, or computes them wrongly"
_CACHE = "its prefix cache is of older weights: have it empty the cache with each load"


@dataclass
class PushFloor:
    """What usually differs between a sampler and the trainer, from the pushes so far.

    Attributes:
        before: the differences of the last pushes that were accepted, newest last.
    """

    before: list[Difference] = field(default_factory=list)

    def dlogp_limit(self, push: Difference) -> Limit:
        """The limit of a push's mean |dlogp|, from means of the same tokens.

        These are all tokens where the push leaves none out since they would be too many, or where
        each push before left none out.
        """
        usual = [one.abs_dlogp for one in self.before if one.left_out is not None]
        if push.left_out is None or not usual:
            usual = [one.abs_dlogp_all for one in self.before]
        return self._limit(usual, ROOM_DLOGP, MOST_DLOGP)

    def judge(self, push: Difference) -> list[str]:
        """What is wrong with a push, in words with both numbers; empty if it is accepted."""
        dlogp = self.dlogp_limit(push)
        layers = zip(*(one.agreement for one in self.before), strict=True)
        usual = [[1 - same for same in layer] for layer in layers] or [[] for _ in push.agreement]
        means = [one.disagreement for one in self.before]
        shown = [
            ("mean |dlogp|", push.abs_dlogp, dlogp, _WEIGHTS),
            *(
                (f"share of other routes in MoE layer {i}", 1 - same, self._routes(own), _WEIGHTS)
                for i, (same, own) in enumerate(zip(push.agreement, usual, strict=False))
            ),
            ("|dlogp| with kept keys and values", push.cached_dlogp, dlogp, _CACHE),
            (
                "share of other routes with kept keys and values",
                push.cached_disagreement,
                self._routes(means),
                _CACHE,
            ),
        ]
        return [
            f"{name} {value:.3g}, {limit.words()}: {cause}"
            for name, value, limit, cause in shown
            if limit.refuses(value)
        ]

    def accept(self, push: Difference) -> None:
        """Remember a push that was right."""
        self.before = [*self.before, push][-REMEMBERED:]

    def _routes(self, usual: Sequence[float]) -> Limit:
        return self._limit(usual, ROOM_ROUTES, MOST_ROUTES)

    def _limit(self, usual: Sequence[float], room: float, first: float) -> Limit:
        median = float(np.median(usual)) if usual else None
        return Limit(median, room, first, f"the median of the last {REMEMBERED} pushes")


def still_before(sampler: Probe, now: Probe, before: Probe) -> str:
    """Why a sampler seems to have the policy before, in words with both numbers; empty if not.

    It finds a load that changed nothing also where the two policies differ by no more than the
    sampler rounds. Example: a sampler in bfloat16 is 0.010 from its policy, and the policies are
    0.012 apart. With the new weights it is 0.010 from the new one and some 0.016 from the one
    before; with the old weights the other way round, and 0.010 is below 0.7 times 0.016.

    Tokens that follow one with other experts than in either policy are left out of the mean, unless
    they are too many: they make most of it, and a near tie may go as it did in the policy before.
    """
    to_now_MN, to_before_MN = abs_dlogp(sampler, now), abs_dlogp(sampler, before)
    nearer = float((to_before_MN < to_now_MN).mean())
    counted_MN = same_so_far(sampler, now) & same_so_far(sampler, before)
    if counted_MN.mean() < ENOUGH:
        counted_MN = np.ones_like(counted_MN)
    to_now, to_before = float(to_now_MN[counted_MN].mean()), float(to_before_MN[counted_MN].mean())
    if to_now <= ROOM_DLOGP or not to_before < CLOSER * to_now or nearer < MOST_TOKENS:
        return ""
    return (
        f"mean |dlogp| {to_now:.3g} to this policy and {to_before:.3g} to the one before, below "
        f"{CLOSER:g} times that, and {nearer:.0%} of the tokens nearer to the one before, above "
        f"{MOST_TOKENS:.0%}: it has the weights of before"
    )
