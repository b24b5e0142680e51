"""The environment variables that torchrun gives a rank, a free port, and the usable cores."""

from __future__ import annotations

import contextlib
import os
import random
import socket


def describe_rank(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment variables of one of `world_size` ranks that all run on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """A port of this machine that nothing listens on.

    The port is below the ephemeral ports (from 32768 on Linux), so that no outgoing connection of
    another process takes it before the ranks start. It is drawn at random, so that two runs that
    start at the same moment hardly ever get the same port.

    Raises:
        OSError: a hundred ports were tried, and all of them are taken.
    """
    for port in random.SystemRandom().sample(range(15000, 32768), 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError("100 ports between 15000 and 32767 were tried, and none is free")


def usable_cores() -> int:
    """How many cores this process may use; in a container these may be fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
