"""How a process ends on a user's mistake: its last lines, and the check for a missing patch.

This file imports neither torch nor any other file of the package.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# the beginnings of the options that only a patched Megatron-LM knows
_OURS = ("--moe-router-replay", "--rollouts", "--rl-write-rollouts")
# all but a node's first rank wait this long, so that the launcher ends them before they print
_SILENCE_S = 30.0


def say_last(text: str) -> None:
    """Print why this process ends, below everything else that is printed.

    torchrun prints a report of its own when all ranks have ended. The report ends with what the
    rank that failed first wrote into a file, so the text goes into this file. Example:

          traceback :
        error: --rollouts-clip-eps 7: it must be above 0 and at most 1 (1: no lower bound)
        ============================================================

    Under any other launcher, or if the file cannot be written, the text goes to stderr.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and _child_of_torchrun():
        # torchrun prints the failure with the earliest time last. Ranks that torchrun has ended
        # get the time at which torchrun looks, which may be this second. So this rank, which failed
        # first, takes one second off.
        said = {"message": f"\n{text}", "timestamp": int(time.time()) - 1}
        try:
            Path(file).write_text(json.dumps(said))
            return
        except OSError:
            pass
    print(text, file=sys.stderr, flush=True)


def _child_of_torchrun() -> bool:
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")[:4]
    except OSError:
        return False
    # `/usr/bin/python3 /usr/bin/torchrun`, or `python -m torch.distributed.run`, or `.launch`
    return any(word.endswith(b"/torchrun") or b"torch.distributed." in word for word in words)


def why_unpatched() -> str | None:
    """The error about the Megatron-LM that this process has imported; None if it is patched."""
    module: Any = sys.modules["megatron.core.transformer.transformer_config"]
    if hasattr(module.TransformerConfig, "moe_router_replay"):
        return None
    return not_patched(Path(module.__file__).parents[3])


def not_patched(tree: Path) -> str:
    """The error about a Megatron-LM that lacks the patches."""
    return f"the Megatron-LM in {tree} is not patched; run `megatron-r3 apply {tree}`"


def refuse_unpatched(argv: Sequence[str]) -> None:
    """End the process if one of our options is given to a Megatron-LM without the patches.

    Megatron itself would say "unrecognized arguments", below 1,300 lines of usage.

    Raises:
        SystemExit: status 1, after one line that says what to type.
    """
    given = [word.partition("=")[0] for word in argv if word.startswith(_OURS)]
    if given and (why := why_unpatched()):
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(_SILENCE_S)
        say_last(f"error: {given[0]}: {why}")
        raise SystemExit(1)
