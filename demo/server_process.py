"""A server of an engine in a process of its own, which runs as long as a `with` block.

The server listens on this machine alone. It is gone when the block ends, with all that it has
started, also if this process is killed.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from demo.installation import ServerError, tail, watch
from megatron_r3.loop.processes import filled_in, signals_raise, start, stop

READY_SECONDS = 600
# A server takes 2 s to stop. One that is still starting does not react, and is killed after this;
# what a server that ends has started is killed with it.
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
