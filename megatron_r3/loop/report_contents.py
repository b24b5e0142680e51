"""Which charts a report has, in which order, and what of each is healthy (docs/metrics.md)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto

from megatron_r3.loop.report import LAYER


class Look(Flag):
    """How a chart looks."""

    PERCENT = auto()  # the values are shares
    OFF_ZERO = auto()  # the y axis need not begin at 0
    LOG = auto()  # the y axis is logarithmic where the values lie far apart
    DRIFTS = auto()  # the first step on each collection is a second line
    GLANCE = auto()  # the chart has a row in "At a glance"
    STAGES = auto()  # stacked bars for each group, of the stages of a collection
    MAP = auto()  # a map by layer for each group


PERCENT, OFF_ZERO, LOG, DRIFTS, GLANCE, STAGES, MAP = Look
PLAIN = Look(0)


@dataclass(frozen=True)
class Chart:
    """What a chart shows, and what of it is healthy.

    Attributes:
        source: a name of metrics.jsonl, "NAME + NAME", "NAME / NAME", or "EVENT: FIELD".
        limit: the source of a second line, which the values must not reach.
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
            "The same as the collector saw it. Healthy: it rises, and then stays up."),
        Chart("Groups with one reward", "update/groups with one reward", PERCENT,
            "Share of rollouts that teach nothing: all of a group have one reward. Healthy: few."),
        Chart("Entropy", "update/entropy", GLANCE,
            "How undecided the policy is. Healthy: it falls slowly; at 0 nothing is explored."),
        Chart("Response length", "update/response length", GLANCE,
            "Mean tokens. Healthy: no jumps; a rise up to the limit without reward is a warning."),
        Chart("Responses cut at the longest length", "collected: length_cut", PERCENT,
            "Share of responses that were too long. Healthy: low, and not rising."),
        Chart("Clipped tokens", "update/clip fraction low + update/clip fraction high",
            PERCENT | DRIFTS,
            "Share of tokens outside the clip range. Healthy: some percent; with GSPO far more."),
    ),
    "Do sampler and trainer agree?": (
        Chart("KL from sampler to trainer (k3)", "update/sampler k3 kl", LOG | DRIFTS | GLANCE,
            "How far their probabilities are apart. Healthy: near 0, and without a lasting rise."),
        Chart("Extreme tokens, F(2)", "update/sampler extreme", PERCENT | LOG | DRIFTS | GLANCE,
            "Share of tokens that one finds more than twice as probable. Healthy: near 0 %."),
        Chart("Mean |difference of log-probs|", "update/sampler abs dlogp", LOG | DRIFTS,
            "The same distance as a mean over tokens. Healthy: small at the first step."),
        Chart("Effective sample size", "update/effective sample size", DRIFTS,
            "How much of a step the correction's weights leave. Healthy: near 1; 1 without them."),
    ),
    # what a step did, beside the agreement: much of that comes and goes with the size of the steps
    "What did the steps do?": (
        Chart("Learning rate", "update/learning rate", GLANCE,
            "As Megatron logs it. Where it falls, what grows within a collection falls too."),
        Chart("Gradient norm", "update/gradient norm", GLANCE,
            "Before it is clipped. Healthy: level, without single steps many times as high."),
        Chart("Loss", "update/loss", DRIFTS | GLANCE,
            "It says little: advantages have a mean of 0, and so nearly has the first step."),
        Chart("Seconds of a step", "update/seconds", GLANCE,
            "Without the wait for rollouts, checkpoints and publishing. Healthy: level."),
        Chart("Tokens a second", "update/tokens / update/seconds", GLANCE,
            "Tokens of a step, prompts included, by its seconds. Healthy: level."),
    ),
    "Do their routers agree?": (
        Chart("Router mismatch", "router mismatch", PERCENT | DRIFTS | GLANCE,
            "Share of (token, layer) pairs where the trainer's router would choose others than the "
            "sampler took. Healthy: some percent. With replay the sampler's are used anyway."),
        Chart("Token mismatch", "token mismatch", PERCENT | DRIFTS | GLANCE,
            "Share of tokens that differ in at least one layer of many. It may be large."),
        Chart("Routes dispatched as recorded", "routes dispatched as recorded",
            PERCENT | OFF_ZERO | GLANCE,
            "Share of recorded token-expert pairs. Healthy: exactly 100 % with replay, less live."),
        Chart("Load of the busiest expert", "collected: expert_load", GLANCE,
            "Its tokens by the mean over experts, in the worst layer. Healthy: steady."),
        Chart("Router mismatch by layer", LAYER, MAP | PERCENT,
            "Upwards the layer, to the right the step; yellow is the most. Healthy: somewhat more "
            "in deep layers; no layer stands out, and nothing jumps at a step. Stripes: the "
            "trainer moves away within the steps on a collection."),
        Chart("Busiest expert by layer", "collected: expert_load", MAP,
            "Its tokens divided by the mean over experts; 1 is an even load. Healthy: no layer "
            "drifts to yellow. Layers are counted from 1 among the MoE layers."),
    ),
    "Does the loop run well?": (
        Chart("Policy lag", "update/policy lag", PLAIN,
            "How many versions the sampler is behind. Healthy: as configured; 0 is on-policy."),
        Chart("Check of each push", "pushed: abs_dlogp", LOG,
            "Mean |difference of log-probs| on fixed tokens after a push. Above the dashed limit "
            "the run stops.", limit="pushed: limit"),
        Chart("Truth test of each collection", "examined: mismatch", PERCENT,
            "Share of (row, layer) pairs of some rollouts whose experts differ from those of "
            "transformers under the same policy. Healthy: as at the start."),
        Chart("Routes that agree after a push", "pushed: route_agreement", PERCENT | OFF_ZERO,
            "The same check for experts, in the worst layer. Healthy: as high as at the first "
            "version; a fall means that a router or an expert was not loaded."),
        Chart("Seconds to publish a policy", "published: seconds", PLAIN,
            "What the trainer needs to write a version for the sampler. Healthy: level."),
        Chart("Seconds of a collection", "collected: all stages", GLANCE,
            "From the end of one to the end of the next. Healthy: level."),
        Chart("Where the time goes", "collected: stages", STAGES,
            "Seconds of each collection by stage; sampling is the collector's own work, and it "
            "waits while the trainer trains. Healthy: little of the rest, and no growth."),
    ),
}
