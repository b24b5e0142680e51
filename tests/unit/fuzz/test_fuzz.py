"""The fuzz can fail: each kind of fault is counted if it is planted, and a short run finds none.

Shape suffixes (docs/glossary.md): G.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_r3.data import rollout
from megatron_r3.data.engines import conversation
from megatron_r3.data.store import reader
from proof.fuzz import (
    command,
    configs,
    outcome,
    pool,
    prompts,
    responses,
    run,
    shards,
    signals,
    trees,
)
from proof.fuzz.outcome import (
    BAD_MESSAGE,
    CRASH,
    FAULTS,
    HANG,
    REFUSED,
    RIGHT,
    SILENT,
    WRONGLY_REFUSED,
    Kind,
    Verdict,
    bad_line,
    judged,
    noted,
)

CHEAP = ("shards", "responses", "prompts", "configs")


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


def test_a_list_may_stand_below_an_error_line():
    good = "error: DIR is not 0.19.2:\n  a.py: missing\n  b.py: missing\n"
    assert command.bad_stderr(good, ["DIR"]) is None
    for bad in ("DIR is wrong", "error: DIR\nerror: DIR", f"{good}Traceback (most", "error: a\n"):
        assert command.bad_stderr(bad, ["DIR"])


def planted(what: str) -> None:
    if what == "attribute":
        raise AttributeError("'NoneType' object has no attribute 'items'")
    if what == "system":
        raise FileNotFoundError(2, "No such file", "a.json")
    if what == "unicode":
        b"\xff".decode()
    if what == "exit":
        sys.exit(3)
    if what == "sleep":
        time.sleep(60)
    if what == "segfault":
        ctypes.string_at(0)
    if what == "memory":
        bytearray(8 << 30)
    if what == "killed":
        os.kill(os.getpid(), 9)
    if what == "two lines":
        raise ValueError("a.json: wrong\na.json: more")
    if what == "no name":
        raise ValueError("Expecting value: line 1 column 1")
    if what == "prints":
        print("RuntimeWarning: overflow")
        raise ValueError("a.json: wrong")
    if what in ("refused", "refuses all"):
        raise ValueError("a.json: wrong")


PLANTED = {
    "attribute": CRASH, "system": CRASH, "unicode": CRASH, "exit": CRASH, "segfault": CRASH,
    "memory": CRASH, "killed": CRASH, "sleep": HANG, "two lines": BAD_MESSAGE,
    "prints": BAD_MESSAGE, "no name": BAD_MESSAGE, "accepts all": SILENT,
    "refuses all": WRONGLY_REFUSED, "refused": REFUSED, "fine": RIGHT,
}  # fmt: skip


def attempt(rng: random.Random, folder: Path, names: list[str]) -> Verdict:
    what = names.pop(0)
    names.append(what)
    outcome.note(folder, what)
    (folder / "input").write_text(what)
    wrong = "other content" if what == "accepts all" else None
    return judged(lambda: planted(what), lambda _: wrong, ["a.json"], what == "refuses all")


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_is_counted(what, tmp_path, capfd):
    """The fault is counted, and the next try is made all the same."""
    limit_s = 1.5 if PLANTED[what] == HANG else 60.0
    kind = Kind("planted", 1, limit_s, 256, lambda shared: [what, "fine"], attempt)
    found = [*pool.run_tries(kind, [0, 1], 0, 1, tmp_path)]
    assert (found[0].what, found[0].verdict.outcome) == (what, PLANTED[what]), found[0].verdict
    # A new worker, which replaces one that died, begins the list of planted faults again.
    assert found[1].verdict.outcome in (RIGHT, PLANTED[what])
    fault = PLANTED[what] in FAULTS
    assert (tmp_path / "planted-0-0" / "input").exists() == fault
    assert (tmp_path / "planted-0-0" / "fault.txt").exists() == fault
    status = run.main(["--tries", "1", "--out", str(tmp_path)], [kind])
    told = capfd.readouterr()
    assert status == fault
    assert ("--only planted --seed 0 --try 0" in told.out) == fault
    assert ("1 faults" in told.err) == fault


def test_the_process_that_died_says_how(tmp_path):
    kind = Kind("planted", 1, 30.0, 256, lambda shared: ["segfault"], attempt)
    (found,) = pool.run_tries(kind, [0], 0, 1, tmp_path)
    assert "SIGSEGV" in found.verdict.detail
    assert "in planted" in found.verdict.detail  # faulthandler's stack


def test_shares():
    kinds = [run.load(name) for name in run.CLASSES]
    assert [kind.name for kind in kinds] == [*run.CLASSES]
    for tries in (10_000, 400, 60):
        counts = run.shares(tries, kinds)
        assert sum(counts) == tries
        assert min(counts) >= 1
    assert run.shares(10_000, kinds)[-2:] == [120, 80]


def made(name, tmp_path, seed=3, count=40):
    found = pool.run_tries(run.load(name), range(count), seed, 2, tmp_path)
    return sorted((r.number, r.what, r.verdict.outcome) for r in found)


@pytest.mark.parametrize("name", CHEAP)
def test_the_same_seed_makes_the_same_tries(name, tmp_path):
    first = made(name, tmp_path)
    assert made(name, tmp_path) == first
    assert made(name, tmp_path, seed=4) != first
    assert len({what for _, what, _ in first}) > 5


@pytest.mark.parametrize("name", CHEAP)
def test_a_short_run_finds_no_fault(name, tmp_path, capfd):
    status = run.main(["--only", name, "--tries", "150", "--seed", "3", "--out", str(tmp_path)])
    told = capfd.readouterr()
    assert status == 0, told.out
    row = told.out.splitlines()[1].split()
    assert int(row[2]) >= 5  # accepted
    assert int(row[3]) >= 20  # refused


# -- what each class would say of code that is wrong


def outcomes(name, tmp_path, count=120):
    return {outcome for _, _, outcome in made(name, tmp_path, count=count)}


def test_shards_that_nobody_verifies(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "verify_shard", lambda shard: None)
    assert SILENT in outcomes("shards", tmp_path)


def test_shards_whose_reader_mixes_up_rollouts(tmp_path, monkeypatch):
    """The reader is replaced after `prepare` has read what is in the stores."""
    states = shards.prepare(tmp_path)
    read = shards.RolloutStore.column
    backwards = lambda self, name: read(self, name)[::-1]  # noqa: E731
    monkeypatch.setattr(shards.RolloutStore, "column", backwards)
    found = []
    for number in range(60):
        (folder := tmp_path / str(number)).mkdir()
        verdict = shards.attempt(random.Random(number), folder, states)
        # of a store that lost files, or grows, the rollouts are compared and the columns are not
        if not noted(folder).startswith("files"):
            found.append(verdict.outcome)
    assert SILENT in found
    assert RIGHT not in found


@pytest.mark.parametrize(
    ("decode", "expected"),
    [
        (lambda body, request, shape, where: body["no such field"], CRASH),
        (lambda body, request, shape, where: [], SILENT),
    ],
)
def test_decoders_that_are_wrong(tmp_path, monkeypatch, decode, expected):
    decoders = dict.fromkeys(("vllm", "sglang", "megatron"), decode)
    kind = Kind("responses", 1, 30.0, 256, lambda shared: decoders, responses.attempt)
    found = {r.verdict.outcome for r in pool.run_tries(kind, range(40), 3, 1, tmp_path)}
    assert expected in found
    assert RIGHT not in found


def test_a_decoder_that_takes_any_log_prob(tmp_path, monkeypatch):
    for module in (rollout, conversation):
        monkeypatch.setattr(module, "wrong_logprob", lambda logprobs_G: None)
    assert SILENT in outcomes("responses", tmp_path, 200)


def test_prompts_of_which_one_is_lost(tmp_path, monkeypatch):
    read = prompts.read_prompts
    monkeypatch.setattr(prompts, "read_prompts", lambda path: read(path)[:1])
    assert SILENT in outcomes("prompts", tmp_path)


def test_a_config_that_fills_the_memory(tmp_path, monkeypatch):
    def read_model(path):
        return [0] * (1 << 30)

    monkeypatch.setattr(configs, "read_model", read_model)
    assert outcomes("configs", tmp_path, 4) == {CRASH}


def fake(script):
    """In place of `megatron-r3`."""

    def start(arguments, folder, name):
        with (
            (folder / f"{name}.out").open("wb") as out,
            (folder / f"{name}.err").open("wb") as error,
        ):
            words = [sys.executable, "-c", script, *arguments]
            return subprocess.Popen(words, cwd=folder, stdout=out, stderr=error)

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
    given = trees.run_command("apply", tmp_path / "tree", tmp_path, state, must=True)
    assert given.outcome == expected, given


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("import signal, time; [signal.signal(n, lambda *_: None) for n in (1, 2, 15)];"
         "time.sleep(30)", HANG),
        ("import sys; sys.exit(1)", SILENT),
    ],
)  # fmt: skip
def test_a_collection_that_is_wrong(tmp_path, monkeypatch, script, expected):
    monkeypatch.setattr(signals, "start", fake(script))
    if expected == HANG:
        monkeypatch.setattr(signals, "LIMIT_S", 1.0)
        monkeypatch.setattr(signals, "SIGNALS", (15,))
    verdict = signals.attempt(random.Random(0), tmp_path, signals.prepare(tmp_path))
    assert verdict.outcome == expected, verdict


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


def test_a_collection_that_goes_on_after_a_signal(tmp_path, monkeypatch):
    """It ends as it must, but only after one of its workers took all the rest."""

    def when_it_asks(rng, process, server, total, seen):
        signals.wait_until(lambda: bool(seen), process)
        return True

    monkeypatch.setattr(signals, "start", fake(GOES_ON))
    monkeypatch.setattr(signals, "wait_for_a_moment", when_it_asks)
    monkeypatch.setattr(signals, "SIGNALS", (signal.SIGTERM,))
    rng = random.Random(0)
    monkeypatch.setattr(rng, "random", lambda: 0.5)  # the signal is sent once
    verdict = signals.attempt(rng, tmp_path, signals.prepare(tmp_path))
    assert verdict.outcome == SILENT, verdict
    assert "requests after the signal" in verdict.detail, verdict
