"""`make bench-balance`: what guest experts do to the load, to the busiest rank, and to a step.

    python -m proof.benchmarks.balance --out build/bench/balance.json [--rounds 32] [--only EP2]

It trains on made-up routes with a given share of the load on the first rank, in three ways: without
guest slots, with slots that stay empty, and with guests. A round has a step of each way, in an
order that changes from round to round. The table has the load of the busiest rank by the mean, what
a step takes relative to the step without slots of its round (by the wall clock, in CPU time of the
busiest rank, and in CPU time of the busiest rank inside its MoE layers), and what planning and
sending cost. Exit status 1: the load after guests is above the limit of the case.

Shape suffixes (docs/glossary.md): L, R.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_r3.cpu import CPU_ARGS
from megatron_r3.data.store import Rollout, StoreInfo, write_shard
from megatron_r3.replay.routes import Routes
from proof.benchmarks.balance_ranks import GUESTS, OFF, ROLLOUTS, WAYS, timed
from proof.benchmarks.command import Command
from proof.benchmarks.dispatch_ranks import ratios
from proof.benchmarks.interval import CONFIDENCE, median_of, shown
from proof.benchmarks.machine import machine_at_start, write_results
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.trees import patched_copy, unpatched_copy


class Case(NamedTuple):
    """Ranks that share the experts, guest slots of each, and how uneven the load is.

    Attributes:
        share: of the load that the first rank has; 1 / ep is even.
        limit: the busiest rank's load by the mean must be at most that with guests.
    """

    ep: int
    slots: int
    share: float
    limit: float


CASES = {
    "EP2, 75 %, 2 slots": Case(2, 2, 0.75, 1.02),
    "EP4, 55 %, 1 slot": Case(4, 1, 0.55, 1.05),
    "EP2, even, 2 slots": Case(2, 2, 0.5, 1.02),
}
LAYERS, EXPERTS, TOPK, SEQUENCE, VOCABULARY = 2, 16, 4, 128, 64
# wide experts: their time is what guests share out
MODEL = f"""
--num-layers {LAYERS} --hidden-size 256 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --kv-channels 32 --qk-layernorm
--ffn-hidden-size 256 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
--position-embedding-type rope --rotary-base 10000 --untie-embeddings-and-output-weights
--num-experts {EXPERTS} --moe-router-topk {TOPK} --moe-ffn-hidden-size 512
--moe-token-dispatcher-type alltoall --attention-dropout 0 --hidden-dropout 0
--seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE}
--tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 8
--clip-grad 1.0 --weight-decay 0 --lr-decay-style constant --eval-iters 0 --eval-interval 1000
--num-workers 0 --seed 1234 --ckpt-format torch_dist
""".split()
HEAD = (
    f"{'case':20} {'way':7} {'max/mean':>8} {'wall':>8} {'CPU':>8} {'wall of off':29} "
    f"{'CPU of off':29} {'CPU in MoE layers of off':29} planning, guests, sent, held up"
)


def main(argv: list[str] | None = None) -> int:
    """Measure every case."""
    args = Command("balance", __doc__, "steps of each way at most", cases=CASES).parse(argv)
    machine = {**machine_at_start(), "device": "cpu, gloo"}
    rows: list[dict[str, Any]] = []
    print("the busiest rank's load by the mean; wall and CPU time of a step, and both by those")
    print(f"without slots, at {CONFIDENCE:.0%}; by micro-batch and rank: CPU time of planning,")
    print("guests in all layers, bytes sent, wall time held up by them;")
    print(f"load at start: {machine['load']}", flush=True)
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = Path(scratch)
        tree, tree_name = unpatched_copy(None, folder / "unpatched")
        patched = patched_copy(tree, folder / "patched")
        with TreeWorker(patched, preload=["megatron.training"]) as worker:
            for number, (name, case) in enumerate(args.cases.items()):
                store = write_store(folder / f"store-{number}", case)
                more = ["--expert-model-parallel-size", str(case.ep), "--rollouts", str(store)]
                more += ["--moe-router-replay-guest-slots", str(case.slots)]
                results = worker.run(
                    timed,
                    case.ep,
                    [*CPU_ARGS, *MODEL, *more],
                    args.rounds,
                    timeout_s=600 + 60 * args.rounds,
                )
                for row in summarise(results):
                    rows.append({"case": name, **case._asdict(), "tree": tree_name, **row})
                    print(_line(rows[-1]), flush=True)
    record = {**machine, "most_rounds": args.rounds, "rows": rows}
    write_results(args.out, "balance", record)
    wrong = [row for row in rows if row["way"] == GUESTS and row["load"] > row["limit"]]
    for row in wrong:
        print(
            f"error: {row['case']}: the busiest rank has {row['load']:.3f} of the mean with "
            f"guests; at most {row['limit']}",
            file=sys.stderr,
        )
    return 1 if wrong else 0


def write_store(folder: Path, case: Case) -> Path:
    """Rollouts whose routes give the first rank its share of the load; the others have the rest.

    Inside a rank experts differ too: the hottest one has several times the load of the coldest.
    """
    rng = np.random.default_rng(0)
    info = StoreInfo(
        engine="made up",
        engine_version="0",
        num_experts=EXPERTS,
        topk=TOPK,
        moe_layers=tuple(range(LAYERS)),
    )
    log_weights = _with_shares(rng.standard_normal((LAYERS, 1, EXPERTS)), case, rng)
    rollouts = []
    for index in range(ROLLOUTS):
        tokens = rng.integers(0, VOCABULARY - 1, SEQUENCE + 1).astype(np.int32)
        response = np.arange(SEQUENCE + 1) >= 2
        logprobs = np.where(response, -4.0, 0.0).astype(np.float32)
        routes = Routes.from_array(_drawn(log_weights, SEQUENCE, rng), EXPERTS)
        rollouts.append(
            Rollout(tokens, response, logprobs, float(index % 2), index // 4, 0, routes, index % 4)
        )
    write_shard(folder, info, rollouts)
    return folder


def _drawn(log_weights: np.ndarray, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Routes `[layers, tokens, top-k]`: draws without replacement, by the largest Gumbel sums."""
    noisy = log_weights + rng.gumbel(size=(LAYERS, tokens, EXPERTS))
    return noisy.argsort(axis=2)[..., -TOPK:]


def _with_shares(log_weights: np.ndarray, case: Case, rng: np.random.Generator) -> np.ndarray:
    """Log-weights of experts with which each rank has its share, found step by step."""
    rest = (1 - case.share) / (case.ep - 1)
    wanted_R = np.array([case.share] + [rest] * (case.ep - 1))
    for _ in range(30):
        drawn = _drawn(log_weights, 4096, rng)
        rank = drawn.reshape(LAYERS, -1) * case.ep // EXPERTS
        found_LR = np.stack([np.bincount(r, minlength=case.ep) / len(r) for r in rank])
        change_LR = np.log(wanted_R / found_LR)
        log_weights = log_weights + np.repeat(change_LR, EXPERTS // case.ep, axis=1)[:, None]
    return log_weights


def summarise(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row of the table for each way.

    Args:
        results: what `timed` returned on each rank; times are alike on all of them.
    """
    first = results[0]
    rows = []
    for way in WAYS:
        row: dict[str, Any] = {
            "way": way,
            "load": first["load"][way],
            "rounds": len(first["wall_s"][way]),
            "planning_ms": 1e3 * max(result["planning_s"][way] for result in results),
        }
        for name in ("wall", "cpu", "layer"):
            seconds = first[f"{name}_s"]
            row[f"{name}_ms"] = 1e3 * statistics.median(seconds[way])
            row[f"{name}_of_off"] = (
                None if way == OFF else median_of(ratios(seconds, way, OFF)).record()
            )
        if way == GUESTS:
            row["guests"] = sum(result["guests"] for result in results) / len(results)
            row["bytes"] = sum(result["bytes"] for result in results) / len(results)
            row["waiting_ms"] = 1e3 * max(result["waiting_s"] for result in results)
        rows.append(row)
    return rows


def _line(row: dict[str, Any]) -> str:
    cells = [
        shown(row[f"{name}_of_off"]) if row[f"{name}_of_off"] else ""
        for name in ("wall", "cpu", "layer")
    ]
    more = f"{row['planning_ms']:.2f} ms"
    if "guests" in row:
        more += f", {row['guests']:.1f}, {row['bytes'] / 1e6:.2f} MB, {row['waiting_ms']:.1f} ms"
    return (
        f"{row['case']:20} {row['way']:7} {row['load']:>8.3f} {row['wall_ms']:>5.0f} ms "
        f"{row['cpu_ms']:>5.0f} ms {cells[0]:29} {cells[1]:29} {cells[2]:29} {more}"
    )


if __name__ == "__main__":
    from proof.benchmarks import balance  # the ranks import by name

    sys.exit(balance.main())
