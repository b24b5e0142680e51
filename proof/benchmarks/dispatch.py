"""`make bench-dispatch`: what a MoE layer waits for and a step costs, with and without a plan.

    python -m proof.benchmarks.dispatch --out build/bench/dispatch.json [--rounds 32] [--only CASE]

It trains in three ways on the same rollouts at the same load (the routes are those of the live
router): live, replayed without a plan, and replayed with one. A round has a step of each way, in an
order that changes from round to round. The table has host waits, copies and collectives for each
MoE layer and pass, and what a step takes relative to the live step of its round: by the wall clock,
and in CPU time of the busiest rank. The rounds of a layout end when every ratio's interval is
narrower than its difference from 1, or at --rounds; a ratio that cannot be told from 1 is not
shown. Exit status 1: a layer with a plan waits for something after all.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_r3.cpu import CPU_ARGS
from megatron_r3.data.store import Rollout, StoreInfo, write_shard
from megatron_r3.replay.routes import Routes
from proof.benchmarks.command import Command
from proof.benchmarks.dispatch_ranks import MODES, Recorded, ratios, record, timed
from proof.benchmarks.interval import CONFIDENCE, median_of, shown
from proof.benchmarks.machine import machine_at_start, write_results
from proof.benchmarks.waits import COPIES, GATHERS, PLANS, WAITS
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.trees import patched_copy, unpatched_copy

FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
CASES = {f"EP{ep}{' full' * full}": (ep, full) for ep in (1, 2, 4) for full in (False, True)}
# a Qwen3-MoE of 4 layers, 16 experts, top-4
MODEL = """
--num-layers 4 --hidden-size 128 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --kv-channels 32 --qk-layernorm
--ffn-hidden-size 256 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
--position-embedding-type rope --rotary-base 10000 --untie-embeddings-and-output-weights
--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 64
--moe-token-dispatcher-type alltoall --attention-dropout 0 --hidden-dropout 0
--seq-length 32 --max-position-embeddings 64
--tokenizer-type NullTokenizer --vocab-size 64 --make-vocab-size-divisible-by 8
--clip-grad 1.0 --weight-decay 0 --lr-decay-style constant --eval-iters 0 --eval-interval 1000
--num-workers 0 --seed 1234 --log-interval 1 --ckpt-format torch_dist
""".split()
HEAD = (
    f"{'EP':>2} {'recompute':9} {'':7} {WAITS:>10} {'copies':>7} {'metadata':>8} {'plan':>5} "
    f"{'wall':>8} {'CPU':>8} {'wall of live':29} {'CPU of live':29} {'check':>7} planning"
)


def main(argv: list[str] | None = None) -> int:
    """Measure every layout."""
    rounds = "steps of each way at most, in a layout"
    args = Command("dispatch", __doc__, rounds, cases=CASES).parse(argv)
    machine = {**machine_at_start(), "device": "cpu, gloo"}
    rows = []
    print("by MoE layer and pass: host waits, copies to the host, metadata collectives;")
    print("by microbatch: collectives of the plan; wall and CPU time of a step, and both by")
    print(f"those of live at {CONFIDENCE:.0%}; load at start: {machine['load']}", flush=True)
    print(HEAD, flush=True)
    with rig() as (worker, name, argv_of_rig):
        for ep, recompute in args.cases.values():
            more = ["--expert-model-parallel-size", str(ep), *(FULL if recompute else [])]
            timeout_s = 600 + 30 * args.rounds
            results = worker.run(timed, ep, [*argv_of_rig, *more], args.rounds, timeout_s=timeout_s)
            for row in summarise(results[0]):
                rows.append({"ep": ep, "recompute": recompute, "tree": name, **row})
                print(_line(rows[-1]), flush=True)
    record = {**machine, "most_rounds": args.rounds, "rows": rows}
    write_results(args.out, "dispatch", record)
    wrong = [row for row in rows if not _counts_hold(row)]
    for row in wrong:
        print(f"error: EP {row['ep']}, {row['mode']}: not what a plan promises", file=sys.stderr)
    return 1 if wrong else 0


def _counts_hold(row: dict[str, Any]) -> bool:
    """With a plan nothing waits, is copied or gathered in a layer; without one, something does."""
    per_layer = sum(row[name] for name in (WAITS, COPIES, GATHERS))
    if row["mode"] == "plan":
        return per_layer == 0 and row[PLANS] == (row["ep"] > 1)
    return row[WAITS] >= 1 and row[COPIES] >= 1


@contextmanager
def rig() -> Iterator[tuple[TreeWorker, str, list[str]]]:
    """A worker on a patched tree, the tree's name, and arguments that train the model on rollouts.

    The routes of the rollouts are those of the live router.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = Path(scratch)
        tree, name = unpatched_copy(None, folder / "unpatched")
        patched = patched_copy(tree, folder / "patched")
        argv = [*CPU_ARGS, *MODEL]
        with TreeWorker(patched, preload=["megatron.training"]) as worker:
            (recorded,) = worker.run(record, 1, argv, folder / "checkpoint", timeout_s=300)
            store = write_store(recorded, folder / "store")
            load = ["--load", str(folder / "checkpoint"), "--rollouts", str(store)]
            yield worker, name, [*argv, *load]


def write_store(recorded: Recorded, folder: Path) -> Path:
    """Rollouts whose routes are the live router's own."""
    info = StoreInfo(
        engine="recorded live",
        engine_version="0",
        num_experts=recorded.num_experts,
        topk=recorded.routes[0].shape[2],
        moe_layers=tuple(range(len(recorded.routes[0]))),
    )
    rollouts = [
        Rollout(
            tokens,
            response,
            logprobs,
            float(index % 2),
            index // 4,
            0,
            Routes.from_array(ids, recorded.num_experts),
            index % 4,
        )
        for index, (tokens, response, logprobs, ids) in enumerate(recorded.rollouts())
    ]
    write_shard(folder, info, rollouts)
    return folder


def summarise(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of the table for each way to train: live, replayed, replayed with a plan.

    Args:
        result: what `timed` returned.

    Returns:
        Rows whose `wall_of_live` and `cpu_of_live` are records of `Median`; live has None there.
    """
    rows = []
    for mode in MODES:
        counts = result["counts"][mode]
        wall_s, cpu_s = (statistics.median(result[name][mode]) for name in ("wall_s", "cpu_s"))
        row = {
            "mode": mode,
            **{name: counts[name] / result["layer_passes"] for name in (WAITS, COPIES, GATHERS)},
            PLANS: result["plan_collectives"] if mode == "plan" else 0.0,
            "rounds": len(result["wall_s"][mode]),
            "step_wall_ms": 1e3 * wall_s,
            "step_cpu_ms": 1e3 * cpu_s,
            "wall_of_live": _ratio(result["wall_s"], mode),
            "cpu_of_live": _ratio(result["cpu_s"], mode),
            "checking_share_of_cpu": result["checking_s"] / cpu_s,
        }
        if mode == "plan":
            row["planning_share_of_cpu"] = result["planning_s"] / cpu_s
            row["planning_us_per_1000_tokens"] = 1e9 * result["planning_s"] / result["tokens"]
        rows.append(row)
    return rows


def _ratio(seconds: dict[str, list[float]], mode: str) -> dict[str, Any] | None:
    return None if mode == MODES[0] else median_of(ratios(seconds, mode, MODES[0])).record()


def _line(row: dict[str, Any]) -> str:
    wall, cpu = (shown(row[name]) if row[name] else "" for name in ("wall_of_live", "cpu_of_live"))
    planning = ""
    if "planning_share_of_cpu" in row:
        planning = (
            f"{row['planning_share_of_cpu']:.1%}, "
            f"{row['planning_us_per_1000_tokens']:.0f} us/1000 tok"
        )
    return (
        f"{row['ep']:>2} {'full' if row['recompute'] else 'none':9} {row['mode']:7} "
        f"{row[WAITS]:>10.2f} {row[COPIES]:>7.2f} {row[GATHERS]:>8.2f} {row[PLANS]:>5.2f} "
        f"{row['step_wall_ms']:>5.0f} ms {row['step_cpu_ms']:>5.0f} ms {wall:29} {cpu:29} "
        f"{row['checking_share_of_cpu']:>7.2%} {planning}"
    )


if __name__ == "__main__":
    from proof.benchmarks import dispatch  # the ranks import by name

    sys.exit(dispatch.main())
