"""The real commands: each in a process of its own, and what it says on stderr."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from types import ModuleType

from fuzz.outcome import bad_line

ROOT = Path(__file__).parents[1]
_MOST_LINES = 60


def start(arguments: Sequence[str], folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Start `megatron-r3` with these arguments; NAME.out and NAME.err are what it says."""
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
    """Why this is not one `error:` line, with or without a list under it, in a few words.

    `apply` names each file that is wrong in a line of its own below its error.
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


def borrowed(name: str) -> ModuleType:
    """A module of tests/support, which is no package."""
    spec = util.spec_from_file_location(name, ROOT / "tests" / "support" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module
