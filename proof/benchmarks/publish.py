"""`make bench-publish`: time and memory of writing a policy from inside a training.

    python -m proof.benchmarks.publish --out build/bench/publish.json [--rounds 5] [--only PP2]

Models of several sizes are written as transformers directories (`weights/write_policy.py`), in one
process and by the ranks of several layouts. The table has the time of a write, the largest part of
the model that a rank holds, and the largest growth of a rank's resident memory during the write,
also in multiples of a layer's file. Exit status 1: a rank's memory grew by more than MOST layers
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

MOST = 1.25  # the memory of a rank may grow by so many layers,
SLACK = 24 << 20  # and by so many bytes: for messages, code, and what malloc keeps
VOCABULARY = 1024
LAYOUTS = {
    "1": [],
    "TP2": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    "EP2": ["--expert-model-parallel-size", "2"],
    "PP2": ["--pipeline-model-parallel-size", "2"],
}
SIZES = [(256, 4), (512, 4), (512, 8), (512, 16), (1024, 4)]  # hidden size, layers


def model(hidden: int, layers: int) -> list[str]:
    """Megatron's arguments of a Qwen3-MoE in bfloat16, with 16 experts as wide as the model."""
    sizes = f"""
    --num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {hidden} --bf16
    --moe-ffn-hidden-size {hidden} --num-attention-heads 8 --kv-channels 64
    --vocab-size {VOCABULARY} --seq-length 32 --max-position-embeddings 64 --micro-batch-size 1
    """
    return [*CPU_ARGS, *SHAPE, *sizes.split()]


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """A row for each size and layout."""
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
    """A row from what `published` returned on each rank.

    Time and memory are medians over rounds, each of the rank with the largest value.
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


def wrong(row: Row) -> str:
    """The error of a row in which a rank's memory grew too much; "" for other rows."""
    most = MOST * row["layer"] + SLACK
    return (
        ""
        if row["memory"] <= most
        else f"a rank's memory grew by {row['memory']} bytes; the limit is {most:g}"
    )


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
    "writes of each size and layout",
    5,
)


# -- the ranks


def published(rank: int, argv: list[str], out: Path, rounds: int) -> list[Any]:
    """Write a model as a transformers directory, `rounds` times.

    Args:
        argv: Megatron's arguments.
        out: the directory; it is removed after each round.

    Returns:
        For each round: the seconds; the peak growth of this rank's resident memory, in bytes; the
        bytes of this rank's part of the model; the bytes that all ranks wrote together; and the
        bytes of the largest file of a layer.
    """
    from megatron_r3.train.launch import build_models, initialize
    from megatron_r3.weights.write_policy import write_policy

    sys.argv = ["publish.py", *argv]
    models = build_models(initialize())
    part = sum(p.nbytes for model in models for p in model.parameters())
    found = []
    for done in range(rounds + 1):
        # Give freed memory back: the write would reuse this memory, and the peak would not grow.
        ctypes.CDLL(None).malloc_trim(0)
        distributed.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # 5 resets the peak, VmHWM
        before, begun = _memory("VmRSS"), time.perf_counter()
        written = write_policy(models, out, vocab_size=VOCABULARY)
        seconds, grown = time.perf_counter() - begun, _memory("VmHWM") - before
        layers = sorted(out.glob("model-*"))[1:-1]  # without the embedding and the head
        largest = max(file.stat().st_size for file in layers)
        if done:  # the first write, which also imports and connects, does not count
            found.append((seconds, grown, part, written, largest))
        distributed.barrier()
        if rank == 0:
            shutil.rmtree(out)
    return found


def _memory(name: str) -> int:
    """The size in a line of /proc/self/status, in bytes."""
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kib) * 1024


if __name__ == "__main__":
    from proof.benchmarks import publish  # the ranks import `published` by this module's name

    sys.exit(publish.BENCH.main())
