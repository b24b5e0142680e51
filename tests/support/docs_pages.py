"""The pages of the documentation, and the commands, blocks and inline code in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest

from megatron_r3.cli import main

ROOT = Path(__file__).parents[2]
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "proof/benchmarks/README.md")
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    return [dedent(match[3]) for match in FENCE.finditer(text) if match[2] == language]


def spans(text: str) -> list[str]:
    """The inline code, with a line break inside it as one space."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", text))]


class Command(NamedTuple):
    words: list[str]
    whole: bool  # of a block; an inline one may leave arguments out


PROGRAMS = ("make", "megatron-r3", "python", "torchrun", "pip", "vllm", "git", "cd")
PROGRAMS += ("docker", "docker/rl-run")


def commands(text: str) -> Iterator[Command]:
    """Every command of the shell blocks, and the inline code that is one."""
    for block in blocks(text, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"\s(?:&&|\|)\s", line):
                if words := without_environment(shlex.split(part, comments=True)):
                    yield Command(words, whole=True)
    for line in re.findall(r"^    ((?:[A-Z_]+=\S+ )*python3? -m .*)", FENCE.sub("", text), re.M):
        yield Command(without_environment(shlex.split(line)), whole=True)
    for span in spans(text):
        for part in re.split(r"\s&&\s", span) if " " in span else ():
            words = without_environment(shlex.split(part))
            if words and words[0] in PROGRAMS and words[1:] not in ([], ["-m"]):
                yield Command(words, whole=False)


def without_environment(words: list[str]) -> list[str]:
    """The words from the program on: `A=1 build/venv/bin/python -m x` gives `python -m x`."""
    while words and re.match(r"[A-Z_][A-Z0-9_]*=", words[0]):
        words = words[1:]
    program = words[0].rpartition("venv/bin/")[2].replace("python3", "python") if words else ""
    return [program, *words[1:]] if words else []


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `megatron-r3 WORDS --help` prints."""
    with pytest.raises(SystemExit) as caught:
        main([*words, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out
