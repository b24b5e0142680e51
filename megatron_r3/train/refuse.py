"""How a training ends for a user's mistake: one line, status 1, no traceback."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import NoReturn

from megatron_r3.replay.ending import say_last
from megatron_r3.replay.words import one_line

SILENCE_S = 30.0  # how long the other ranks wait


def refuse(message: str, speaks: bool | None = None, repeats: bool = True) -> NoReturn:
    """End this process for a user's mistake: one line, status 1, no traceback.

    All ranks tend to find the same mistake, and one line is enough. The launcher ends all ranks as
    soon as one leaves, so the rank that speaks leaves at once. The other ranks wait; a rank that is
    still there after that found a mistake of its own, and speaks too.

    Args:
        message: what is wrong, what was expected, and what to do.
        speaks: whether this rank speaks at once. None means the first rank of each node.
        repeats: whether a rank that has waited speaks too. False where all know the same mistake.
    """
    if speaks is None:
        speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    if not speaks:
        time.sleep(SILENCE_S)
    if speaks or repeats:
        say_last(f"error: {one_line(message)}")
    raise SystemExit(1)


def refuse_beside_children(message: str, speaks: bool | None = None) -> NoReturn:
    """As `refuse`, in a process whose children Python would wait for, and they for this process.

    Megatron's RL loop leaves its engine's coordinator in this way too (megatron/rl/rl_utils.py).
    """
    with suppress(SystemExit):
        refuse(message, speaks)
    sys.stdout.flush()
    os._exit(1)
