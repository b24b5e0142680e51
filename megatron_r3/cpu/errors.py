"""The errors of megatron_r3.cpu, and whether the user or another rank caused an error."""

from __future__ import annotations

import traceback
from pathlib import Path


class InstallError(RuntimeError):
    """Megatron cannot run on the CPU in this process; the message says what to do."""


class NotEmulated(RuntimeError):
    """A call that is not emulated on the CPU; an error, so that no wrong value is returned.

    Examples: capturing a CUDA graph, attention with a sliding window under context parallelism, an
    uneven collective that is asynchronous. The message says what was called.
    """


def is_users_mistake(error: BaseException) -> bool:
    """Whether megatron_r3 itself refused a value: then the message is enough, without a traceback.

    Such an error is a ValueError that code of megatron_r3 itself raised. A ValueError from another
    package needs its traceback, and so does any other kind of error from megatron_r3.
    """
    trace = error.__traceback__
    if not isinstance(error, ValueError) or trace is None:
        return False
    *_, (frame, _) = traceback.walk_tb(trace)
    package = Path(__file__).parents[1]
    return package in Path(frame.f_code.co_filename).parents


def lost_its_peer(message: str) -> bool:
    """Whether an error only says that another rank has gone; that rank's error says why."""
    # What gloo and sockets say when the other end closes. A rank that fails closes all of its
    # connections, so each of the other ranks fails with one of these messages.
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return any(sign in message for sign in signs)
