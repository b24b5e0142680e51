"""Which charts a report has, in which order, and what of each is healthy (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag, auto

from megatron_r3.loop import report_numbers as numbers
from megatron_r3.loop.report import Curve, Run
from megatron_r3.loop.report_numbers import metric, of_events


class Look(Flag):
    """How a chart of lines looks."""

    PERCENT = auto()  # the values are shares
    OFF_ZERO = auto()  # the y axis need not begin at 0
    LOG = auto()  # the y axis is logarithmic where the values lie far apart
    DRIFTS = auto()  # the first step on each collection is a second line
    GLANCE = auto()  # the chart has a row in "At a glance"


PERCENT, OFF_ZERO, LOG, DRIFTS, GLANCE = Look
PLAIN = Look(0)


@dataclass(frozen=True)
class Chart:
    """What a chart of lines shows, and what of it is healthy.

    Attributes:
        x: what the x axis counts.
        limit: a second line, which the values must not reach.
    """

    title: str
    text: str
    curve: Callable[[Run], Curve]
    look: Look = PLAIN
    x: str = "step"
    limit: Callable[[Run], Curve] | None = None


LEARNING = [
    Chart(
        "Reward",
        "Mean reward of the rollouts of a step. Healthy: it rises, and then stays up.",
        metric("update/reward mean"),
        OFF_ZERO | GLANCE,
    ),
    Chart(
        "Reward of each collection",
        "The same as the collector saw it. Healthy: it rises, and then stays up.",
        of_events("collected", "collection", "reward"),
        OFF_ZERO,
        x="collection",
    ),
    Chart(
        "Groups with one reward",
        "Share of rollouts that teach nothing: all of their group have one reward. Healthy: few.",
        metric("update/groups with one reward"),
        PERCENT,
    ),
    Chart(
        "Entropy",
        "How undecided the policy is. Healthy: it falls slowly; at 0 nothing is explored.",
        metric("update/entropy"),
        GLANCE,
    ),
    Chart(
        "Response length",
        "Mean tokens. Healthy: no jumps; a rise up to the limit without reward is a warning.",
        metric("update/response length"),
        GLANCE,
    ),
    Chart(
        "Responses cut at the longest length",
        "Share of responses that were too long. Healthy: low, and not rising.",
        of_events("collected", "collection", "length_cut"),
        PERCENT,
        x="collection",
    ),
    Chart(
        "Clipped tokens",
        "Share of tokens outside of the clip range. Healthy: some percent; with GSPO far more.",
        metric("update/clip fraction low", "update/clip fraction high"),
        PERCENT | DRIFTS,
    ),
]
AGREEMENT = [
    Chart(
        "KL from sampler to trainer (k3)",
        "How far their probabilities are apart. Healthy: near 0, and without a lasting rise.",
        metric("update/sampler k3 kl"),
        LOG | DRIFTS | GLANCE,
    ),
    Chart(
        "Extreme tokens, F(2)",
        "Share of tokens that one finds more than twice as probable. Healthy: near 0 %.",
        metric("update/sampler extreme"),
        PERCENT | LOG | DRIFTS | GLANCE,
    ),
    Chart(
        "Mean |difference of log-probs|",
        "The same distance as a mean over tokens. Healthy: small at the first step.",
        metric("update/sampler abs dlogp"),
        LOG | DRIFTS,
    ),
    Chart(
        "Effective sample size",
        "How much of a step the correction's weights leave. Healthy: near 1; 1 without them.",
        metric("update/effective sample size"),
        DRIFTS,
    ),
]
# what a step did, beside the agreement: much of that comes and goes with the size of the steps
STEPS = [
    Chart(
        "Learning rate",
        "As Megatron logs it. Where it falls, what grows within a collection falls too.",
        metric("update/learning rate"),
        GLANCE,
    ),
    Chart(
        "Gradient norm",
        "Before it is clipped. Healthy: level, without single steps that are many times higher.",
        metric("update/gradient norm"),
        GLANCE,
    ),
    Chart(
        "Loss",
        "It says little: advantages have a mean of 0, and so has nearly the first step's loss.",
        metric("update/loss"),
        DRIFTS | GLANCE,
    ),
    Chart(
        "Seconds of a step",
        "Without the wait for rollouts, checkpoints and publishing. Healthy: level.",
        metric("update/seconds"),
        GLANCE,
    ),
    Chart(
        "Tokens a second",
        "Tokens of a step, prompts included, by its seconds. Healthy: level.",
        numbers.tokens_a_second,
        GLANCE,
    ),
]
ROUTING = [
    Chart(
        "Router mismatch",
        "Share of (token, layer) pairs where the trainer's router would choose others than the "
        "sampler took. Healthy: some percent. With replay the sampler's are used anyway.",
        metric("router mismatch"),
        PERCENT | DRIFTS | GLANCE,
    ),
    Chart(
        "Token mismatch",
        "Share of tokens that differ in at least one layer of many. It may be large.",
        metric("token mismatch"),
        PERCENT | DRIFTS | GLANCE,
    ),
    Chart(
        "Routes dispatched as recorded",
        "Share of recorded (token, expert) pairs. Healthy: exactly 100 % with replay, less live.",
        metric("routes dispatched as recorded"),
        PERCENT | OFF_ZERO | GLANCE,
    ),
    Chart(
        "Load of the busiest expert",
        "Its tokens by the mean over experts, in the worst layer. Healthy: steady.",
        of_events("collected", "collection", "expert_load", max),
        GLANCE,
        x="collection",
    ),
]
LOOP = [
    Chart(
        "Policy lag",
        "How many versions the sampler is behind. Healthy: as configured; 0 is on-policy.",
        metric("update/policy lag"),
    ),
    Chart(
        "Check of each push",
        "Mean |difference of log-probs| on fixed tokens after a push. Above the dashed limit the "
        "run stops.",
        of_events("pushed", "version", "abs_dlogp"),
        LOG,
        x="policy version",
        limit=of_events("pushed", "version", "limit"),
    ),
    Chart(
        "Truth test of each collection",
        "Share of (row, layer) pairs of some rollouts whose experts differ from those of "
        "transformers under the same policy. Healthy: as at the start.",
        of_events("examined", "version", "mismatch"),
        PERCENT,
        x="policy version",
    ),
    Chart(
        "Routes that agree after a push",
        "The same check for experts, in the worst layer. Healthy: as high as at the first version; "
        "a fall means that a router or an expert was not loaded.",
        of_events("pushed", "version", "route_agreement", min),
        PERCENT | OFF_ZERO,
        x="policy version",
    ),
    Chart(
        "Seconds to publish a policy",
        "What the trainer needs to write a version for the sampler. Healthy: level.",
        of_events("published", "version", "seconds"),
        x="policy version",
    ),
    Chart(
        "Seconds of a collection",
        "From the end of one to the end of the next. Healthy: level.",
        numbers.seconds_of_collections,
        GLANCE,
        x="collection",
    ),
]

ROUTERS, WELL = "Do their routers agree?", "Does the loop run well?"
PARTS = {
    "Does the policy learn?": LEARNING,
    "Do sampler and trainer agree?": AGREEMENT,
    "What did the steps do?": STEPS,
    ROUTERS: ROUTING,
    WELL: LOOP,
}
