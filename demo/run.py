"""The demo: `python -m demo.run --megatron TREE [--sampler SAMPLER]`.

A tiny Qwen3-MoE learns to sort digits in Megatron, a real engine samples it with routes and
log-probs, and Megatron trains on those rollouts, once live and once replayed.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo import report
from demo.collect import ENGINES, NUM_PROMPTS
from demo.process import Failed
from demo.stages import WORLD_SIZE, Stages
from megatron_r3.data.store import RolloutStore


def run(stages: Stages) -> dict[str, Any]:
    """Run all stages; return what goes into summary.json."""
    seconds: dict[str, float] = {}
    # The Makefile writes the seconds that the installation took into this file.
    installed = stages.out.parent / "venv" / ".done"
    if installed.is_file() and installed.read_text().strip():
        seconds["install (once)"] = float(installed.read_text())

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        seconds[name] = round(time.monotonic() - start, 1)

    for name in ("pretrain", "export", "sample"):
        with timed(name):
            getattr(stages, name)()
    events = {}
    for mode in ("live", "replay"):
        with timed(mode):
            events[mode] = stages.train(mode)
    (stages.out / "train.args").write_text(shlex.join(stages.grpo_arguments()) + "\n")
    store = RolloutStore([stages.rollouts])
    return {
        "sampler": {"name": store.info.engine, "version": store.info.engine_version},
        "megatron": megatron_version(stages.megatron),
        "rollouts": len(store),
        "tokens": int(store.column("num_tokens").sum()),
        "world_size": WORLD_SIZE,
        **{mode: report.measured(folder) for mode, folder in events.items()},
        "seconds": seconds,
    }


def megatron_version(tree: Path) -> str:
    """The version that the tree names, only to be shown: patches do not change it."""
    numbers = runpy.run_path(str(tree / "megatron" / "core" / "package_info.py"))
    return str(numbers["__version__"])


def main() -> int:
    """Run the demo; return 0, 130 if a signal stops it, or 1 if a stage fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megatron", type=Path, required=True, help="a patched tree")
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    parser.add_argument("--sampler", choices=ENGINES, default="transformers")
    parser.add_argument("--steps", type=int, choices=range(1, 101), default=6, metavar="N")
    # 8 prompts have 64 samples: a micro-batch of 32 on each of two ranks
    prompts = range(8, NUM_PROMPTS + 1, 8)
    parser.add_argument("--prompts", type=int, choices=prompts, default=NUM_PROMPTS, metavar="N")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop as on ctrl-C
    try:
        out, megatron = args.out.resolve(), args.megatron.resolve()
        stages = Stages(out, megatron, args.sampler, args.steps, args.prompts)
        summary = run(stages)
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    report.picture(summary, args.out / "demo.png")
    print(f"\n{report.table(summary)}\n")
    print(f"written: {args.out / 'summary.json'}, {args.out / 'demo.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
