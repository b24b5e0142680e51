"""`make bench-update`: what the pass of the old policy costs a collection of rollouts.

    python -m proof.benchmarks.update --out build/bench/update.json [--rounds 32] [--only "EP2 N4"]

It trains on collections of 2 and of 4 mini-steps, in three ways: the sampler is the old policy, so
that there is no pass; the trainer is (`--rollouts-old-policy trainer`), so that a forward-only pass
goes over each collection; and the same with the routes of that pass (R2). A round has a collection
of each way, in an order that changes from round to round. The table has what a collection takes
relative to the first way's of its round, by the wall clock and in CPU time of the busiest rank, and
what is counted: forward passes of the micro-batches, and host waits of a MoE layer in them. Exit
status 1: the counts are not those of one pass more.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from proof.benchmarks.command import Command
from proof.benchmarks.dispatch import rig
from proof.benchmarks.dispatch_ranks import ratios
from proof.benchmarks.interval import CONFIDENCE, median_of, shown
from proof.benchmarks.machine import machine_at_start, write_results
from proof.benchmarks.update_ranks import PASSES, SAMPLER, WAYS, timed
from proof.benchmarks.waits import WAITS

CASES = {f"EP{ep} N{mini_steps}": (ep, mini_steps) for ep in (1, 2) for mini_steps in (2, 4)}
HEAD = (
    f"{'EP':>2} {'N':>2} {'old policy':12} {'passes':>6} {WAITS:>10} {'wall':>8} {'CPU':>8} "
    f"{'wall of sampler':29} {'CPU of sampler':29}"
)


def main(argv: list[str] | None = None) -> int:
    """Measure every case."""
    command = Command("update", __doc__, "collections of each way at most", cases=CASES)
    args = command.parse(argv)
    machine = {**machine_at_start(), "device": "cpu, gloo"}
    rows = []
    print("by micro-batch: forward passes; by MoE layer and pass: host waits; wall and CPU time")
    print("of a collection of N mini-steps, and both by those where the sampler is the old")
    print(f"policy, at {CONFIDENCE:.0%}; load at start: {machine['load']}", flush=True)
    print(HEAD, flush=True)
    with rig() as (worker, name, argv_of_rig):
        for ep, mini_steps in args.cases.values():
            argv_of_case = [*argv_of_rig, "--expert-model-parallel-size", str(ep)]
            timeout_s = 600 + 60 * args.rounds
            results = worker.run(
                timed, ep, argv_of_case, mini_steps, args.rounds, timeout_s=timeout_s
            )
            for row in summarise(results[0]):
                rows.append({"ep": ep, "mini_steps": mini_steps, "tree": name, **row})
                print(_line(rows[-1]), flush=True)
    record = {**machine, "most_rounds": args.rounds, "rows": rows}
    write_results(args.out, "update", record)
    wrong = [row for row in rows if not counts_hold(row)]
    for row in wrong:
        print(
            f"error: EP {row['ep']}, {row['mini_steps']} mini-steps, {row['way']}: "
            f"{row[PASSES]:g} forward passes of a micro-batch, {row[WAITS]:g} host waits",
            file=sys.stderr,
        )
    return 1 if wrong else 0


def counts_hold(row: dict[str, Any]) -> bool:
    """Each micro-batch goes forward once more in the pass, which alone waits: it has no plan.

    A layer that waits in one of two passes has 0.5 host waits a pass.
    """
    if row["way"] == SAMPLER:
        return row[PASSES] == 1 and row[WAITS] == 0
    return row[PASSES] == 2 and row[WAITS] == 0.5


def summarise(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of the table for each way.

    Args:
        result: what `timed` returned.

    Returns:
        Rows whose `wall_of_sampler` and `cpu_of_sampler` are records of `Median`; the sampler's own
        row has None there.
    """
    rows = []
    for way in WAYS:
        counts = result["counts"][way]
        passes = counts["experts"]
        row: dict[str, Any] = {
            "way": way,
            PASSES: passes / result["layers_and_microbatches"],
            WAITS: counts[WAITS] / passes,
            "rounds": len(result["wall_s"][way]),
        }
        for name in ("wall", "cpu"):
            seconds = result[f"{name}_s"]
            of_sampler = None
            if way != SAMPLER:
                of_sampler = median_of(ratios(seconds, way, SAMPLER)).record()
            row[f"collection_{name}_ms"] = 1e3 * statistics.median(seconds[way])
            row[f"{name}_of_sampler"] = of_sampler
        rows.append(row)
    return rows


def _line(row: dict[str, Any]) -> str:
    wall, cpu = (
        shown(row[name]) if row[name] else "" for name in ("wall_of_sampler", "cpu_of_sampler")
    )
    return (
        f"{row['ep']:>2} {row['mini_steps']:>2} {row['way']:12} {row[PASSES]:>6.2f} "
        f"{row[WAITS]:>10.2f} {row['collection_wall_ms']:>5.0f} ms "
        f"{row['collection_cpu_ms']:>5.0f} ms {wall:29} {cpu:29}"
    )


if __name__ == "__main__":
    from proof.benchmarks import update  # the ranks import by name

    sys.exit(update.main())
