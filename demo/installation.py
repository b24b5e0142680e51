"""Installs an engine into a folder of build/, once, and shows how long that takes.

This file imports the standard library alone: docker/Dockerfile runs it with a bare Python.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BUILD = Path(__file__).parents[1] / "build"


class ServerError(ValueError):
    """An engine could not be installed or started; the message says why."""


def is_installed(home: Path, pins: str) -> bool:
    """Whether `home` has a whole installation of these pins."""
    marker = home / "installed"
    return marker.exists() and marker.read_text() == _digest(pins)


def run_steps(engine: str, home: Path, pins: str, steps: list[tuple[str, list[str]]]) -> None:
    """Empty the folder `home`, and run the steps that fill it.

    The digest of the pins is written last, so an installation that was interrupted or has other
    versions is made again.

    Args:
        engine: the engine's name in messages.
        home: the folder that the steps fill.
        pins: every version that the installation depends on.
        steps: the name and the command of each step.

    Raises:
        ServerError: a step failed; the message has the end of its log.
    """
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    log = home.with_name(f"{home.name}-install.log")
    with log.open("wb") as output:
        for number, (name, command) in enumerate(steps, 1):
            what = f"installing {engine} (once): {number}/{len(steps)} {name}"
            _run(what, command, output, log)
    (home / "installed").write_text(_digest(pins))


def _digest(pins: str) -> str:
    return hashlib.sha256(pins.encode()).hexdigest()


def pip_install(python: Path) -> list[str]:
    """The first words of a pip command for this Python; compiling is left to `compile_all`."""
    return [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]


def compile_all(python: Path, folder: Path) -> list[tuple[str, list[str]]]:
    """A step that compiles all modules, on all cores; no step if Python writes bytecode itself.

    Under PYTHONDONTWRITEBYTECODE each process of a server would compile again all that it imports.
    Without that variable Python keeps what the first process compiles, and most modules are never
    imported. Files that do not compile, such as templates, are passed over.
    """
    if not sys.dont_write_bytecode:
        return []
    code = "import compileall, sys; compileall.compile_dir(sys.argv[1], quiet=2, workers=0)"
    return [("compiling", [str(python), "-c", code, str(folder)])]


def _run(what: str, command: list[str], output: Any, log: Path) -> None:
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
    """Wait for `ready()`, the process's end or `limit` seconds; print the seconds on stderr."""
    started = time.monotonic()
    try:
        while not ready() and process.poll() is None and time.monotonic() - started < limit:
            elapsed = time.monotonic() - started
            print(f"\r{what}: {elapsed:.0f} s", end="", file=sys.stderr, flush=True)
            time.sleep(0.5)
    finally:
        print(f"\r{what}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def tail(log: Path, lines: int = 15) -> str:
    """The first error of a log and its last lines, for a message.

    When a process of torchrun fails, torchrun writes 40 lines of its own. Of these only the line
    with the process and its exit status is kept.
    """
    text = log.read_text(encoding="utf-8", errors="replace").splitlines()
    torchrun = [line for line in text if "torch/distributed/elastic/multiprocessing/" in line]
    if torchrun:
        text = text[: text.index(torchrun[0])]
    status = [line for line in torchrun if "failed (exitcode: " in line][:1]
    cause = [line for line in text[:-lines] if "Error: " in line][:1]
    return "\n".join([f"from {log}:", *cause, "...", *text[-lines:], *status])
