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

    Usually all ranks find the same mistake, and one line a node is enough. So one rank of each node
    prints the line and exits at once, and then the launcher ends all ranks. Any other rank first
    waits SILENCE_S. If the launcher has not ended the rank by then, the rank may have found a
    mistake that no other rank has printed, so it prints the line too.

    Args:
        message: what is wrong, what was expected, and what to do.
        speaks: whether this rank prints at once. None means the first rank of each node.
        repeats: whether a rank that has waited prints too. False if all ranks know the mistake.
    """
    if speaks is None:
        speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    if not speaks:
        time.sleep(SILENCE_S)
    if speaks or repeats:
        say_last(f"error: {one_line(message)}")
    raise SystemExit(1)


def refuse_beside_children(message: str, speaks: bool | None = None) -> NoReturn:
    """End a process that has children, as `refuse` does, but without Python's clean-up.

    In the clean-up Python would wait for the children, and the children wait for this process.
    """
    with suppress(SystemExit):
        refuse(message, speaks)
    sys.stdout.flush()
    os._exit(1)
