"""Runs a child process that does not outlive the demo, with its output in a log file."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Failed(RuntimeError):
    """A child ended in failure; the message shows the end of its log."""


def stop_group(process: subprocess.Popen[str]) -> None:
    """End the child and everything that it started: SIGTERM, and SIGKILL for what is left."""
    # SIGKILL is sent in any case: the child may have ended while what it started still runs.
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


@contextmanager
def _child(command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a process group of its own: all of it can be stopped
    )
    try:
        yield process
    finally:
        stop_group(process)


def run(command: list[str], log: Path, env: dict[str, str], on_line: Callable[[str], None]) -> None:
    """Run to the end, giving each line of output to `on_line` and the log.

    Raises:
        Failed: the child did not exit with 0.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file, _child(command, env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            file.flush()
            on_line(line)
        status = process.wait()
    if status:
        tail = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-25:])
        raise Failed(f"{' '.join(command[:6])} ... exited with {status}; the end of {log}:\n{tail}")
