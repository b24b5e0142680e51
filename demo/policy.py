"""Makes the demo's policy, trained and exported, for a run with containers to begin with.

    python -m demo.policy --out DIR [--megatron TREE]

DIR then has checkpoint/, policy/ and prompts.jsonl. train.args has the arguments of training on
rollouts and export.args those of exporting, one argument a line.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from demo import task
from demo.collect import FIRST_PROMPT, NUM_PROMPTS
from demo.model import arguments
from demo.process import Failed
from demo.stages import WORLD_SIZE, Stages


def main() -> int:
    """Make all of it; 1 where a stage fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    tree = os.environ.get("MEGATRON")
    parser.add_argument("--megatron", type=Path, default=tree, required=tree is None)
    args = parser.parse_args()
    stages = Stages(args.out.resolve(), args.megatron.resolve(), "transformers")
    try:
        stages.pretrain()
        stages.export()
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    task.write_prompts(args.out / "prompts.jsonl", NUM_PROMPTS, FIRST_PROMPT)
    one_process = arguments(["--micro-batch-size", "1"])
    for name, words in {"train": stages.grpo_arguments(), "export": one_process}.items():
        (args.out / f"{name}.args").write_text("\n".join(words) + "\n")
    # last: if there is a policy/, all other files are there too
    stages.hf.rename(args.out / "policy")
    print(f"{args.out} has a policy; NPROC={WORLD_SIZE} trains it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
