"""What the classes of tries share: hypothesis chooses the tries, and shrinks one that fails."""

from __future__ import annotations

import functools
import os
import random
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from proof.fuzz.outcome import RIGHT

PLACE = Path(__file__).parents[2] / "build" / "fuzz"
_MEMORY = 1 << 30  # how many bytes a try may take: no input may make its reader fill the memory


@dataclass(frozen=True)
class Kind:
    """A class of tries.

    Attributes:
        name: the name of its folder in `PLACE`.
        attempt: makes one try and returns its outcome, or raises a Fault. The arguments are random
            numbers, which hypothesis chooses; an empty folder for the bad input; and the result of
            `prepare`.
        prepare: makes what all tries need, once, in a folder that stays; the default makes nothing.
    """

    name: str
    attempt: Callable[[random.Random, Path, Any], str]
    prepare: Callable[[Path], Any] = lambda shared: None


def emptied(folder: Path) -> Path:
    """Make a folder, or remove what is in the folder; return its path."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def settings(tries: int, **more: Any) -> hypothesis.settings:
    """Settings of hypothesis; a fault is printed with a decorator that repeats the try."""
    return hypothesis.settings(
        max_examples=tries,
        database=None,
        deadline=None,
        derandomize=False,  # the seed says which tries are made
        suppress_health_check=[*HealthCheck],
        report_multiple_bugs=False,
        print_blob=True,
        **more,
    )


def input_test(kind: Kind, tries: int, place: Path = PLACE) -> Callable[[], None]:
    """A test that makes `tries` tries, up to the first fault."""
    place = place / kind.name

    @functools.cache
    def state() -> Any:
        return kind.prepare(emptied(place / "shared"))

    @settings(tries)
    @given(st.randoms(use_true_random=False))
    def test(rng: random.Random) -> None:
        with _limited_memory():
            outcome = kind.attempt(rng, emptied(place / "try"), state())
        hypothesis.event(outcome)

    return test


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Let the code under test, which runs in this process, take at most _MEMORY more bytes."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Machine(RuleBasedStateMachine):
    """A class of tries, each of which is a run of a state machine.

    Attributes:
        place: the folder of the class.
        state: what `prepare` made.
        folder: the folder of the try.
        outcome: the outcome of the run, if no Fault ends it.
    """

    place = PLACE

    def __init__(self) -> None:
        super().__init__()
        self.state = self._prepared(self.place)
        self.folder, self.outcome = emptied(self.place / "try"), RIGHT

    @classmethod
    @functools.cache
    def _prepared(cls, place: Path) -> Any:
        return cls.prepare(emptied(place / "shared"))

    @staticmethod
    def prepare(shared: Path) -> Any:
        """Make what all tries need; called once, with a folder that stays."""

    def finish(self) -> None:
        """Do and judge what comes after the last step; the default does nothing."""

    def teardown(self) -> None:
        """Finish the run, unless a Fault has ended it: hypothesis calls this in a `finally`."""
        if sys.exc_info()[1] is None:
            self.finish()
            hypothesis.event(self.outcome)


def machine_test(machine: type[Machine], tries: int, steps: int) -> Any:
    """A TestCase that makes `tries` runs of a machine, each of at most `steps` steps.

    A run is not shrunk: shrinking would take hundreds of runs of seconds each, and a run has few
    steps anyway.
    """
    case: Any = machine.TestCase
    case.settings = settings(tries, stateful_step_count=steps, phases=(Phase.generate,))
    return case
