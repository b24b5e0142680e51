"""Runs a child process that does not outlive the demo, with its output in a log file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from demo.installation import tail
from megatron_r3.loop.processes import start, stop


class Failed(RuntimeError):
    """A child ended in failure; the message has the first error and the end of the child's log."""


def run(command: list[str], log: Path, env: dict[str, str], on_line: Callable[[str], None]) -> None:
    """Run `command` to its end with its output in `log`, and give each whole line to `on_line`.

    Raises:
        Failed: the child did not exit with 0.
    """
    log.unlink(missing_ok=True)
    process = start(command, env, log)
    try:
        with log.open(errors="replace") as file:
            running, line = True, ""
            while running:
                running = process.poll() is None
                for part in file:  # the last part may be half a line
                    line += part
                    if line.endswith("\n"):
                        on_line(line)
                        line = ""
                time.sleep(0.05)
    finally:
        stop(process)
    if process.returncode:
        words = " ".join(command[:6])
        raise Failed(f"{words} ... exited with {process.returncode}; {tail(log, 25)}")
