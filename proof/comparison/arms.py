"""What is compared: regimes, which say how far the sampler is from the trainer, and arms, which say
what the trainer does about it.

A run is one arm in one regime with one seed. The trainer computes in float32 in all of them, and
takes its own log-probs from before the first update on a collection for the old policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SEEDS, COLLECTIONS = 3, 60
NOISE = 0.7
LAG = 4


@dataclass(frozen=True)
class Arm:
    """What the trainer does about the mismatch.

    Attributes:
        key: names directories.
        name: what tables and pictures call it.
        arguments: of Megatron, beside those that all arms share (`policy.UPDATE`).
    """

    key: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Regime:
    """How the sampler's numbers differ from the trainer's.

    Attributes:
        key: names directories.
        name: what tables and pictures call it.
        dtype: of the published policy, in which the sampler then computes.
        degrade: the lines of the config's table [degrade].
        lag: of the config: collection c is sampled by policy c - lag.
        arms: the keys of the arms that run in it.
    """

    key: str
    name: str
    dtype: str
    degrade: str
    lag: int
    arms: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One run of the comparison."""

    regime: Regime
    arm: Arm
    seed: int

    @property
    def key(self) -> str:
        """Its directory below that of all runs, for example `noise/r3-0`."""
        return f"{self.regime.key}/{self.arm.key}-{self.seed}"


_GSPO = "--rollouts-loss gspo --rollouts-clip-eps 0.003 --rollouts-clip-eps-high 0.004"
_GRPO = "--rollouts-loss grpo --rollouts-clip-eps 0.2"
_TIS = "--rollouts-correction tis --rollouts-correction-bounds 2"
_R3 = "--moe-router-replay"
_R2 = "--moe-router-replay --moe-router-replay-source old-policy"
ARMS = {
    arm.key: arm
    for arm in (
        Arm("none", "no mismatch", _GRPO),
        Arm("live", "live", _GRPO),
        Arm("r3", "R3", f"{_GRPO} {_R3}"),
        Arm("r2", "R2", f"{_GRPO} {_R2}"),
        Arm("tis", "TIS", f"{_GRPO} {_TIS}"),
        Arm("r3-tis", "R3 + TIS", f"{_GRPO} {_R3} {_TIS}"),
        Arm("gspo-r3", "GSPO + R3", f"{_GSPO} {_R3}"),
    )
}
_ALL = ("live", "r3", "r2", "tis", "r3-tis", "gspo-r3")
CONTROL = "control"  # the regime without any mismatch
STALE = "stale"
REGIMES = {
    regime.key: regime
    for regime in (
        # Nothing is to be replayed or corrected where sampler and trainer compute the same.
        Regime(CONTROL, "no mismatch", "float32", "", 0, ("none",)),
        Regime("bf16", "bfloat16", "bfloat16", "", 0, _ALL),
        Regime("fp8", "float8", "bfloat16", "fp8 = true", 0, _ALL),
        Regime("noise", f"noise {NOISE}", "bfloat16", f"router_noise = {NOISE}", 0, _ALL),
        # "none" here is staleness alone: float32 on both sides, and rollouts that are as old.
        Regime(STALE, f"{LAG} versions old", "bfloat16", "", LAG, ("none", *_ALL)),
    )
}


def runs_of(only: str = "", seeds: int = SEEDS) -> list[Run]:
    """The runs of the comparison, seed by seed, so that one seed of everything comes first.

    Args:
        only: keys of regimes, or of an arm in a regime, with commas between them, such as
            `noise/live,noise/r3`; empty for all.
        seeds: how many seeds each arm has.

    Raises:
        ValueError: there is no such regime or arm.
    """
    runs = list(_all(seeds))
    if not only:
        return runs
    names = set(only.split(","))
    if unknown := names - {name for run in runs for name in _names(run)}:
        raise ValueError(
            f"--only {only}: there is no {sorted(unknown)[0]!r}; the regimes are "
            f"{', '.join(REGIMES)}, and an arm of one is, for example, noise/r3: the arms are "
            f"{', '.join(ARMS)}"
        )
    return [run for run in runs if names & _names(run)]


def _all(seeds: int) -> Iterator[Run]:
    for seed in range(seeds):
        for regime in REGIMES.values():
            for key in regime.arms:
                yield Run(regime, ARMS[key], seed)


def _names(run: Run) -> set[str]:
    """What selects a run."""
    return {run.regime.key, f"{run.regime.key}/{run.arm.key}"}


def dtype_of(run: Run) -> str:
    """In what the sampler computes: the arm without a mismatch computes as the trainer does."""
    return "float32" if run.arm.key == "none" else run.regime.dtype
