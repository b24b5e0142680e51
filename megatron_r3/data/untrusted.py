"""Reads JSON from outside, up to a bounded size and depth.

Responses of servers, headers of shards, model configs and lines of prompts are written by somebody
else. Python's own JSON parser recurses once for each bracket, so a long run of brackets can exhaust
the stack. And the parser's errors do not name a file.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from megatron_r3.replay.words import one_line

MOST_DEPTH = 64  # brackets inside brackets; the deepest real body (vLLM's chat log-probs) has 9
_NO_MARKS = bytes(set(range(256)) - set(b'[]{}"'))
_ESCAPE = re.compile(rb'\\[\\"]')


def read_json(data: bytes | str, where: str, most_bytes: int = 1 << 26) -> Any:
    """Parse JSON that somebody else wrote.

    Args:
        data: UTF-8.
        where: what the error calls the data: a file, a line of a file, a response.
        most_bytes: how long the data may be.

    Raises:
        ValueError: the data is too long, too deep, or not JSON; the message begins with `where`.
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
    """An upper bound on how deep brackets are nested, which is how deep a parser would recurse.

    Example: of `{"a]": [[1], 2]}` the marks are `{"]"[[]]}`. An odd number of quotes stands before
    the first `]`, so it is text. The other marks are steps +1 +1 +1 -1 -1 -1, whose highest running
    sum is 3. Escapes are removed before that: each `\\\\`, which is a backslash, and each `\\"`,
    which is a quote inside of a string.
    """
    marks_of_all = data.translate(None, _NO_MARKS)  # short: base64 has no marks
    opened = marks_of_all.count(b"[") + marks_of_all.count(b"{")
    if opened <= MOST_DEPTH:
        return opened
    if b"\\" in data:
        marks_of_all = _ESCAPE.sub(b"", data).translate(None, _NO_MARKS)
    marks = np.frombuffer(marks_of_all, np.uint8)
    is_quote = marks == ord('"')
    marks = marks[~is_quote & (np.cumsum(is_quote) % 2 == 0)]
    opens = (marks == ord("[")) | (marks == ord("{"))
    return int(np.cumsum(np.where(opens, 1, -1)).max(initial=0))
