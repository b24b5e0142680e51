"""`make bench-dispatch`: the waits of a MoE layer and the time of a step, with and without a plan.

    python -m proof.benchmarks.dispatch --out build/bench/dispatch.json [--rounds 256] [--only CASE]

The benchmark trains in three ways on the same rollouts at the same load (the routes are those of
the live router): live, replayed without a dispatch plan, and replayed with a plan. The table has
host waits, copies and collectives for each MoE layer and pass. The table also has the time of a
step divided by that of the two live steps in the same round: wall time, and CPU time of the busiest
rank. Exit status 1: a layer with a plan waits, copies or gathers; or no wait or no copy was counted
in a layer without a plan, which means that the counting is broken.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from proof.benchmarks.bench import (
    Bench,
    Row,
    compared_to_first,
    each,
    median_ms,
    number,
    ratio,
    recomputed,
    text,
)
from proof.benchmarks.turns import Rounds, modes_of_microbatches, rig, train_in_turn
from proof.benchmarks.waits import COPIES, GATHERS, PLANS, WAITS

MODES = LIVE, REPLAY, PLAN = ("live", "replay", "plan")
ROLLOUTS, MICROBATCHES = 16, 2  # of a step; short steps, so that there can be many
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
CASES = {f"EP{ep}{' full' * full}": (ep, full) for ep in (1, 2, 4) for full in (False, True)}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """The rows of every layout."""
    with rig(ROLLOUTS) as (worker, tree, argv):
        for ep, full in args.cases.values():
            more = ["--expert-model-parallel-size", str(ep), *(FULL if full else [])]
            limit_s = 600 + 30 * args.rounds
            given = ([*argv, *more], ROLLOUTS // MICROBATCHES // ep, args.rounds)
            found = worker.run(timed, ep, *given, timeout_s=limit_s)
            yield from each(summarise(found[0]), ep=ep, recompute=full, tree=tree)


def summarise(result: dict[str, Any]) -> Iterator[Row]:
    """A row for each way, from what `timed` returned; the ratios are records of `Median`."""
    for mode, cpu_of_steps_s in result["cpu_s"].items():
        counts, cpu_s = result["counts"][mode], statistics.median(cpu_of_steps_s)
        yield {
            "mode": mode,
            **{name: counts[name] / counts["experts"] for name in (WAITS, COPIES, GATHERS)},
            PLANS: counts[PLANS] / MICROBATCHES,
            "rounds": len(result["wall_s"][mode]),
            "step_wall_ms": median_ms(result["wall_s"][mode]),
            "step_cpu_ms": 1e3 * cpu_s,
            "wall_of_live": compared_to_first(result["wall_s"], mode),
            "cpu_of_live": compared_to_first(result["cpu_s"], mode),
            "checking_share_of_cpu": result["checking_s"] / cpu_s,
            "planning_share_of_cpu": result["planning_s"] / cpu_s if mode == PLAN else None,
        }


def wrong(row: Row) -> str:
    """What is wrong with a row; empty if nothing is.

    A layer with a plan must not wait, copy or gather; a layer without a plan must wait and copy.
    """
    in_layer = sum(row[name] for name in (WAITS, COPIES, GATHERS))
    if row["mode"] != PLAN:
        return (
            ""
            if row[WAITS] >= 1 and row[COPIES] >= 1
            else "no wait or copy was counted in a layer without a plan"
        )
    kept = in_layer == 0 and row[PLANS] == (row["ep"] > 1)
    return (
        ""
        if kept
        else (
            f"with a plan: {in_layer:g} waits, copies and gathers in a layer, expected 0; "
            f"{row[PLANS]:g} gathers of the planner, expected {int(row['ep'] > 1)}"
        )
    )


BENCH = Bench(
    "dispatch",
    __doc__,
    {
        "EP": text("ep"),
        "recompute": recomputed,
        "": text("mode"),
        "host waits": number(WAITS),
        "copies": number(COPIES),
        "metadata": number(GATHERS),
        "plan": number(PLANS),
        "wall, ms": number("step_wall_ms"),
        "CPU, ms": number("step_cpu_ms"),
        "wall / live": ratio("wall_of_live"),
        "CPU / live": ratio("cpu_of_live"),
        "rounds": text("rounds"),
        "planning": number("planning_share_of_cpu", ".1%"),
        "check": number("checking_share_of_cpu", ".1%"),
    },
    measure,
    wrong,
    CASES,
    "steps of each way at most, in a layout",
    default_rounds=256,
)


# -- the ranks


@dataclass
class Spent:
    """What planning and checking took on this rank.

    Attributes:
        planning: CPU seconds of planning micro-batches.
        plans: how many micro-batches were planned.
        checking: CPU seconds of the guard, which checks a step before its update (train/guard.py).
    """

    planning: float = 0.0
    plans: int = 0
    checking: float = 0.0


def timed(rank: int, argv: list[str], microbatch: int, most: int) -> dict[str, Any]:
    """Train; the steps take the ways in turn."""
    rounds, spent = Rounds(most, MODES), Spent()
    parts = _parts_in_turn(spent, rounds)
    result = train_in_turn(argv, rounds, parts, batch=(microbatch, ROLLOUTS), counts=Counter())
    return {
        **result,
        "planning_s": spent.planning / (spent.plans / MICROBATCHES),
        "checking_s": spent.checking / rounds.done,
    }


def _parts_in_turn(spent: Spent, rounds: Rounds) -> Any:
    """The `Parts` of a training whose steps take the three ways in turn."""
    from megatron_r3.replay.planner import Planner
    from megatron_r3.train.dataset import SEQUENCE_FIELDS
    from megatron_r3.train.guard import StepGuard
    from megatron_r3.train.lookahead import Prepared, Preparer
    from megatron_r3.train.step import Parts

    modes = modes_of_microbatches(rounds)

    class TurnedPreparer(Preparer):
        def prepare(self, whole: Any, with_plan: bool) -> Prepared:
            mode = next(modes)
            if mode == LIVE:
                return Prepared(self.layout.split(whole, SEQUENCE_FIELDS), [], None, None)
            return super().prepare(whole, with_plan and mode == PLAN)

    class TimedPlanner(Planner):
        def plan(self, routes: Any) -> Any:
            begin = time.thread_time()
            plan = super().plan(routes)
            spent.planning += time.thread_time() - begin
            spent.plans += 1
            return plan

    class TimedGuard(StepGuard):
        def add_loss(self, *args: Any) -> None:
            begin = time.thread_time()
            super().add_loss(*args)
            spent.checking += time.thread_time() - begin

        def check(self, *args: Any) -> None:
            begin = time.thread_time()
            super().check(*args)
            spent.checking += time.thread_time() - begin

    return Parts(preparer=TurnedPreparer, planner=TimedPlanner, guard=TimedGuard)


if __name__ == "__main__":
    from proof.benchmarks import dispatch  # the ranks import `timed` by this module's name

    sys.exit(dispatch.BENCH.main())
