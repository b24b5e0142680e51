"""Child processes that do not outlive the process that started them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_r3.collect.signals import give_back, take_signals

STOP_S = 10.0  # between SIGTERM and SIGKILL
# The guard runs a command. When the process that started the guard ends, in whatever way, the
# guard's stdin, a pipe, is closed: the guard then kills the command and all that it has started.
# torchrun gives each rank a session of its own, so killing a process group is not enough. The guard
# is a subreaper (PR_SET_CHILD_SUBREAPER, 36): a process without a living parent becomes the
# guard's child, so all processes of the command stay below the guard.
_GUARD = """
import ctypes, os, signal, subprocess, sys, threading
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
child, asked = None, []
def end(number, frame):
    asked.append(number)
    if child is not None:
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            pass
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, end)
child = subprocess.Popen(sys.argv[1:], start_new_session=True, stdin=subprocess.DEVNULL)
if asked:  # before there was a child to pass the signal on to
    end(asked[0], None)
def parents():
    found = {}
    for name in os.listdir('/proc'):
        if name.isdigit():
            try:
                with open(f'/proc/{name}/stat') as stat:
                    state, parent = stat.read().rpartition(')')[2].split()[:2]
            except OSError:
                continue
            if state != 'Z':
                found[int(name)] = int(parent)
    return found
def kill_all():
    for _ in range(100):
        of, below = parents(), {os.getpid()}
        while more := {p for p, parent in of.items() if parent in below} - below:
            below |= more
        if below == {os.getpid()}:
            return
        for process in below - {os.getpid()}:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
def watch():
    while os.read(0, 1):
        pass
    kill_all()
    os._exit(137)
threading.Thread(target=watch, daemon=True).start()
status = child.wait()
kill_all()  # what the child started and left behind
sys.exit(status if status >= 0 else 128 - status)
"""


def start(
    command: Sequence[str], env: Mapping[str, str], log: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a command which, with all processes that it starts, dies with this process.

    Args:
        env: environment variables in addition to those of this process.
        log: the file to which the output is appended; None for this process's own output.

    Raises:
        OSError: the log cannot be written.
        ValueError: there is no such command.
    """
    path = env.get("PATH", os.environ.get("PATH"))
    if shutil.which(command[0], path=path) is None:
        raise ValueError(
            f"{command[0]}: no such command on this host: install it, or name its path"
        )
    output: Any = None
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("ab")
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-c", _GUARD, *command],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,  # closed when this process ends: the guard's signal to kill
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    finally:
        if output is not None:
            output.close()


def stop(process: subprocess.Popen[bytes], seconds: float = STOP_S) -> None:
    """End a started command: SIGTERM, and after `seconds` SIGKILL for what is left."""
    assert process.stdin is not None
    try:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        end = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
    finally:  # also if the wait is interrupted
        process.stdin.close()  # now the guard kills what is left
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        if process.poll() is None:
            process.kill()
            process.wait()


def filled_in(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The words of a command, with each {name} replaced by its value."""
    words = []
    for word in command:
        for name, value in values.items():
            word = word.replace(f"{{{name}}}", value)
        words.append(word)
    return words


@contextmanager
def signals_raise() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt inside the block, as ctrl-C does.

    A signal that is ignored, as nohup does with SIGHUP, stays ignored. In any other thread than the
    main one this does nothing: Python runs handlers in the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = take_signals(leave, (signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        give_back(before)
