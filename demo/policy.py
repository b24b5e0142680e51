"""Makes a folder in which the loop can begin: a policy that sorts badly, its prompts, and run.toml.

    python -m demo.policy --out DIR [--megatron TREE] [--collections N]

DIR then has start/ (the policy, for Megatron and for transformers), prompts.jsonl, demo/ (the
reward and the training script) and run.toml. Everything that run.toml names lies in DIR, except
the tree, which is $MEGATRON. So one file serves this host, containers, Slurm and Kubernetes:

    cd DIR && MEGATRON=TREE megatron-r3 rl run run.toml
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from demo.collect import ROOT
from demo.online import COLLECTIONS, Places, write_config
from demo.process import Failed
from demo.stages import Stages

FILES = ("__init__.py", "pretrain.py", "task.py")  # what a run needs of demo/


def main() -> int:
    """Make the folder; return 1 if a stage fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    tree = os.environ.get("MEGATRON")
    parser.add_argument("--megatron", type=Path, default=tree, required=tree is None)
    parser.add_argument("--collections", type=int, default=COLLECTIONS)
    args = parser.parse_args()
    out = args.out.resolve()
    stages = Stages(out / "start", args.megatron.resolve(), "transformers")
    try:
        stages.pretrain()
        stages.export()
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    (out / "demo").mkdir(exist_ok=True)
    for name in FILES:
        shutil.copyfile(ROOT / "demo" / name, out / "demo" / name)
    # last: a folder that has run.toml then has all that run.toml names
    config, places = out / "run.toml", Places("start", "$MEGATRON", ".")
    write_config(config, places, "port = 30000", 0, args.collections)
    print(f"{config}: a run of {args.collections} collections can begin")
    return 0


if __name__ == "__main__":
    sys.exit(main())
