"""The files of docker/launch/, and the `megatron-r3 rl` commands in them."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from megatron_r3.loop.rl_cli import add_rl

LAUNCH = Path(__file__).parents[2] / "docker" / "launch"
SLURM = LAUNCH / "slurm.sh"
KUBERNETES = (LAUNCH / "kubernetes.yaml").read_text()
JOBSET = (LAUNCH / "jobset.yaml").read_text()
PARTS = ("sampler", "collector", "trainer")


def parsed(words: list[str]) -> argparse.Namespace:
    """What the real parser makes of `rl ...`; SystemExit if it refuses."""
    parser = argparse.ArgumentParser()
    add_rl(parser.add_subparsers(required=True))
    return parser.parse_args(words)


def rl_commands(text: str) -> list[list[str]]:
    """The words from `rl` on of each `megatron-r3 rl ...` in a shell script."""
    found = [c.strip() for c in re.findall(r"(?:megatron-r3|\$r3) (rl [^)\n&;]*)", text)]
    # the command may be the end of a text in quotes
    return [shlex.split(c[:-1] if c.count('"') % 2 else c) for c in found]


def resources(text: str = KUBERNETES) -> dict[tuple[str, str], dict[str, Any]]:
    return {(r["kind"], r["metadata"]["name"]): r for r in yaml.safe_load_all(text)}
