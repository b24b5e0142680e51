"""How a case's training uses its rollouts: the optimizer steps, the old policy, the routes.

The reference makes the same update, and one more for each way that is wrong on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# The first of several optimizer steps must really change the weights: at this rate the gradients of
# the second step change by as much as their own size. SGD without momentum is used, because the
# first steps of Adam hide the size of a gradient.
RATE = 1.0
_SGD = "--optimizer sgd --sgd-momentum 0 --weight-decay 0 --clip-grad 0 --lr-decay-style constant"


@dataclass(frozen=True)
class Update:
    """How the weights are updated on the rollouts.

    Attributes:
        temperature: the temperature at which the rollouts were sampled.
        mini_steps: how many optimizer steps, each on an equal part of the rollouts, in order.
        old: the old policy: the "sampler", or the "trainer" as it is before the first step. The
            control "newest" takes the trainer as it is before each step.
        source: where routes come from: the "rollout", or the "old-policy", the trainer as it is
            before the first step. In the control "live" each step routes live.
        last_first: a control: whether the last part of the rollouts comes first.
    """

    temperature: float = 1.0
    mini_steps: int = 1
    old: str = "sampler"
    source: str = "rollout"
    last_first: bool = False

    def argv(self) -> list[str]:
        """The options of a training for this update; the temperature is in the store."""
        if self.mini_steps == 1:
            return []
        options = f"{_SGD} --lr {RATE} --min-lr {RATE} --rollouts-mini-steps {self.mini_steps} "
        options += f"--rollouts-old-policy {self.old} --moe-router-replay-source {self.source}"
        return options.split()

    def steps(self, num_rollouts: int) -> list[range]:
        """The indices of the rollouts of each optimizer step."""
        size, rest = divmod(num_rollouts, self.mini_steps)
        assert not rest, f"{num_rollouts} rollouts in {self.mini_steps} steps"
        parts = [range(i * size, (i + 1) * size) for i in range(self.mini_steps)]
        return parts[::-1] if self.last_first else parts

    def controls(self) -> dict[str, Update]:
        """Updates with one fault each, by name: their gradients must not be the training's."""
        wrong = {}
        if self.temperature != 1:
            wrong["temperature_1"] = replace(self, temperature=1.0)
        if self.mini_steps > 1:
            wrong["sampler_is_old"] = replace(self, old="sampler")
            wrong["newest_is_old"] = replace(self, old="newest")
            wrong["swap_mini_steps"] = replace(self, last_first=True)
        if self.source == "old-policy":
            wrong["routes_of_rollouts"] = replace(self, source="rollout")
            wrong["live_routes"] = replace(self, source="live")
        return wrong
