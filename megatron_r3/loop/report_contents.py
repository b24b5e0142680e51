"""Which charts a report has, in which order, and what of each is healthy (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_r3.loop import report_numbers as numbers
from megatron_r3.loop.report import Curve, Run
from megatron_r3.loop.report_numbers import metric, of_events


@dataclass(frozen=True)
class Chart:
    """What a chart of lines shows, and what of it is healthy."""

    title: str
    text: str
    curve: Callable[[Run], Curve]
    x: str = "step"
    percent: bool = False
    from_zero: bool = True
    log: bool = False
    limit: Callable[[Run], Curve] | None = None
    limit_name: str = "limit"
    more: tuple[Callable[[Run], str], ...] = ()  # what else a reader must know, of each run


def drifting(
    title: str,
    text: str,
    curve: Callable[[Run], Curve],
    percent: bool = False,
    log: bool = False,
    more: tuple[Callable[[Run], str], ...] = (),
) -> Chart:
    """A chart of what grows within a collection, with the first step of each as a second line."""
    firsts = numbers.first_steps(curve)
    more = (numbers.mini_steps, *more)
    return Chart(title, text, curve, "step", percent, True, log, firsts, "first steps", more)


LEARNING = [
    Chart(
        "Reward",
        "Mean reward of the rollouts of a step. Healthy: it rises, and then stays up.",
        metric("update/reward mean"),
        from_zero=False,
    ),
    Chart(
        "Reward of each collection",
        "The same as the collector saw it, when the rollouts were sampled. Healthy: it rises, and "
        "then stays up.",
        of_events("collected", "collection", "reward"),
        "collection",
        from_zero=False,
    ),
    Chart(
        "Groups with one reward",
        "Share of rollouts whose group has one reward only, which teach nothing. Healthy: as few "
        "as the prompts allow; near 100 % nothing is learnt.",
        metric("update/groups with one reward"),
        percent=True,
    ),
    Chart(
        "Entropy",
        "How undecided the policy is about the next token. Healthy: it falls slowly; at 0 the "
        "policy no longer explores.",
        metric("update/entropy"),
    ),
    Chart(
        "Response length",
        "Mean number of response tokens. Healthy: no jumps; a steady rise up to the limit with no "
        "gain in reward is a warning.",
        metric("update/response length"),
    ),
    Chart(
        "Responses cut at the longest length",
        "Share of responses that ended only because they were too long. Healthy: low, and not "
        "rising.",
        of_events("collected", "collection", "length_cut"),
        "collection",
        percent=True,
    ),
    drifting(
        "Clipped tokens",
        "Share of tokens whose probability moved out of the clip range. Healthy: some percent; "
        "with GSPO, whose range is narrow, far more.",
        numbers.metrics_sum("update/clip fraction low", "update/clip fraction high"),
        percent=True,
    ),
]
AGREEMENT = [
    drifting(
        "KL from sampler to trainer (k3)",
        "How far the probabilities of sampler and trainer are apart. Healthy: near 0, lower with "
        "replay than live, and without a lasting rise.",
        metric("update/sampler k3 kl"),
        log=True,
        more=(numbers.learning_rate,),
    ),
    drifting(
        "Extreme tokens, F(2)",
        "Share of tokens that one of the two finds more than twice as probable as the other. "
        "Healthy: near 0 %, and far lower with replay than live.",
        metric("update/sampler extreme"),
        percent=True,
        log=True,
        more=(numbers.learning_rate,),
    ),
    drifting(
        "Mean |difference of log-probs|",
        "The same distance without squares: a mean over tokens. Healthy: small at the first step; "
        "it grows while one collection is used several times.",
        metric("update/sampler abs dlogp"),
        log=True,
        more=(numbers.learning_rate,),
    ),
    drifting(
        "Effective sample size",
        "How much of a step still counts after the correction's weights. Healthy: near 1; it is 1 "
        "where no correction is used.",
        metric("update/effective sample size"),
    ),
]
# what a step did, beside the agreement: much of that comes and goes with the size of the steps
STEPS = [
    Chart(
        "Learning rate",
        "As Megatron logs it. Where it falls, what grows within a collection falls too.",
        metric("update/learning rate"),
    ),
    Chart(
        "Gradient norm",
        "Before it is clipped. Healthy: level, without single steps that are many times higher.",
        metric("update/gradient norm"),
    ),
    drifting(
        "Loss",
        "The policy loss. It says little: advantages have a mean of 0, and so has nearly the loss, "
        "in the first step of a collection.",
        metric("update/loss"),
    ),
    Chart(
        "Seconds of a step",
        "From the first micro-batch that is there to the end of the update: without the wait for "
        "rollouts, checkpoints and publishing. Healthy: level.",
        metric("update/seconds"),
    ),
    Chart(
        "Tokens a second",
        "Tokens of a step, prompts included, by its seconds. Healthy: level.",
        numbers.tokens_a_second,
    ),
]
ROUTING = [
    drifting(
        "Router mismatch",
        "Share of (token, layer) pairs for which the trainer's router would choose other experts "
        "than the sampler took. Healthy: some percent. With replay the sampler's are used anyway.",
        metric("router mismatch"),
        percent=True,
        more=(numbers.learning_rate,),
    ),
    drifting(
        "Token mismatch",
        "Share of tokens that differ in at least one layer. It may be large: one layer of many is "
        "enough.",
        metric("token mismatch"),
        percent=True,
        more=(numbers.learning_rate,),
    ),
    Chart(
        "Routes dispatched as recorded",
        "Share of recorded (token, expert) pairs that arrived. Healthy: exactly 100 % with replay; "
        "a live training has less.",
        metric("routes dispatched as recorded"),
        percent=True,
        from_zero=False,
    ),
    Chart(
        "Load of the busiest expert",
        "Its tokens divided by the mean over experts, in the layer where that is largest. "
        "Healthy: steady; a rise means that few experts do the work.",
        of_events("collected", "collection", "expert_load", max),
        "collection",
    ),
]
LOOP = [
    Chart(
        "Policy lag",
        "How many versions the sampler's policy is behind the newest of a step. Healthy: what the "
        "run means to allow; 0 is on-policy.",
        metric("update/policy lag"),
    ),
    Chart(
        "Check of each push",
        "Mean |difference of log-probs| between sampler and trainer on fixed tokens, after the "
        "sampler took a version. Healthy: below the dashed limit; above it the run stops.",
        of_events("pushed", "version", "abs_dlogp"),
        "policy version",
        log=True,
        limit=of_events("pushed", "version", "limit"),
    ),
    Chart(
        "Truth test of each collection",
        "Share of (row, layer) pairs of some rollouts whose experts differ from those of "
        "transformers under the same policy, before they are stored. Healthy: as at the start.",
        of_events("examined", "version", "mismatch"),
        "policy version",
        percent=True,
    ),
    Chart(
        "Routes that agree after a push",
        "The same check for experts, in the layer where the fewest agree. Healthy: as high as at "
        "the first version; a fall means that a router or an expert was not loaded.",
        of_events("pushed", "version", "route_agreement", min),
        "policy version",
        percent=True,
        from_zero=False,
    ),
    Chart(
        "Seconds to publish a policy",
        "What the trainer needs to write a version for the sampler. Healthy: level.",
        of_events("published", "version", "seconds"),
        "policy version",
    ),
    Chart(
        "Seconds of a collection",
        "From the end of one collection to the end of the next, on the clock. Healthy: level.",
        numbers.seconds_of_collections,
        "collection",
        more=(numbers.long_collections,),
    ),
]
PARTS = (
    ("Does the policy learn?", LEARNING),
    ("Do sampler and trainer agree?", AGREEMENT),
    ("What did the steps do?", STEPS),
    ("Do their routers agree?", ROUTING),
    ("Does the loop run well?", LOOP),
)
