"""Run a class of tries with hypothesis, which chooses the tries and shrinks a try that fails."""

from __future__ import annotations

import os
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from hypothesis.errors import DidNotReproduce, Flaky
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from proof.fuzz.outcome import RIGHT, Fault


@dataclass(frozen=True)
class Kind:
    """A class of tries, made by a function or by a state machine.

    Attributes:
        share: how many of 1000 tries are of this class.
        prepare: makes what all tries need. It is called once, with a folder that stays; by default
            it does nothing.
        attempt: makes one try and returns its outcome, or raises a Fault. It gets random numbers,
            which hypothesis chooses; an empty folder, in which it leaves the bad input; and the
            result of `prepare`.
        machine: used instead of `attempt`: a state machine, each run of which is a try.
        steps: how many steps a run of the machine has.
    """

    name: str
    share: int
    prepare: Callable[[Path], Any] = lambda shared: None
    attempt: Callable[[random.Random, Path, Any], str] | None = None
    machine: type[Machine] | None = None
    steps: int = 1


class Tries:
    """Counts the tries of a class up to its first fault, and gives each try a folder.

    Attributes:
        counts: the number of tries by outcome.
        folder: the folder of the try that began last.
    """

    def __init__(self, place: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.folder, self._first = place / "try", place / "first"
        self._found = False

    def begin(self) -> Path:
        """Begin a try in an empty folder; keep that of the first fault, which may not recur."""
        if self._found and not self._first.exists():
            os.rename(self.folder, self._first)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        return self.folder

    def count(self, outcome: str, fault: bool = False) -> None:
        """Count a try, unless hypothesis makes it to shrink an earlier fault."""
        self.counts[outcome] += not self._found
        self._found |= fault


class Machine(RuleBasedStateMachine):
    """A state machine; each run is a try.

    Attributes:
        state: the result of `Kind.prepare`.
        folder: the folder of the try.
        outcome: the outcome of the run, if no Fault ends it.
    """

    def __init__(self, tries: Tries, state: Any) -> None:
        super().__init__()
        self._tries, self.state = tries, state
        self.folder, self.outcome = tries.begin(), RIGHT

    def finish(self) -> None:
        """Do and judge what comes after the last step; here nothing."""

    def teardown(self) -> None:
        """Finish the run, and count it as a try."""
        error = sys.exc_info()[1]  # hypothesis calls this in a `finally`
        try:
            if error is None:
                self.finish()
        except Fault as fault:
            error = fault
            raise
        finally:
            if isinstance(error, Fault):
                self._tries.count(error.outcome, fault=True)
            elif error is None:
                self._tries.count(self.outcome)


def search(
    kind: Kind, tries: int, seed: int, place: Path, again: str = ""
) -> tuple[Counter[str], Fault | None]:
    """Make `tries` tries, up to the first fault; return their number by outcome, and the fault.

    Args:
        kind: the class.
        tries: how many.
        seed: the same seed makes the same tries.
        place: the folder of the class, which is emptied first. The input of a fault stays there.
        again: `blob_of` an earlier fault: make only that try again.
    """
    shutil.rmtree(place, ignore_errors=True)
    (place / "shared").mkdir(parents=True)
    state, made = kind.prepare(place / "shared"), Tries(place)
    settings = hypothesis.settings(
        max_examples=tries,
        stateful_step_count=kind.steps,
        database=None,
        deadline=None,
        # A machine's run is not shrunk: that would take hundreds of runs of seconds each, and a run
        # has few steps anyway.
        phases=(Phase.generate,) if kind.machine else (Phase.generate, Phase.shrink),
        suppress_health_check=[*HealthCheck],
        report_multiple_bugs=False,
        print_blob=True,
    )
    test: Any = (
        (lambda: kind.machine(made, state)) if kind.machine else _property(kind, made, state)
    )
    test = hypothesis.seed(seed)(test)
    if again:
        test = hypothesis.reproduce_failure(hypothesis.__version__, again.encode())(test)
    try:
        if kind.machine:
            run_state_machine_as_test(test, settings=settings)
        else:
            settings(test)()
    except DidNotReproduce:
        return made.counts, None
    except Fault as fault:
        return made.counts, fault
    except Flaky as flaky:  # hypothesis repeated the try, and the fault did not come again
        return made.counts, next(error for error in _inside(flaky) if isinstance(error, Fault))
    shutil.rmtree(place)
    return made.counts, None


def _property(kind: Kind, made: Tries, state: Any) -> Callable[[], None]:
    @given(st.randoms(use_true_random=False))
    def one(rng: random.Random) -> None:
        assert kind.attempt is not None  # else the class has a state machine
        try:
            outcome = kind.attempt(rng, made.begin(), state)
        except Fault as fault:
            made.count(fault.outcome, fault=True)
            raise
        made.count(outcome)

    return one


def _inside(error: BaseException) -> Iterator[BaseException]:
    """An error, the errors of its group, and the contexts of all of them."""
    yield error
    for inner in (*getattr(error, "exceptions", ()), error.__context__):
        if inner is not None:
            yield from _inside(inner)


def blob_of(fault: Fault) -> str:
    """The try of a fault, as letters for `search(again=...)`.

    They are empty if the fault did not come again, for example if it depends on the moment of a
    signal.
    """
    notes = "\n".join(getattr(fault, "__notes__", ()))
    found = re.search(r"@reproduce_failure\([^,]*, b'([^']*)'\)", notes)
    return found[1] if found else ""


def steps_of(fault: Fault) -> list[str]:
    """The steps of a state machine that led to a fault, as hypothesis prints them."""
    notes = "\n".join(getattr(fault, "__notes__", ()))
    return [
        line for line in notes.splitlines() if line.startswith("state.") and "teardown" not in line
    ]
