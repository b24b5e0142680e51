"""The report of runs: lines that are not what they must be, and what a reader must not miss."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from html_page import Page, chart, report
from online_run import change, event_with, make_run

from megatron_r3.cli import main
from megatron_r3.loop.report import FIELDS, read_runs
from megatron_r3.loop.report_page import warnings_of
from megatron_r3.loop.run_directory import RunDirectory

pytest.importorskip("plotly")


# -- lines that are not what they must be


METRICS, TRAINER, COLLECTOR, SUPERVISOR = (
    "metrics.jsonl",
    *(f"events/{part}.jsonl" for part in ("trainer", "collector", "supervisor")),
)
METRIC = '{"iteration": 3, "update/entropy": 0.1}'
EVENT = '{"time": 1, "event": '
BAD = [
    (METRICS, "[1]", "expected a JSON object"),
    (METRICS, '{"update/entropy": 0.1}', "expected an iteration and its values"),
    (METRICS, METRIC.replace("0.1", '"0.1"'), "all of them numbers"),
    (METRICS, METRIC.replace("update/entropy", "router mismatch/layer x"), "layer x"),
    (METRICS, "nonsense", "not JSON"),
    (METRICS, "", "not JSON"),
    (TRAINER, EVENT + '"published"}', "the event published has no version"),
    (SUPERVISOR, '{"event": "ended", "part": "trainer"}', "the event ended has no time"),
]


@pytest.mark.parametrize(("file", "line", "expected"), BAD)
def test_a_bad_line_is_refused_with_its_place(tmp_path, capsys, file, line, expected):
    run = make_run(tmp_path / "run", 4)
    read_runs([run])  # the control: the run is good
    lines = (run / file).read_text().splitlines()
    (run / file).write_text("\n".join([*lines[:1], line, *lines[1:], ""]))
    (run / "report.html").write_text("an older page")
    assert main(["rl", "report", str(run)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {run / file}, line 2: ")
    assert expected in error
    assert error.count("\n") == 1
    assert (run / "report.html").read_text() == "an older page"
    assert not list(run.glob(".report*"))


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["rl", "report", str(tmp_path / "empty")]) == 1
    assert "neither metrics.jsonl nor events" in capsys.readouterr().err
    assert main(["rl", "report", str(tmp_path / "gone")]) == 1
    assert "is no directory of a run" in capsys.readouterr().err


def test_lines_that_were_cut_off_are_left_out_and_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 4)
    metrics, events = run / "metrics.jsonl", run / "events" / "collector.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole[:-20])
    events.write_text(events.read_text() + '{"time": 17')
    # a part that was killed, and started again
    RunDirectory(run).note("collector", "waited", seconds=1.5, **{"for": "policy 2"})
    (one,) = read_runs([run])
    assert one.steps == 3
    assert any("metrics.jsonl: line 4, the last one, is cut off" in note for note in one.notes)
    assert any("collector.jsonl: line 9 is cut off" in note for note in one.notes)
    assert [event["seconds"] for event in one.of("waited")][-1] == 1.5
    text = report(run, out=tmp_path / "page.html")
    assert "line 4, the last one, is cut off and was left out" in Page(text).text
    assert chart(text, "Reward")["data"][0]["x"] == [1, 2, 3]
    metrics.write_text(whole.rstrip("\n"))  # the control: a whole line without its end
    assert read_runs([run])[0].steps == 4


def test_steps_of_a_trainer_that_was_started_again_come_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 4)
    last = {"iteration": 4, "update/entropy": 0.5}
    change(run / "metrics.jsonl", lambda lines: lines.extend([dict(lines[3]), last]))
    (one,) = read_runs([run])
    assert one.steps == 4
    assert "1 steps were logged twice (4 to 4)" in one.notes[0]
    assert one.metrics["update/entropy"][4] == 0.5


def test_what_is_not_finite_or_unknown_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 4)
    change(run / "metrics.jsonl", lambda lines: lines[1].update({"update/entropy": math.nan}))
    change(run / TRAINER, lambda lines: lines.append({"time": 1, "event": "sang"}))
    change(run / COLLECTOR, event_with("pushed", 0, abs_dlogp=math.nan, limit=None))
    check, _, limit = chart(report(run, out=tmp_path / "page.html"), "Check of each push")["data"]
    assert check["x"] == limit["x"] == [1]
    (one,) = read_runs([run])
    assert [*one.metrics["update/entropy"]] == [1, 3, 4]
    assert "update/entropy is not finite in 1 steps; its curve leaves these steps out" in one.notes
    assert "trainer.jsonl: 1 events 'sang' are unknown, and were left out" in one.notes


# -- what a reader must not miss


WRONG = [
    (COLLECTOR, event_with("pushed", 1, verified=False, abs_dlogp=0.65),
        "the push of version 1 was not verified: |dlogp| is 0.65, the limit is 0.02"),
    (COLLECTOR, event_with("collected", 1, version=9),
        "1 collections were sampled by a version without a verified push"),
    (COLLECTOR, event_with("examined", 1, alarms=["shifted rows: by one token"]),
        "rollouts of version 1 were not stored: shifted rows: by one token"),
    (METRICS, event_with("", 2, **{"routes dispatched as recorded": 0.999996}),
        "routes dispatched as recorded is below 1 in 1 steps, first in step 3, with replay"),
    (METRICS, event_with("", 1, **{"router mismatch/layer 2": 0.75}),
        "router mismatch is above one half in layer 2 in 1 steps, first in step 2"),
    (METRICS, event_with("", 1, **{"bounded ratio": 0.1}), "bounded ratio is above 0"),
    (SUPERVISOR, event_with("ended", 0, event="died", status=1),
        "the trainer died 1 times"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "how", "expected"), WRONG)
def test_what_is_wrong_is_said_first(tmp_path, file, how, expected):
    run = make_run(tmp_path / "run", 4)
    assert warnings_of(read_runs([run])[0]) == []
    change(run / file, how)
    warnings = warnings_of(read_runs([run])[0])
    assert any(warning.startswith(expected) for warning in warnings), warnings


def test_every_field_that_an_event_must_have_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "report.md").read_text()
    rows = re.findall(r"^\| (`[a-z`, ]+) \| (.*) \| (.*)\|$", text, re.MULTILINE)
    documented = {
        kind: {"time", *re.findall(r"`(\w+)`", must)}
        for kinds, must, _ in rows
        for kind in re.findall(r"`(\w+)`", kinds)
    }
    assert documented == {kind: {*must.split()} for kind, must in FIELDS.items()}
