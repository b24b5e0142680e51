"""The fuzz can fail: each kind of fault is found if it is planted, and a short run finds none.

Shape suffixes (docs/glossary.md): G.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import hypothesis
import pytest

from megatron_r3.data import rollout
from megatron_r3.data.engines import conversation
from megatron_r3.data.store import reader
from proof.fuzz import configs, outcome, prompts, responses, shards, signals, trees
from proof.fuzz.driver import Kind, input_test
from proof.fuzz.outcome import (
    BAD_MESSAGE,
    CRASH,
    HANG,
    REFUSED,
    RIGHT,
    SILENT,
    WRONGLY_REFUSED,
    Fault,
    bad_line,
    judged,
    note,
)

CHEAP = {module.KIND.name: module.KIND for module in (shards, responses, prompts, configs)}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("a.json: `topk` is 0; possible are 1 to 9", None),
        ("", "says nothing"),
        ("`topk` is 0", "names none"),
        ("a.json: one\na.json: two", "2 lines"),
        ("a.json: \x1b[2J", "not printable"),
        ("a.json: " + "x" * 1000, "1008 characters"),
        ("a.json: Traceback (most recent call last)", "traceback"),
    ],
)
def test_one_clear_line(text, wrong):
    said = bad_line(text, ["a.json"])
    assert said is None if wrong is None else wrong in said


def refuse(text="a.json: wrong", kind=ValueError):
    raise kind(text)


def prints():
    print("RuntimeWarning: overflow")
    refuse()


@pytest.mark.parametrize(
    ("action", "wrong", "must", "expected"),
    [
        (lambda: {}["items"], None, False, CRASH),
        (partial(open, "/nowhere"), None, False, CRASH),
        (b"\xff".decode, None, False, CRASH),
        (partial(sys.exit, 3), None, False, CRASH),
        (partial(refuse, kind=MemoryError), None, False, CRASH),
        (partial(time.sleep, 60), None, False, HANG),
        (partial(refuse, "a.json: wrong\na.json: more"), None, False, BAD_MESSAGE),
        (partial(refuse, "Expecting value: line 1 column 1"), None, False, BAD_MESSAGE),
        (prints, None, False, BAD_MESSAGE),
        (int, "other content", False, SILENT),
        (refuse, None, True, WRONGLY_REFUSED),
        (refuse, None, False, REFUSED),
        (int, None, True, RIGHT),
    ],
)
def test_an_outcome(action, wrong, must, expected, monkeypatch):
    monkeypatch.setattr(outcome, "LIMIT_S", 0.5)
    try:
        found = judged(action, lambda got: wrong, ["a.json"], must)
    except Fault as fault:
        found = fault.outcome
    assert found == expected


def planted(rng, folder, state):
    number = rng.randrange(1000)
    note(folder, f"number {number}")
    if number > 300 and state.pop():
        raise Fault(CRASH, "too large")
    return RIGHT


def search(kind: Kind, tries: int, seed: int, place: Path) -> tuple[Counter[str], Fault | None]:
    """The outcomes of the tries that `make fuzz` would make, and the fault."""
    counts: Counter[str] = Counter()

    def attempt(rng, folder, state):
        counts[outcome := kind.attempt(rng, folder, state)] += 1
        return outcome

    try:
        hypothesis.seed(seed)(input_test(replace(kind, attempt=attempt), tries, place))()
    except Fault as fault:
        return counts, fault
    return counts, None


def test_a_fault_is_shrunken_and_can_be_tried_again(tmp_path):
    kind = Kind("planted", planted, lambda shared: [True] * 9999)
    fault = search(kind, 100, 0, tmp_path)[1]
    assert fault.outcome == CRASH
    assert "@reproduce_failure" in "".join(fault.__notes__)
    assert (tmp_path / "planted" / "try" / "what").read_text() == "number 301"


@pytest.mark.parametrize("name", CHEAP)
def test_a_short_run_finds_no_fault_and_makes_the_same_tries_again(name, tmp_path):
    counts, found = search(CHEAP[name], 120, 3, tmp_path / name)
    assert found is None, found
    assert counts[RIGHT] >= 5
    assert counts[REFUSED] >= 20
    assert search(CHEAP[name], 120, 3, tmp_path / name)[0] == counts
    # two seeds may give as many of each outcome by chance; four do not
    others = (search(CHEAP[name], 120, seed, tmp_path / name)[0] for seed in (4, 5, 6, 7))
    assert any(other != counts for other in others)


def fill_the_memory(path):
    return [0] * (1 << 40)


read_prompts = prompts.read_prompts


@pytest.mark.parametrize(
    ("module", "holder", "name", "wrong", "expected"),
    [
        (shards, reader, "verify_shard", lambda shard: None, SILENT),
        (shards, shards, "difference", lambda got, expected: "another", SILENT),
        (responses, (rollout, conversation), "wrong_logprob", lambda logprobs_G: None, SILENT),
        (responses, responses.engines, "decode", lambda *args: [], SILENT),
        (responses, responses.engines, "decode", lambda *args: {}["no such field"], CRASH),
        (prompts, prompts, "read_prompts", lambda path: read_prompts(path)[:1], SILENT),
        (configs, configs, "read_model", fill_the_memory, CRASH),
    ],
)
def test_code_that_is_wrong(module, holder, name, wrong, expected, tmp_path, monkeypatch):
    for each in holder if isinstance(holder, tuple) else (holder,):
        monkeypatch.setattr(each, name, wrong)
    _, found = search(module.KIND, 400, 3, tmp_path / "class")
    assert found.outcome == expected, found


def fake(script):
    """In place of `megatron-r3`."""

    def start(arguments, folder, name):
        out, error = (folder / f"{name}.{kind}" for kind in ("out", "err"))
        words = [sys.executable, "-c", script, *arguments]
        return subprocess.Popen(words, cwd=folder, stdout=out.open("wb"), stderr=error.open("wb"))

    return start


APPLIES = "import sys; sys.exit(0)"
REFUSES = "import sys; sys.exit('error: ' + sys.argv[2] + ' is no tree')"
SPOILS = "import sys; open(sys.argv[2] + '/a', 'w'); sys.exit('error: ' + sys.argv[2] + ' is odd')"
TRACE = "import sys; {}[sys.argv[2]]"


@pytest.mark.parametrize(
    ("script", "expected"),
    [(APPLIES, SILENT), (REFUSES, WRONGLY_REFUSED), (SPOILS, SILENT), (TRACE, CRASH)],
)
def test_commands_on_trees_that_are_wrong(tmp_path, monkeypatch, script, expected):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "x.py").write_text("base")
    state = trees.State({}, {"x.py": b"base"}, {"x.py": b"patched"})
    monkeypatch.setattr(trees, "start", fake(script))
    with pytest.raises(Fault, match=expected):
        trees.run_command("apply", tmp_path / "tree", tmp_path, state, must=True)


IGNORES = """
import signal, time
[signal.signal(n, lambda *_: None) for n in (1, 2, 15)]
time.sleep(30)
"""
GOES_ON = """
import json, signal, sys, urllib.request
signal.signal(signal.SIGTERM, lambda *_: None)
url = sys.argv[sys.argv.index("--url") + 1]
prompt = json.loads(open("prompts.jsonl").readline())["prompt"]
for seed in range(100):
    body = json.dumps({"prompt": prompt, "seed": seed, "model": "served"}).encode()
    urllib.request.urlopen(url + "/v1/completions", body).read()
sys.stderr.write("interrupted\\n")
sys.exit(143)
"""


@pytest.mark.parametrize(
    ("script", "expected", "what"),
    [
        (IGNORES, HANG, "does not end"),
        ("import sys; sys.exit(1)", SILENT, "again ends with 1"),
        (GOES_ON, SILENT, "requests after the signal"),  # and ends as it must, but too late
    ],
)
def test_a_collection_that_is_wrong(tmp_path, monkeypatch, script, expected, what):
    monkeypatch.setattr(signals, "start", fake(script))
    if expected == HANG:
        monkeypatch.setattr(signals, "LIMIT_S", 1.0)
    monkeypatch.setattr(signals.Collection, "place", tmp_path)
    machine = signals.Collection()
    machine.begin(40, 2, 1000, 0.005)

    def collect():
        machine.interrupt(signal.SIGTERM, None if expected == HANG else 0.0, 0.03, None)
        machine.finish()

    try:
        with pytest.raises(Fault, match=f"{expected}: .*{what}"):
            collect()
    finally:
        machine.close()
