"""What comes from outside: JSON of bounded size and depth.

Responses of servers, headers of shards, model configs and lines of prompts are written by somebody
else. Python's own JSON parser recurses once for each bracket, so a long run of brackets can exhaust
its stack, and its errors do not name a file.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from megatron_r3.replay.words import one_line

MOST_DEPTH = 64  # brackets inside brackets; the deepest real body (vLLM's chat log-probs) has 9
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def read_json(data: bytes | str, where: str, most_bytes: int = 1 << 26) -> Any:
    """Parse JSON that somebody else wrote.

    Args:
        data: UTF-8.
        where: what the error calls the data: a file, a line of a file, a response.
        most_bytes: how long the data may be.

    Raises:
        ValueError: beginning with `where`: the data is too long, too deep, or not JSON.
    """
    if isinstance(data, str):
        data = data.encode(errors="surrogatepass")
    if len(data) > most_bytes:
        raise ValueError(f"{where}: {len(data)} bytes of JSON; at most {most_bytes} are read")
    if _depth(data) > MOST_DEPTH:
        raise ValueError(f"{where}: JSON with more than {MOST_DEPTH} brackets inside each other")
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({one_line(str(error), 200)})") from error


def _depth(data: bytes) -> int:
    """A bound on how many brackets stand inside each other; a parser would recurse as often.

    Example: `{"a]": [[1], 2]}` without its strings is `{: [[1], 2]}`. Of that the brackets are
    `{[[]]}`, as steps +1 +1 +1 -1 -1 -1, whose highest running sum is 3.
    """
    opened = data.count(b"[") + data.count(b"{")
    # Nearly every body ends here, even one of megabytes: two counts, and base64 has no brackets.
    if opened <= MOST_DEPTH:
        return opened
    brackets = _STRING.sub(b"", data).translate(None, _ALL_BUT_BRACKETS)
    steps = np.frombuffer(brackets, np.uint8)
    opens = (steps == ord("[")) | (steps == ord("{"))
    return int(np.cumsum(np.where(opens, 1, -1)).max(initial=0))
