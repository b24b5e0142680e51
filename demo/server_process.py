"""A server of an engine in a process of its own, for the time of a `with` block.

The server listens on this machine alone. The server and all that it has started end with the block,
and also if this process is killed.
"""

from __future__ import annotations

import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

from demo.installation import ServerError, tail, watch
from megatron_r3.cpu.ranks import free_port
from megatron_r3.loop.processes import filled_in, signals_raise, start, stop

READY_SECONDS = 600
# A server takes 2 s to stop. A server that is still starting does not react to the signal, and is
# killed after this time. When the server ends, the processes that it started are killed.
STOP_SECONDS = 4


@contextmanager
def run_server(
    engine: str,
    command: Sequence[str],
    values: Mapping[str, str],
    env: Mapping[str, str],
    log: Path,
) -> Iterator[str]:
    """Run a server while the block runs; yields its address once the server answers.

    Args:
        engine: the engine's name in messages.
        command: the words of the server's command, with {port} and the names of `values` in braces.
        values: what replaces each name in the command.
        env: environment variables, in addition to those of this process.
        log: gets what the server prints; an older log is overwritten.

    Raises:
        ServerError: the server does not come up; the message has the end of its log.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # the server leaves sockets behind in this folder
    temporary = tempfile.TemporaryDirectory(prefix="server-")
    log.unlink(missing_ok=True)
    with signals_raise(), temporary as folder:
        words = filled_in(command, {**values, "port": str(port)})
        try:
            process = start(words, {**env, "TMPDIR": folder}, log)
        except ValueError as error:
            raise ServerError(str(error)) from error
        try:
            watch(f"starting {engine}", process, lambda: _healthy(url), READY_SECONDS)
            if process.poll() is not None or not _healthy(url):
                raise ServerError(f"{engine} did not start; {tail(log)}")
            yield url
        finally:
            stop(process, STOP_SECONDS)


def _healthy(url: str) -> bool:
    # without the environment's proxy: the server is on this machine
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False
