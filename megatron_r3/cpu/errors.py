"""The errors of megatron_r3.cpu, and what caused an error: the user, an argument, another rank."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
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

    Such an error is a ValueError whose innermost frame is in megatron_r3. A ValueError from another
    package needs its traceback, and so does any other kind of error from megatron_r3.
    """
    trace = error.__traceback__
    if not isinstance(error, ValueError) or trace is None:
        return False
    *_, (frame, _) = traceback.walk_tb(trace)
    package = Path(__file__).parents[1]
    return package in Path(frame.f_code.co_filename).parents


# Arguments of CPU_ARGS, each with a word that is in the last frame or the message of the error that
# Megatron raises without the argument. If an argument that is not listed is missing, Megatron
# raises no error.
_SIGNS = {
    "--distributed-backend=gloo": "NCCL",
    "--transformer-impl=local": "TESpecProvider",
    "--no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    "--no-masked-softmax-fusion": "softmax_cuda",
    "--no-rope-fusion": "apply_rope_fusion",
    "--no-persist-layer-norm": "persist_layer_norm",
}


def lacking(error: BaseException, argv: Sequence[str]) -> list[str]:
    """The arguments of CPU_ARGS that are missing and caused this error; empty if none did."""
    given = {argument.split("=")[0] for argument in argv}
    last = "".join(traceback.format_exception(error, limit=-1))
    return [
        argument
        for argument, sign in _SIGNS.items()
        if argument.split("=")[0] not in given and sign in last
    ]


def lost_its_peer(message: str) -> bool:
    """Whether an error only says that another rank has gone; that rank's error says why."""
    # What gloo and sockets say when the other end closes. A rank that fails closes all of its
    # connections, so each of the other ranks fails with one of these messages.
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return any(sign in message for sign in signs)
