"""Files of JSON lines: one process appends, and others read, while any of them may be killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_r3.data.untrusted import read_json


def append_line(file: Path, value: dict[str, Any]) -> None:
    """Append a JSON object as a line of its own.

    A writer that was killed may have left half a line: then the object begins a new line. Example:
    after `{"a": 1}` and the half line `{"a":` the object `{"a": 2}` becomes the third line.

    Raises:
        OSError: the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b") as opened:
        cut_off = b""
        if opened.seek(0, 2):
            opened.seek(-1, 2)
            cut_off = b"" if opened.read(1) == b"\n" else b"\n"
        opened.write(cut_off + json.dumps(value).encode() + b"\n")


def whole_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects that a file has so far; none if there is no file.

    A line that is no JSON object is skipped: a writer that was killed may have left half a line.

    Raises:
        OSError: the file cannot be read.
    """
    if not file.exists():
        return
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
        try:
            value = read_json(line, f"{file}, line {number + 1}")
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value
