"""Run the real `megatron-r3` commands in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from proof.fuzz.outcome import HANG, Fault


def start(arguments: Sequence[str], folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Start `megatron-r3` with these arguments; its output goes to NAME.out and NAME.err."""
    with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.err").open("wb") as error:
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_r3.cli", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=error,
        )


def ended(process: subprocess.Popen[bytes], limit_s: float, what: str) -> int:
    """Wait for a process, return its exit status; after `limit_s` kill it and raise a Fault."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise Fault(HANG, f"{what} does not end in {limit_s:g} s") from None
