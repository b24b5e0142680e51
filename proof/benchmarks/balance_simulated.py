"""`make bench-balance-simulated`: guest experts on ranks and models that are not here.

    python -m proof.benchmarks.balance_simulated --out FILE.json [--only low]

Nothing of it is measured but the time of planning: rollouts with the shape of two models are drawn,
and `megatron_r3/balance/skew.py`, which is `rollouts skew`, works out the load of the busiest rank
by the mean. How popular experts are is made up. An expert's weight in a layer is the exponential of
three normal numbers: one of the model, which lasts, one of the prompt, and one of the rollout. The
sizes of these parts are chosen so that the skews are in the range of those that others report for
real models (docs/balance.md, "What others do"). For a store of yours ask `rollouts skew`.

Shape suffixes (docs/glossary.md): E, L, M, R.
"""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple

import numpy as np

from megatron_r3.balance.moves import plan_moves
from megatron_r3.balance.places import place_tokens
from megatron_r3.balance.skew import SkewPlan, sizes_of_loads
from proof.benchmarks.command import Command
from proof.benchmarks.machine import machine_at_start, write_results

ROLLOUTS, GROUP, PER_RANK = 1024, 16, 4  # rollouts of a prompt are neighbours, as in a store
MEAN_TOKENS, SHORTEST, LONGEST = 4096, 256, 16384
RUN = 8  # neighbouring tokens choose alike: so many have the same routes
SIZES, NODE = (8, 16, 32, 64), 8


class Shape(NamedTuple):
    """A model's MoE layers, its experts, and how many of them a token takes."""

    layers: int
    experts: int
    topk: int


class Parts(NamedTuple):
    """Standard deviations of the parts of the logarithm of an expert's weight."""

    model: float
    prompt: float
    rollout: float


QWEN, DEEPSEEK = Shape(48, 128, 8), Shape(58, 256, 8)
CASES = {
    "Qwen3-30B-A3B, high": (QWEN, Parts(1.17, 0.45, 0.3)),
    "Qwen3-30B-A3B, mostly of the model": (QWEN, Parts(0.83, 0.3, 0.2)),
    "Qwen3-30B-A3B, mostly of the prompt": (QWEN, Parts(0.64, 0.75, 0.5)),
    "DeepSeek-V3, low": (DEEPSEEK, Parts(0.27, 0.2, 0.15)),
}


def main(argv: list[str] | None = None) -> int:
    """Simulate every case."""
    command = Command("balance_simulated", __doc__, cases=CASES)
    command.add_argument("--rollouts", type=int, default=ROLLOUTS)
    args = command.parse(argv)
    if args.rollouts % GROUP:
        command.error(f"--rollouts {args.rollouts}: a multiple of {GROUP}")
    sizes = [ep for ep in SIZES if ep * PER_RANK <= args.rollouts]
    if not sizes:
        command.error(f"--rollouts {args.rollouts}: at least {SIZES[0] * PER_RANK}")
    machine = machine_at_start()
    rows: list[dict[str, Any]] = []
    print("SIMULATED: the busiest rank's load by the mean, of made-up rollouts", flush=True)
    print(f"{'case':36} EP  store order  shuffled  1 slot  2 slots  2 slots in a node  planning")
    for name, (shape, parts) in args.cases.items():
        load_MLE = draw_loads(shape, parts, args.rollouts)
        for row in simulate(load_MLE, sizes):
            rows.append({"case": name, **row})
            print(_line(rows[-1]), flush=True)
    found = {**machine, "simulated": True, "rollouts": args.rollouts, "rows": rows}
    write_results(args.out, "balance-simulated", found)
    return 0


def draw_loads(shape: Shape, parts: Parts, rollouts: int, seed: int = 0) -> np.ndarray:
    """How many tokens of each rollout take each expert, int64 `[M, L, E]`."""
    rng = np.random.default_rng(seed)
    size_LE = shape.layers, shape.experts
    of_model_LE = parts.model * rng.standard_normal(size_LE)
    load_MLE = np.empty((rollouts, *size_LE), np.int64)
    for begin in range(0, rollouts, GROUP):
        of_prompt_LE = of_model_LE + parts.prompt * rng.standard_normal(size_LE)
        length_of_prompt = rng.normal(0, 0.7)
        for rollout in range(begin, begin + GROUP):
            weight_LE = np.exp(of_prompt_LE + parts.rollout * rng.standard_normal(size_LE))
            length = MEAN_TOKENS * np.exp(length_of_prompt + rng.normal(0, 0.35) - 0.3)
            runs = int(np.clip(length, SHORTEST, LONGEST)) // RUN
            load_MLE[rollout] = RUN * rng.binomial(runs, chances(weight_LE, shape.topk))
    return load_MLE


def chances(weight_LE: np.ndarray, topk: int) -> np.ndarray:
    """How likely a token takes each expert, float64 `[L, E]`; they sum to top-k in each layer.

    Draws without replacement are a race of exponential clocks: a clock of rate w has rung by the
    time t with the chance 1 - exp(-w t). The time at which top-k clocks have rung on average is
    found by bisection.
    """
    low, high = (np.full((len(weight_LE), 1), bound) for bound in (1e-9, 1e9))
    for _ in range(60):
        middle = np.sqrt(low * high)
        is_early = (1 - np.exp(-middle * weight_LE)).sum(1, keepdims=True) < topk
        low, high = np.where(is_early, middle, low), np.where(is_early, high, middle)
    return 1 - np.exp(-low * weight_LE)


def simulate(load_MLE: np.ndarray, sizes: list[int]) -> list[dict[str, Any]]:
    """A row of the table for each size of the expert-parallel group."""
    plan = SkewPlan(ep=sizes, slots=(0, 1, 2), micro_batch_size=PER_RANK)
    in_node = SkewPlan(ep=sizes, slots=(2,), micro_batch_size=PER_RANK, domain=NODE)
    rows = []
    for anywhere, near in zip(
        sizes_of_loads(load_MLE, plan), sizes_of_loads(load_MLE, in_node), strict=True
    ):
        ep = anywhere["ep"]
        rows.append(
            {
                "ep": ep,
                "store": anywhere["store"]["0"]["all"],
                "shuffled": anywhere["shuffled"]["0"]["all"],
                "1 slot": anywhere["store"]["1"]["all"],
                "2 slots": anywhere["store"]["2"]["all"],
                "2 slots in a node": near["store"]["2"]["all"],
                "guests": anywhere["store"]["2"]["guests"],
                "planning_ms": 1e3 * planning_s(load_MLE, ep),
            }
        )
    return rows


def planning_s(load_MLE: np.ndarray, ep: int) -> float:
    """CPU seconds of planning a micro-batch with two slots, all layers: the least of five."""
    counts_RLE = load_MLE[: ep * PER_RANK].reshape(ep, PER_RANK, *load_MLE.shape[1:]).sum(1)
    times = []
    for _ in range(5):
        begin = time.thread_time()
        place_tokens(counts_RLE, plan_moves(counts_RLE.sum(0), ep, 2), 2, 0)
        times.append(time.thread_time() - begin)
    return min(times)


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['case']:36} {row['ep']:2}  {row['store']:11.2f}  {row['shuffled']:8.2f}  "
        f"{row['1 slot']:6.2f}  {row['2 slots']:7.2f}  {row['2 slots in a node']:17.2f}  "
        f"{row['planning_ms']:.0f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
