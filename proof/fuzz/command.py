"""The real commands, each in a process of its own, and the check of what they write to stderr."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from proof.fuzz.outcome import bad_line

ROOT = Path(__file__).parents[2]
_MOST_LINES = 60  # of the list below an error


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


def bad_stderr(text: str, names: Sequence[str]) -> str | None:
    """Why this is not one `error:` line, in a few words; None if it is.

    A list may stand below the line: `apply` names each wrong file in a line of its own there.
    """
    first, *rest = text.removesuffix("\n").split("\n")
    if not first.startswith("error: "):
        return f"it does not begin with `error: `: {text[:2000]!a}"
    wrong = bad_line(first, names if not rest else [first])
    if wrong is None and not any(name in text for name in names):
        wrong = f"names none of {list(names)[:3]}"
    if wrong is None and len(rest) > _MOST_LINES:
        wrong = f"{len(rest)} lines below it"
    for line in rest:
        if not line.isprintable() or "Traceback" in line or line.startswith("error:"):
            wrong = "a line below it is no part of a list"
    return wrong if wrong is None else f"{wrong}: {text[:2000]!a}"


def from_tests(name: str) -> ModuleType:
    """Import a module of tests/support, which the fuzz shares with the tests.

    The folder is no package: pytest has it on `sys.path` (pyproject.toml), and so has the fuzz.
    """
    folder = str(ROOT / "tests" / "support")
    if folder not in sys.path:
        sys.path.append(folder)
    return import_module(name)
