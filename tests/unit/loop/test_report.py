"""The report of runs: its numbers are those of the files, several runs side by side, one page.

Shape suffixes (docs/glossary.md): N.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from html_page import Page, chart, outside, report
from online_run import change, event_with, lines_of, make_run
from stored import INFO, make_rollout

from megatron_r3.cli import main
from megatron_r3.data.store import write_shard
from megatron_r3.loop.report import read_runs
from megatron_r3.loop.report_charts import stage_times

pytest.importorskip("plotly")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "online", steps=12, restarts=True)


@pytest.fixture(scope="module")
def text(run: Path) -> str:
    return report(run, out=run / "page.html")


def event_lines(run: Path, kind: str) -> list[dict[str, Any]]:
    """The collector's events of a kind."""
    events = lines_of(run / "events" / "collector.jsonl")
    return [event for event in events if event["event"] == kind]


METRICS = {
    "Reward": "update/reward mean",
    "KL from sampler to trainer (k3)": "update/sampler k3 kl",
    "Router mismatch": "router mismatch",
    "Policy lag": "update/policy lag",
}


def test_curves_of_steps_are_those_of_the_file(run: Path, text: str) -> None:
    logged = lines_of(run / "metrics.jsonl")
    for title, name in METRICS.items():
        line, *firsts = chart(text, title)["data"]
        assert line["x"] == [one["iteration"] for one in logged]
        assert line["y"] == [one[name] for one in logged]
        assert bool(firsts) == (title in ("KL from sampler to trainer (k3)", "Router mismatch"))
        for first in firsts:  # mini-steps are told apart: of two on a collection the first
            assert first["name"] == "online, first steps"
            assert (first["x"], first["y"]) == (line["x"][::2], line["y"][::2])


def test_curves_of_events_are_those_of_the_files(run: Path, text: str) -> None:
    pushed, collected, examined = (
        event_lines(run, kind) for kind in ("pushed", "collected", "examined")
    )
    line, cached, limit = chart(text, "Check of each push")["data"]
    assert line["y"] == [event["abs_dlogp"] for event in pushed]
    assert (cached["y"], limit["y"]) == ([0.0] * len(pushed), [0.02] * len(pushed))
    for title, values in (
        ("Responses cut at the longest length", [event["length_cut"] for event in collected]),
        ("Truth test of each collection", [event["mismatch"] for event in examined]),
        ("Routes that agree after a push", [min(event["route_agreement"]) for event in pushed]),
    ):
        (line,) = chart(text, title)["data"]
        assert line["y"] == values
    sampling, pushing, *_ = chart(text, "Where the time goes")["data"]
    assert sampling["y"] == [event["seconds"] for event in collected]
    assert pushing["y"] == [event["seconds"] for event in pushed]


def test_plotly_knows_every_property(text: str) -> None:
    from plotly.graph_objects import Figure

    for figure in Page(text).figures:
        Figure({name: figure[name] for name in ("data", "layout")})
    with pytest.raises(ValueError, match="dashes"):  # the control: plotly.js would say nothing
        Figure({"data": [{"type": "scatter", "line": {"dashes": "dot"}}]})


def test_runs_stand_side_by_side(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "live-0", 10, replay=False, seed=1),
        make_run(tmp_path / "live-1", 8, replay=False, seed=2),
        make_run(tmp_path / "r3-0", 10, seed=3),
    ]
    text = report(*runs, out=tmp_path / "page.html")
    page = Page(text)
    live, replayed = "the trainer chose its experts live", "routes from rollout (R3)"
    assert [page.row(run.name)[:3] for run in runs] == [
        [live, "cpu", "10"],
        [live, "cpu", "8"],
        [replayed, "cpu", "10"],
    ]
    # live training need not dispatch as recorded
    assert max(chart(text, "Routes dispatched as recorded")["data"][0]["y"]) < 1
    assert "Nothing alarming" in page.text
    traces = chart(text, "Reward")["data"]
    assert [trace["name"] for trace in traces] == ["live-0", "live-1", "r3-0"]
    colours = [trace["line"]["color"] for trace in traces]
    assert colours[0] == colours[1] != colours[2]  # seeds of one experiment
    assert [len(trace["x"]) for trace in traces] == [10, 8, 10]
    assert outside(text) == []


def test_several_runs_need_a_name_for_the_page(tmp_path, capsys):
    runs = [make_run(tmp_path / name, 2) for name in "ab"]
    assert main(["rl", "report", *map(str, runs)]) == 1
    assert "--out FILE" in capsys.readouterr().err
    assert main(["rl", "report", *map(str, runs[:1] * 2), "--out", str(tmp_path / "p")]) == 1
    assert "given twice" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["rl", "report", str(runs[0]), "--out", str(tmp_path / "file" / "p")]) == 1
    assert f"Not a directory: '{tmp_path / 'file'}'" in capsys.readouterr().err


def test_times_by_stage_are_the_time_on_the_clock(run: Path) -> None:
    (one,) = read_runs([run])
    times = stage_times(one)
    clock = [event["time"] for event in one.of("collected")]
    for collection in range(1, 6):
        whole = sum(curve[collection] for curve in times.values())
        assert whole == pytest.approx(clock[collection] - clock[collection - 1], abs=1e-3)
    assert times["the rest"][3] > 8  # the restart


def test_prompts_and_answers_are_those_of_the_store(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 4)
    assert "Prompts and answers" not in Page(report(run, out=tmp_path / "page.html")).text
    made = [make_rollout(9, i, group=i // 8, reward=i / 128, sample=i % 8) for i in range(128)]
    write_shard(run / "rollouts", INFO, made)  # two collections of 64
    page = Page(report(run, out=tmp_path / "page.html"))
    (table,) = [table for table in page.tables if table[0][:2] == ["collection", "prompt"]]
    shown = [made[i] for i in (0, 16, 32, 48, 64, 80, 96, 112)]
    cut = made[0].prompt_length
    words = [" ".join(map(str, one.tokens_N.tolist())) for one in shown]
    assert [f"{row[1]} {row[2]}" for row in table[1:]] == words
    assert [len(row[1].split()) for row in table[1:]] == [one.prompt_length for one in shown]
    assert 0 < cut < 9
    assert [row[0] for row in table[1:]] == [*"00001111"]
    assert [row[3] for row in table[1:]] == [f"{one.reward:.3g}" for one in shown]
    # the control: the policy's tokenizer makes texts of them
    vocabulary = {f"t{n}": n for n in range(256)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.save(str(run / "policies" / "v000000" / "tokenizer.json"))
    page = Page(report(run, out=tmp_path / "page.html"))
    (table,) = [table for table in page.tables if table[0][:2] == ["collection", "prompt"]]
    assert table[1][1].split() == [f"t{n}" for n in made[0].tokens_N[:cut].tolist()]
    (run / "policies" / "v000000" / "tokenizer.json").write_text("{}")  # the page goes without it
    assert "Prompts and answers of run" in Page(report(run, out=tmp_path / "page.html")).text


HOSTILE = '</script><img src="http://e.example" onerror=alert(1)>&amp;'


def test_texts_of_a_run_are_escaped(tmp_path: Path) -> None:
    assert ("img", {"src": "x"}) in Page('<img src="x">').tags  # the control: the parser sees one
    runs = [make_run(tmp_path / name, 4) for name in ("<img src=x onerror=alert(1)>", "b")]
    run = runs[0]
    with (run / "config.toml").open("a") as file:
        file.write(f"# {HOSTILE}\n")
    change(run / "events/trainer.jsonl", event_with("published", 0, device=f"{HOSTILE}\u202e"))
    change(run / "events/supervisor.jsonl", event_with("ended", 0, event="died", part=HOSTILE))
    failed = {"time": 1, "event": "failed", "collection": 0, "reason": HOSTILE}
    change(run / "events/collector.jsonl", lambda lines: lines.append(failed))
    change(run / "metrics.jsonl", lambda lines: lines[0].update({HOSTILE: math.inf}))
    text = report(*runs, out=tmp_path / "page.html")
    page = Page(text)
    tags = [tag for tag, _ in page.tags]
    assert "img" not in tags
    assert tags.count("script") == 3
    assert not [a for _, attributes in page.tags for a in attributes if a.startswith("on")]
    assert page.text.count(HOSTILE) >= 5
    assert "\u202e" not in text  # a mark that turns the direction of writing
    # plotly makes links and other tags of a text, unless it is escaped
    assert "<" not in json.dumps([figure["data"] for figure in page.figures])
    assert chart(text, "Reward")["data"][0]["name"] == "&lt;img src=x onerror=alert(1)&gt;"


def test_the_page_needs_nothing_from_outside(text: str) -> None:
    assert outside(text) == []
    assert "default-src 'none'" in text
    for wrong in (
        '<script src="https://cdn.example/plot.js"></script>',
        "<style>p { background: url(a.png) }</style>",
    ):
        assert outside(wrong) != []


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    run = make_run(tmp_path / "begun", 2)
    (run / "metrics.jsonl").unlink()
    (run / "events" / "collector.jsonl").unlink()
    page = Page(report(run, out=tmp_path / "page.html"))
    assert "metrics.jsonl has no step yet" in page.text
    assert page.row("begun") == ["", "cpu", "0", "0 of 0", "0", "0", "0"]
    assert "Nothing of this was recorded." in page.text


def test_without_plotly_the_error_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run", 2)
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.delitem(sys.modules, "plotly.offline", raising=False)
    monkeypatch.delitem(sys.modules, "megatron_r3.loop.report_page", raising=False)
    assert main(["rl", "report", str(run)]) == 1
    assert "needs plotly: pip install 'megatron-r3[report]'" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["rl", "report", str(run)]) == 0  # the control
    assert (run / "report.html").is_file()
