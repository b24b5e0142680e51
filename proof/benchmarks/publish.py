"""`make bench-publish`: time and memory of writing a policy from inside a training.

    python -m proof.benchmarks.publish --out build/bench/publish.json [--rounds 5] [--only PP2]

Models of several sizes are written as transformers directories (`weights/write_policy.py`), in one
process and by the ranks of several layouts. The table has the seconds of a write, the part of the
model that a rank holds, and the memory by which its resident memory grew beside that, on the rank
where it grew most, also in files of a layer. Exit status 1: a rank needed more than MOST layers,
and SLACK bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import distributed

from megatron_r3.cpu import CPU_ARGS
from proof.benchmarks.bench import Bench, Row, number, text
from proof.benchmarks.turns import SHAPE
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


def model(hidden: int, layers: int) -> list[str]:
    """A Qwen3-MoE with 16 experts that are as wide as the model, in bfloat16."""
    sizes = f"""
    --num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {hidden} --bf16
    --moe-ffn-hidden-size {hidden} --num-attention-heads 8 --kv-channels 64
    --vocab-size {VOCABULARY} --seq-length 32 --max-position-embeddings 64 --micro-batch-size 1
    """
    return [*CPU_ARGS, *SHAPE, *sizes.split()]


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """The row of every size and layout."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        tree, name = unpatched_copy(None, Path(scratch) / "tree")
        with TreeWorker(tree, preload=["megatron.training"]) as worker:
            for hidden, layers in SIZES:
                for layout, more in args.cases.items():
                    given = ([*model(hidden, layers), *more], Path(scratch) / "policy", args.rounds)
                    found = worker.run(published, 2 if more else 1, *given, timeout_s=600)
                    case = {"hidden": hidden, "layers": layers, "layout": layout, "tree": name}
                    yield {**case, **summarise(found)}


def summarise(results: list[list[Any]]) -> Row:
    """A row of the table, from what `published` returned on each rank."""
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


def wrong(row: Row) -> str:
    """No rank may need more than its part of the model and MOST layers."""
    most = MOST * row["layer"] + SLACK
    return "" if row["memory"] <= most else f"a rank needed {row['memory']} bytes; at most {most:g}"


BENCH = Bench(
    "publish",
    __doc__,
    {
        "hidden": text("hidden"),
        "layers": text("layers"),
        "layout": text("layout"),
        **{f"{name}, MB": number(name, ".1f", 1e-6) for name in ("model", "part", "layer")},
        "memory, MB": number("memory", ".1f", 1e-6),
        "memory / layer": lambda row: f"{row['memory'] / row['layer']:.2f}",
        "wall, ms": number("wall_ms"),
    },
    measure,
    wrong,
    LAYOUTS,
    "writes of each",
    5,
)


# -- the ranks


def published(rank: int, argv: list[str], out: Path, rounds: int) -> list[Any]:
    """Write a model as a transformers directory, some times over.

    Args:
        argv: of Megatron.
        out: the directory; it is removed after each round.

    Returns:
        For each round: seconds, bytes by which this rank's resident memory grew at most, bytes of
        this rank's part of the model, and bytes of the weights that all ranks wrote together, and
        of the largest file of a layer.
    """
    from megatron_r3.train.launch import build_models, initialize
    from megatron_r3.weights.write_policy import write_policy

    sys.argv = ["publish.py", *argv]
    models = build_models(initialize())
    part = sum(p.nbytes for model in models for p in model.parameters())
    found = []
    for done in range(rounds + 1):
        # What was freed and is still resident would hide what the write needs.
        ctypes.CDLL(None).malloc_trim(0)
        distributed.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, begun = _memory("VmRSS"), time.perf_counter()
        written = write_policy(models, out, vocab_size=VOCABULARY)
        seconds, grown = time.perf_counter() - begun, _memory("VmHWM") - before
        layers = sorted(out.glob("model-*"))[1:-1]  # without the embedding and the head
        largest = max(file.stat().st_size for file in layers)
        if done:  # the first one imports, and makes connections
            found.append((seconds, grown, part, written, largest))
        distributed.barrier()
        if rank == 0:
            shutil.rmtree(out)
    return found


def _memory(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kib) * 1024


if __name__ == "__main__":
    from proof.benchmarks import publish  # the ranks import by name

    sys.exit(publish.BENCH.main())
