"""`make bench-publish`: time and memory of writing a policy from inside a training.

    python -m proof.benchmarks.publish --out build/bench/publish.json [--rounds 5] [--only PP2]

Models of several sizes are written as transformers directories (`weights/write_policy.py`), in one
process and by the ranks of several layouts. The table has the seconds of a write, the part of the
model that a rank holds, and the memory by which its resident memory grew beside that, on the rank
where it grew most, also in files of a layer. Exit status 1: a rank needed more than MOST layers,
and SLACK bytes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatron_r3.cpu import CPU_ARGS
from proof.benchmarks.command import Command
from proof.benchmarks.machine import machine_at_start, write_results
from proof.benchmarks.publish_ranks import published
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.trees import unpatched_copy

MOST = 1.25  # layers of memory beside a rank's part
SLACK = 24 << 20  # bytes of memory that are no layer's: messages, code, what malloc keeps
VOCABULARY = 1024
LAYOUTS = {
    "1": [],
    "TP2": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    "EP2": ["--expert-model-parallel-size", "2"],
    "PP2": ["--pipeline-model-parallel-size", "2"],
}
SIZES = [(256, 4), (512, 4), (512, 8), (512, 16), (1024, 4)]  # hidden size, layers
HEAD = (
    f"{'hidden':>6} {'layers':>6} {'layout':6} {'model':>9} {'part':>9} {'layer':>9} "
    f"{'memory':>9} {'in layers':>9} {'wall':>9}"
)


def model(hidden: int, layers: int) -> list[str]:
    """A Qwen3-MoE with 16 experts that are as wide as the model, in bfloat16."""
    return f"""
    --num-layers {layers} --hidden-size {hidden} --num-attention-heads 8
    --group-query-attention --num-query-groups 2 --kv-channels 64 --qk-layernorm --bf16
    --ffn-hidden-size {hidden} --normalization RMSNorm --norm-epsilon 1e-6 --swiglu
    --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
    --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size {hidden}
    --moe-token-dispatcher-type alltoall --seq-length 32 --max-position-embeddings 64
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 8
    --micro-batch-size 1
    """.split()


def main(argv: list[str] | None = None) -> int:
    """Measure every size and layout."""
    args = Command("publish", __doc__, "writes of each", 5, LAYOUTS).parse(argv)
    machine = {**machine_at_start(), "device": "cpu, gloo"}
    print(f"sizes in MB, medians of {args.rounds}; load at start: {machine['load']}", flush=True)
    print(HEAD, flush=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        tree, name = unpatched_copy(None, Path(scratch) / "tree")
        with TreeWorker(tree, preload=["megatron.training"]) as worker:
            for hidden, layers in SIZES:
                for layout, more in args.cases.items():
                    given = [*CPU_ARGS, *model(hidden, layers), *more]
                    out, ranks = Path(scratch) / "policy", 2 if more else 1
                    results = worker.run(
                        published, ranks, given, VOCABULARY, out, args.rounds, timeout_s=600
                    )
                    case = {"hidden": hidden, "layers": layers, "layout": layout, "tree": name}
                    rows.append({**case, **summarise(results)})
                    print(_line(rows[-1]), flush=True)
    record = {**machine, "rounds": args.rounds, "rows": rows}
    write_results(args.out, "publish", record)
    wrong = [row for row in rows if not memory_holds(row)]
    for row in wrong:
        print(
            f"error: hidden {row['hidden']}, {row['layers']} layers, {row['layout']}: a rank "
            f"needed {row['memory']} bytes for layers of {row['layer']} bytes",
            file=sys.stderr,
        )
    return 1 if wrong else 0


def memory_holds(row: dict[str, Any]) -> bool:
    """Whether no rank needed more than its part of the model and MOST layers."""
    return row["memory"] <= MOST * row["layer"] + SLACK


def summarise(results: list[list[Any]]) -> dict[str, Any]:
    """A row of the table.

    Args:
        results: what `published` returned on each rank.
    """
    rounds = [[of_rank[i] for of_rank in results] for i in range(len(results[0]))]
    walls = [max(seconds for seconds, *_ in of_round) for of_round in rounds]
    grown = [max(memory for _, memory, *_ in of_round) for of_round in rounds]
    return {
        "wall_ms": 1e3 * statistics.median(walls),
        "memory": int(statistics.median(grown)),
        "part": max(part for _, _, part, *_ in rounds[0]),
        "model": rounds[0][0][3],
        "layer": rounds[0][0][4],
    }


def _line(row: dict[str, Any]) -> str:
    sizes = (f"{row[name] / 1e6:>9.1f}" for name in ("model", "part", "layer", "memory"))
    return (
        f"{row['hidden']:>6} {row['layers']:>6} {row['layout']:6} {' '.join(sizes)} "
        f"{row['memory'] / row['layer']:>9.2f} {row['wall_ms']:>6.0f} ms"
    )


if __name__ == "__main__":
    from proof.benchmarks import publish  # the ranks import by name

    sys.exit(publish.main())
