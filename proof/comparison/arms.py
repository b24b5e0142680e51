"""The regimes and the arms of the comparison.

A regime says how the sampler's numbers differ from the trainer's. An arm says what the trainer does
against the difference. A run is one arm in one regime with one seed. In every run the trainer
computes in float32, and its policy before the first update on a collection is the old policy.
"""

from __future__ import annotations

from typing import NamedTuple

from proof.comparison.degrade import NOISE

SEEDS, COLLECTIONS = 3, 60
LAG = 4


class Arm(NamedTuple):
    """A name, and Megatron's arguments beside those that all arms share (`run.UPDATE`)."""

    name: str
    arguments: str


class Regime(NamedTuple):
    """How the sampler's numbers differ from the trainer's.

    Attributes:
        name: what tables and pictures call it.
        dtype: the dtype of the published policy, in which the sampler computes.
        degrade: the function of degrade.py that changes the sampler; empty for none.
        lag: the field `lag` of the config: collection c is sampled by policy c - lag.
        arms: the keys of the arms that run in this regime.
    """

    name: str
    dtype: str
    degrade: str
    lag: int
    arms: tuple[str, ...]


class Run(NamedTuple):
    """One run of the comparison: keys of `REGIMES` and `ARMS`, and a seed."""

    regime: str
    arm: str
    seed: int

    @property
    def key(self) -> str:
        """The directory of this run, below that of all runs, for example `noise/r3-0`."""
        return f"{self.regime}/{self.arm}-{self.seed}"

    @property
    def dtype(self) -> str:
        """The dtype of the sampler; in the arm "none" it is that of the trainer, float32."""
        return "float32" if self.arm == "none" else REGIMES[self.regime].dtype


_GRPO = "--rollouts-loss grpo --rollouts-clip-eps 0.2"
_GSPO = "--rollouts-loss gspo --rollouts-clip-eps 0.003 --rollouts-clip-eps-high 0.004"
_TIS = "--rollouts-correction tis --rollouts-correction-bounds 2"
_R3 = "--moe-router-replay"
ARMS = {
    "none": Arm("no mismatch", _GRPO),
    "live": Arm("live", _GRPO),
    "r3": Arm("R3", f"{_GRPO} {_R3}"),
    "r2": Arm("R2", f"{_GRPO} {_R3} --moe-router-replay-source old-policy"),
    "tis": Arm("TIS", f"{_GRPO} {_TIS}"),
    "r3-tis": Arm("R3 + TIS", f"{_GRPO} {_R3} {_TIS}"),
    "gspo-r3": Arm("GSPO + R3", f"{_GSPO} {_R3}"),
}
_ALL = ("live", "r3", "r2", "tis", "r3-tis", "gspo-r3")
REGIMES = {
    # One arm: if sampler and trainer compute the same, there is nothing to replay or correct.
    "control": Regime("no mismatch", "float32", "", 0, ("none",)),
    "bf16": Regime("bfloat16", "bfloat16", "", 0, _ALL),
    "fp8": Regime("float8", "bfloat16", "fp8", 0, _ALL),
    "noise": Regime(f"noise {NOISE}", "bfloat16", "noise", 0, _ALL),
    # In this regime the arm "none" shows staleness alone: sampler and trainer compute in float32.
    "stale": Regime(f"{LAG} versions old", "bfloat16", "", LAG, ("none", *_ALL)),
}


def runs_of(only: str = "") -> list[Run]:
    """The runs of the comparison: first all runs with the first seed, then those with the next.

    Args:
        only: regimes, or arms in a regime, by their keys and with commas between them, such as
            `bf16,noise/live,noise/r3`; empty for all.

    Raises:
        ValueError: there is no such regime or arm.
    """
    runs = [
        Run(regime, arm, seed)
        for seed in range(SEEDS)
        for regime in REGIMES
        for arm in REGIMES[regime].arms
    ]
    if not only:
        return runs
    wanted, of_runs = {*only.split(",")}, [{run.regime, f"{run.regime}/{run.arm}"} for run in runs]
    if unknown := wanted.difference(*of_runs):
        raise ValueError(
            f"--only {only}: there is no {min(unknown)!r}; the regimes are {', '.join(REGIMES)}; "
            f"write an arm in a regime as noise/r3; the arms are {', '.join(ARMS)}"
        )
    return [run for run, names in zip(runs, of_runs, strict=True) if names & wanted]
