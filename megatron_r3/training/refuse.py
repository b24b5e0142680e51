"""How a training ends for a user's mistake: one line on stderr, status 1, no traceback."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

from megatron_r3.untrusted import one_line

SILENCE_S = 30.0  # how long a rank leaves an error to the one that speaks


def refuse(message: str, speaks: bool | None = None) -> NoReturn:
    """End this process for a user's mistake: one line, status 1, no traceback.

    All ranks tend to find the same, and the launcher ends the others when the first one leaves: the
    one that speaks leaves at once, the others wait, and speak if they are still there.

    Args:
        speaks: whether this rank is the one. None: the first of each node is.
    """
    if speaks is None:
        speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    if not speaks:
        time.sleep(SILENCE_S)
    print(f"error: {one_line(message)}", file=sys.stderr, flush=True)
    raise SystemExit(1)
