"""How far a sampler may differ from the trainer after a push, judged by earlier right pushes.

There is one rule (`megatron_r3/data/truth/limit.py`): at most three times the median of the last
eight right pushes, plus a margin (`ROOM_DLOGP`, `ROOM_ROUTES`). The rule holds for the log-probs,
for the routes of each MoE layer, and for log-probs and routes once more with the engine's prefix
cache.

Shape suffixes (docs/glossary.md): N, M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_r3.data.truth.limit import MOST_ROUTES, ROOM_ROUTES, Limit
from megatron_r3.loop.probe import ENOUGH, Difference, Probe, abs_dlogp, same_so_far

REMEMBERED = 8  # pushes
# The limit of a first push's mean |dlogp|, and the margin, both in nats; |dlogp| is the absolute
# difference of the sampler's and the trainer's log-prob of a token. Right engines in bfloat16
# differ from a float32 model by up to 0.08, with MLA by up to 0.3. Two engines in float32 differ by
# less than 1e-5; if a tensor was not loaded, by more.
MOST_DLOGP, ROOM_DLOGP = 0.3, 1e-5
# A sampler that did not load the new weights is still near to the previous policy. A push is
# refused if the sampler's mean |dlogp| to the previous policy is below CLOSER times that to the new
# policy, and at least MOST_TOKENS of the tokens are nearer to the previous policy. Each of these
# tests alone has refused right pushes.
CLOSER, MOST_TOKENS = 0.7, 0.55

_WEIGHTS = "it has other weights, or computes them wrongly"
_CACHE = "its prefix cache is of older weights: make the server empty the cache with each load"


@dataclass
class PushFloor:
    """How far sampler and trainer usually differ, from the pushes so far.

    Attributes:
        before: the differences of the last accepted pushes, newest last.
    """

    before: list[Difference] = field(default_factory=list)

    def dlogp_limit(self, push: Difference) -> Limit:
        """The limit of a push's mean |dlogp|.

        The limit is made from `abs_dlogp_all` of the earlier pushes if `left_out` is None in this
        push or in all earlier pushes. Otherwise it is made from `abs_dlogp` of those earlier pushes
        in which `left_out` is a number.
        """
        usual = [one.abs_dlogp for one in self.before if one.left_out is not None]
        if push.left_out is None or not usual:
            usual = [one.abs_dlogp_all for one in self.before]
        return self._limit(usual, ROOM_DLOGP, MOST_DLOGP)

    def judge(self, push: Difference) -> list[str]:
        """What is wrong with a push, in words with value and limit; empty if it is accepted."""
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
            ("|dlogp| with the prefix cache", push.cached_dlogp, dlogp, _CACHE),
            (
                "share of other routes with the prefix cache",
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
    """Why a sampler seems to have the previous policy, with the numbers; empty if it does not.

    This finds a load that changed nothing even if the policies differ by no more than the sampler's
    rounding. Example: a sampler in bfloat16 is 0.010 from its policy, and the policies are 0.012
    apart. With the new weights the sampler is 0.010 from the new policy and about 0.016 from the
    old one; with the old weights it is the other way round, and 0.010 is below 0.7 times 0.016.

    The means leave out each token that follows a token for which the sampler took other experts
    than one of the two policies. Such tokens would dominate the means, and show rounding rather
    than weights. If they are more than seven eighths of all tokens, every token counts.
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
        f"mean |dlogp| {to_now:.3g} to this policy, but {to_before:.3g} to the previous policy, "
        f"which is below {CLOSER:g} times {to_now:.3g}; {nearer:.0%} of the tokens (limit "
        f"{MOST_TOKENS:.0%}) are nearer to the previous policy: the sampler still has the old "
        "weights"
    )
