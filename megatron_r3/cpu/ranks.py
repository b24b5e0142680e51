"""What a rank is told through its environment, as torchrun does it, and its share of the cores."""

from __future__ import annotations

import contextlib
import os
import random
import socket


def describe_rank(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment of one of `world_size` ranks, all of them on this machine."""
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

    It is below those that the system hands out by itself (from 32768 on Linux): between now and the
    start of the ranks, no connection of another process gets it.
    """
    for port in random.SystemRandom().sample(range(15000, 32768), 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port between 15000 and 32767")


def usable_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def lost_its_peer(text: str) -> bool:
    """Whether an error only says that another rank has gone: that rank knows why."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return any(sign in text for sign in signs)
