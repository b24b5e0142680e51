"""A server of an engine in a process of its own, which runs as long as a `with` block.

The server listens on this machine alone. It is gone when the block ends, also if this process is
killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from demo.installation import ServerError, tail, watch
from megatron_r3.loop.processes import filled_in

READY_SECONDS = 600
# A server takes 2 s to stop. One that is still starting does not react, and is killed after this.
STOP_SECONDS = 4


@contextmanager
def run_server(
    engine: str,
    command: Sequence[str],
    values: Mapping[str, str],
    env: Mapping[str, str],
    log: Path,
) -> Iterator[str]:
    """Run a server while the block runs; yields its address, where it answers by then.

    Args:
        engine: what messages call it.
        command: the server's, with {port} and the names of `values` in braces.
        values: are filled in for their names.
        env: is added to this process's environment.
        log: gets what the server prints; an older log is overwritten.

    Raises:
        ServerError: the server does not come up; the message has the end of its log.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    temporary = tempfile.TemporaryDirectory(prefix="server-")  # for sockets that it leaves behind
    with log.open("wb") as output, _signals_end_the_block(), temporary as folder:
        process = subprocess.Popen(
            filled_in(command, {**values, "port": str(port)}),
            env={**os.environ, **env, "TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # one group for the server and the processes it starts
        )
        with _guard(process):
            try:
                watch(f"starting {engine}", process, lambda: _healthy(url), READY_SECONDS)
                if process.poll() is not None or not _healthy(url):
                    raise ServerError(f"{engine} did not start; {tail(log)}")
                yield url
            finally:
                _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def _signals_end_the_block() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as ctrl-C does, so that the server is stopped."""

    def leave(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    try:
        before = {
            number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)
        }
    except ValueError:  # not the main thread: only that one may set handlers
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _guard(process: subprocess.Popen) -> Iterator[None]:
    """Kill the server's process group if this process ends inside the block, even by SIGKILL.

    A shell reads from a pipe that this process holds. It reads the line `left` when the block ends.
    If this process dies, the kernel closes the pipe, `read` fails, and the shell kills the group.
    """
    waits = f"read left || kill -9 -{process.pid}"
    guard = subprocess.Popen(
        ["sh", "-c", waits],
        stdin=subprocess.PIPE,  # ends with this process
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.communicate(b"left\n")


def _stop(process: subprocess.Popen, seconds: float = STOP_SECONDS) -> None:
    """End the whole process group: SIGTERM first, then SIGKILL, also if waiting is interrupted."""
    try:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while _group_lives(process) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _group_lives(process: subprocess.Popen) -> bool:
    """Whether a process of the group still runs. A zombie, which waits to be reaped, does not."""
    process.poll()  # reaps the server itself, which would be a zombie otherwise
    # /proc/PID/stat is `PID (name) state parent group ...`. A name may hold spaces and brackets, so
    # the line is read from its last bracket on.
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) == process.pid and state != "Z":
                return True
    return False
