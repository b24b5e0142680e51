"""The charts of a report in their order, each with what is healthy (docs/metrics.md)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto

from megatron_r3.loop.report import LAYER


class Look(Flag):
    """How a chart looks."""

    PERCENT = auto()  # the values are shares
    OFF_ZERO = auto()  # the y axis may begin above 0
    LOG = auto()  # the y axis is logarithmic where the values lie far apart
    DRIFTS = auto()  # a second line has only the first step on each collection
    GLANCE = auto()  # the chart has a row in "At a glance"
    STAGES = auto()  # stacked bars for each group, of the stages of a collection
    MAP = auto()  # a map by layer for each group


PERCENT, OFF_ZERO, LOG, DRIFTS, GLANCE, STAGES, MAP = Look
PLAIN = Look(0)


@dataclass(frozen=True)
class Chart:
    """What a chart shows, and what is healthy.

    Attributes:
        source: a name of metrics.jsonl (of a MAP: how the names begin), "NAME + NAME",
            "NAME / NAME", "EVENT: FIELD", or the times of the stages of a collection.
        limit: the source of a second line, the upper limit of the values.
    """

    title: str
    source: str
    look: Look
    text: str
    limit: str = ""

    @property
    def x(self) -> str:
        """What the x axis counts."""
        kind, of_event, _ = self.source.partition(": ")
        return "collection" if kind == "collected" else "policy version" if of_event else "step"


# fmt: off
PARTS = {
    "Does the policy learn?": (
        Chart("Reward", "update/reward mean", OFF_ZERO | GLANCE,
            "Mean reward of the rollouts of a step. Healthy: it rises, and then stays up."),
        Chart("Reward of each collection", "collected: reward", OFF_ZERO,
            "The same reward by collection. Healthy: it rises, and then stays up."),
        Chart("Groups with one reward", "update/groups with one reward", PERCENT,
            "Share of rollouts whose group got equal rewards: they teach nothing. Healthy: few."),
        Chart("Entropy", "update/entropy", GLANCE,
            "How undecided the policy is. Healthy: a slow fall; at 0 nothing is explored."),
        Chart("Response length", "update/response length", GLANCE,
            "Mean tokens. Healthy: no jumps. A rise to the limit without reward is a warning."),
        Chart("Responses cut at the longest length", "collected: length_cut", PERCENT,
            "Share of responses that max_tokens cut off. Healthy: low, and not rising."),
        Chart("Clipped tokens", "update/clip fraction low + update/clip fraction high",
            PERCENT | DRIFTS,
            "Share of tokens outside the clip range. Healthy: some percent; with GSPO far more."),
    ),
    "Do sampler and trainer agree?": (
        Chart("KL from sampler to trainer (k3)", "update/sampler k3 kl", LOG | DRIFTS | GLANCE,
            "How far their probabilities differ. Healthy: near 0, and without a lasting rise."),
        Chart("Extreme tokens, F(2)", "update/sampler extreme", PERCENT | LOG | DRIFTS | GLANCE,
            "Share of tokens whose probabilities differ by more than a factor of 2. Healthy: 0 %."),
        Chart("Mean |difference of log-probs|", "update/sampler abs dlogp", LOG | DRIFTS,
            "Sampler against trainer, a mean over tokens. Healthy: small at the first step."),
        Chart("Effective sample size", "update/effective sample size", DRIFTS,
            "Share of a step that the correction's weights keep. Healthy: near 1; 1 without them."),
    ),
    # beside the agreement, much of which depends on how large the steps are
    "What did the steps do?": (
        Chart("Learning rate", "update/learning rate", GLANCE,
            "As Megatron logs it. With smaller steps the policy drifts less within a collection."),
        Chart("Gradient norm", "update/gradient norm", GLANCE,
            "Before clipping. Healthy: level, without single steps that are many times higher."),
        Chart("Loss", "update/loss", DRIFTS | GLANCE,
            "It says little: advantages have a mean of 0, so a first step's loss is near 0."),
        Chart("Seconds of a step", "update/seconds", GLANCE,
            "Without the wait for rollouts, checkpoints and publishing. Healthy: level."),
        Chart("Tokens a second", "update/tokens / update/seconds", GLANCE,
            "Tokens of a step, prompts included, by its seconds. Healthy: level."),
    ),
    "Do their routers agree?": (
        Chart("Router mismatch", "router mismatch", PERCENT | DRIFTS | GLANCE,
            "Share of (token, layer) pairs where the trainer's router would choose other experts "
            "than the sampler. Healthy: some percent. With replay the sampler's experts are used."),
        Chart("Token mismatch", "token mismatch", PERCENT | DRIFTS | GLANCE,
            "Share of tokens that differ in at least one layer; large in models of many layers."),
        Chart("Routes dispatched as recorded", "routes dispatched as recorded",
            PERCENT | OFF_ZERO | GLANCE,
            "Share of recorded token-expert pairs. Healthy: exactly 100 % with replay, less live."),
        Chart("Load of the busiest expert", "collected: expert_load", GLANCE,
            "Its tokens divided by the mean over experts, in the worst layer. Healthy: steady."),
        Chart("Router mismatch by layer", LAYER, MAP | PERCENT,
            "Yellow is the most. Healthy: somewhat more in deep layers; no layer stands out, and "
            "nothing jumps at a step. Stripes: within the steps on a collection the trainer moves "
            "away from the sampler's policy."),
        Chart("Busiest expert by layer", "collected: expert_load", MAP,
            "Its tokens divided by the mean over experts; 1 is an even load. Healthy: no layer "
            "drifts to yellow. Layers are counted from 1 among the MoE layers."),
    ),
    "Does the loop run well?": (
        Chart("Policy lag", "update/policy lag", PLAIN,
            "How many versions the sampler is behind. Healthy: as configured. 0 is on-policy."),
        Chart("Check of each push", "pushed: abs_dlogp", LOG,
            "Mean |difference of log-probs| on fixed tokens after a push. Above the dashed limit "
            "the run stops.", limit="pushed: limit"),
        Chart("Truth test of each collection", "examined: mismatch", PERCENT,
            "Share of (row, layer) pairs of some rollouts whose experts differ from those of "
            "transformers under the same policy. Healthy: as at the start."),
        Chart("Routes that agree after a push", "pushed: route_agreement", PERCENT | OFF_ZERO,
            "Share of fixed tokens with the trainer's experts, in the worst layer. Healthy: as "
            "for the first version. After a fall, look whether all routers and experts were "
            "loaded."),
        Chart("Seconds to publish a policy", "published: seconds", PLAIN,
            "The trainer's time to write a version for the sampler. Healthy: level."),
        Chart("Seconds of a collection", "collected: all stages", GLANCE,
            "From the end of one collection to the end of the next. Healthy: level."),
        Chart("Where the time goes", "collected: stages", STAGES,
            "Seconds of each collection by stage. The collector waits for a policy while the "
            "trainer trains. Healthy: little of \"the rest\", and no growth."),
    ),
}
