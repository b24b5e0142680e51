"""One class of tries, searched by hypothesis: it chooses what is tried, and shrinks what fails."""

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
    """A class of tries: a property, or a state machine.

    Attributes:
        share: how many of 1000 tries are of this class.
        prepare: makes what all tries begin with. It is called once, with a folder that stays;
            by default it does nothing.
        attempt: makes one try and returns its outcome, or raises a Fault. It gets random numbers,
            which hypothesis chooses; an empty folder, in which it leaves the bad input; and the
            result of `prepare`.
        machine: in place of `attempt`, the state machine of which each run is a try.
        steps: of each run.
    """

    name: str
    share: int
    prepare: Callable[[Path], Any] = lambda shared: None
    attempt: Callable[[random.Random, Path, Any], str] | None = None
    machine: type[Machine] | None = None
    steps: int = 1


class Tries:
    """Counts the tries of a class up to its first fault, and gives each a folder.

    Attributes:
        counts: the tries by outcome.
        folder: that of the try that was begun last.
    """

    def __init__(self, place: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.folder, self._first = place / "try", place / "first"
        self._found = False

    def begin(self) -> Path:
        """Begin a try in an empty folder. The first fault's stays: it may not come again."""
        if self._found and not self._first.exists():
            os.rename(self.folder, self._first)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        return self.folder

    def count(self, outcome: str, fault: bool = False) -> None:
        """Count a try; those by which hypothesis shrinks a fault are not counted."""
        self.counts[outcome] += not self._found
        self._found |= fault


class Machine(RuleBasedStateMachine):
    """A state machine of which each run is a try.

    Attributes:
        state: the result of `prepare`.
        folder: the folder of the try.
        outcome: that of the whole run, if no Fault ends it.
    """

    def __init__(self, tries: Tries, state: Any) -> None:
        super().__init__()
        self._tries, self.state = tries, state
        self.folder, self.outcome = tries.begin(), RIGHT

    def finish(self) -> None:
        """What is to be done and judged after the last step."""

    def teardown(self) -> None:
        """Count the try."""
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
    """Make so many tries, up to the first fault; return them by outcome, and the fault.

    Args:
        kind: the class.
        tries, seed: how many tries, and the number on which all of them depend.
        place: the folder of the class, which is made anew. The input of a fault stays there.
        again: in place of all this, the one example that a fault gave as its `blob`.
    """
    shutil.rmtree(place, ignore_errors=True)
    (place / "shared").mkdir(parents=True)
    state, made = kind.prepare(place / "shared"), Tries(place)
    settings = hypothesis.settings(
        max_examples=tries,
        stateful_step_count=kind.steps,
        database=None,
        deadline=None,
        # To shrink the run of a machine takes hundreds of runs, each of seconds. It has few steps.
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
    except Flaky as flaky:  # hypothesis made the same try again, and it had no fault then
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
    """The error, those of its group, and those that were being handled when it came."""
    yield error
    for inner in (*getattr(error, "exceptions", ()), error.__context__):
        if inner is not None:
            yield from _inside(inner)


def blob_of(fault: Fault) -> str:
    """The shrunken example in letters, for `search(again=...)`.

    It is empty if the fault did not come again, as when it hangs on the moment of a signal.
    """
    notes = "\n".join(getattr(fault, "__notes__", ()))
    found = re.search(r"@reproduce_failure\([^,]*, b'([^']*)'\)", notes)
    return found[1] if found else ""


def steps_of(fault: Fault) -> list[str]:
    """The steps of a state machine that led to a fault, as hypothesis writes them."""
    notes = "\n".join(getattr(fault, "__notes__", ()))
    return [
        line for line in notes.splitlines() if line.startswith("state.") and "teardown" not in line
    ]
