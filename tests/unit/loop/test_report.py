"""The report of runs: its numbers are those of the files, several runs side by side, one page.

Shape suffixes (docs/glossary.md): N.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import tokenizers
from html_page import Page, chart, lines, outside, report
from online_run import change, event_with, lines_of, make_run
from stored import INFO, make_rollout

from megatron_r3.cli import main
from megatron_r3.data.store import write_shard
from megatron_r3.loop.report import read_runs
from megatron_r3.loop.report_charts import figures_of
from megatron_r3.loop.report_contents import LOG, Chart
from megatron_r3.loop.report_numbers import (
    duration,
    groups_of,
    line_of,
    stage_times,
    wall_seconds,
)

pytest.importorskip("plotly")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "online", steps=12, restarts=True)


@pytest.fixture(scope="module")
def text(run: Path) -> str:
    return report(run, out=run / "page.html")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """live-0 and live-1, of which one is shorter, beside one run with replay, r3-0."""
    folder = tmp_path_factory.mktemp("compared")
    runs = [
        make_run(folder / "live-0", 10, replay=False, seed=1),
        make_run(folder / "live-1", 8, replay=False, seed=2),
        make_run(folder / "r3-0", 10, seed=3),
    ]
    return folder, report(*runs, out=folder / "page.html")


def event_lines(run: Path, kind: str) -> list[dict[str, Any]]:
    """The collector's events of a kind."""
    events = lines_of(run / "events" / "collector.jsonl")
    return [event for event in events if event["event"] == kind]


# -- the page and the files


METRICS = {
    "Reward": "update/reward mean",
    "Entropy": "update/entropy",
    "Response length": "update/response length",
    "KL from sampler to trainer (k3)": "update/sampler k3 kl",
    "Extreme tokens, F(2)": "update/sampler extreme",
    "Router mismatch": "router mismatch",
    "Policy lag": "update/policy lag",
    "Learning rate": "update/learning rate",
    "Gradient norm": "update/gradient norm",
    "Loss": "update/loss",
    "Seconds of a step": "update/seconds",
}
DRIFTING = {"KL from sampler to trainer (k3)", "Extreme tokens, F(2)", "Router mismatch", "Loss"}


def test_curves_of_steps_are_those_of_the_file(run: Path, text: str) -> None:
    logged = lines_of(run / "metrics.jsonl")
    other = [one["token mismatch"] for one in logged]  # the control: another curve differs
    for title, name in METRICS.items():
        line, *firsts = lines(chart(text, title))
        assert line["x"] == [one["iteration"] for one in logged]
        assert line["y"] == pytest.approx([one[name] for one in logged], rel=1e-5)  # six digits
        assert line["y"] != pytest.approx(other, rel=1e-5)
        assert bool(firsts) == (title in DRIFTING)
        for first in firsts:  # mini-steps are told apart: of two on a collection the first
            assert first["name"] == "online, first steps"
            assert (first["x"], first["y"]) == (line["x"][::2], line["y"][::2])
    clipped = "update/clip fraction"
    for title, values in (
        ("Clipped tokens", [one[f"{clipped} low"] + one[f"{clipped} high"] for one in logged]),
        ("Tokens a second", [one["update/tokens"] / one["update/seconds"] for one in logged]),
    ):
        assert lines(chart(text, title))[0]["y"] == pytest.approx(values, rel=1e-5)


def test_curves_of_events_are_those_of_the_files(run: Path, text: str) -> None:
    pushed, collected, examined = (
        event_lines(run, kind) for kind in ("pushed", "collected", "examined")
    )
    line, limit = lines(chart(text, "Check of each push"))
    assert (line["y"], limit["y"]) == ([e["abs_dlogp"] for e in pushed], [0.02] * len(pushed))
    for title, values in (
        ("Reward of each collection", [event["reward"] for event in collected]),
        ("Load of the busiest expert", [max(event["expert_load"]) for event in collected]),
        ("Truth test of each collection", [event["mismatch"] for event in examined]),
        ("Routes that agree after a push", [min(event["route_agreement"]) for event in pushed]),
    ):
        (line,) = lines(chart(text, title))
        assert line["y"] == pytest.approx(values, rel=1e-5)
    sampling, pushing, *_ = chart(text, "Where the time goes")["data"]
    assert sampling["y"] == [event["seconds"] for event in collected]
    assert pushing["y"] == [event["seconds"] for event in pushed]


def test_maps_have_the_values_of_each_layer(run: Path, text: str) -> None:
    logged = lines_of(run / "metrics.jsonl")
    collected = event_lines(run, "collected")
    (trace,) = chart(text, "Router mismatch by layer")["data"]
    assert trace["y"] == ["1", "2", "3", "4"]
    for layer, cells in zip(trace["y"], trace["z"], strict=True):
        assert cells == [one[f"router mismatch/layer {layer}"] for one in logged]
    (trace,) = chart(text, "Busiest expert by layer")["data"]
    assert trace["y"] == ["1", "2", "3", "4"]
    assert [*zip(*trace["z"], strict=True)] == [tuple(e["expert_load"]) for e in collected]


def test_plotly_knows_every_property_and_the_style_every_colour(text: str) -> None:
    from plotly.graph_objects import Figure

    style = set(re.findall(r"(--\w+):", text.partition("<style>")[2].partition("</style>")[0]))
    for figure in Page(text).figures:
        colours = set(re.findall(r"var\((--\w+?)(?:-band)?\)", json.dumps(figure)))
        assert colours <= style
        Figure(json.loads(re.sub(r"-band\)", ")", json.dumps(figure))))
    with pytest.raises(ValueError, match="dashes"):  # the control: plotly.js would say nothing
        Figure({"data": [{"type": "scatter", "line": {"dashes": "dot"}}]})


def test_tables_say_what_the_files_say(run: Path, text: str) -> None:
    page, collected = Page(text), event_lines(run, "collected")
    assert page.row("model") == ["qwen3_moe, 4 layers, hidden size 32, 16 experts, top-2"]
    assert page.row("layout") == ["2 processes, EP2"]
    assert page.row("sampler") == [
        "embedded (transformers), new weights in place, made worse on purpose: router_noise 0.7"
    ]
    assert page.row("training options") == ["--moe-router-replay --rollouts-loss grpo --lr 4e-4"]
    assert page.row("replay") == ["on: routes from rollout (R3)"]
    assert page.row("device") == ["cpu"]
    assert page.row("steps") == ["12"]
    assert page.row("policy versions") == ["6"]
    assert page.row("rollouts") == [str(64 * 6)]
    assert page.row("tokens") == [f"{sum(event['tokens'] for event in collected):,}"]
    reward = [line["update/reward mean"] for line in lines_of(run / "metrics.jsonl")]
    assert page.row("Reward") == [f"{fmean(reward[:4]):.3g} → {fmean(reward[-4:]):.3g}"]
    k3 = [line["update/sampler k3 kl"] for line in lines_of(run / "metrics.jsonl")][::2]
    shown = f"{fmean(k3[:2]):.3g} → {fmean(k3[-2:]):.3g}"
    assert page.row("k3, first step of each collection") == [shown]
    assert page.row("KL from sampler to trainer (k3)") != [shown]
    (pushes,) = [table for table in page.tables if table[0][0] == "version"]
    assert [row[0] for row in pushes[1:]] == [*"012345"]
    assert {row[-1] for row in pushes[1:]} == {"✓ yes"}
    assert "the trainer died once (exit status -9)" in page.text
    assert 'engine = "embedded"' in page.text


# -- several runs


def test_runs_stand_side_by_side(compared: tuple[Path, str]) -> None:
    folder, text = compared
    page = Page(text)
    assert "live (mean of 2)" in page.text
    assert [row for table in page.tables for row in table if row[0] == "runs"] == [
        ["runs", "live-0, live-1", "r3-0"]
    ]
    assert page.row("device") == ["cpu"]  # the same for both
    off = "off: the trainer chose its experts live"
    assert page.row("replay") == [off, "on: routes from rollout (R3)"]
    assert (
        page.text.count(f"replay is {off}; --moe-router-replay makes it use") == 2
    )  # of two seeds
    assert page.row("training options") == [
        "--rollouts-loss grpo --lr 4e-4",
        "--moe-router-replay --rollouts-loss grpo --lr 4e-4",
    ]
    # live training need not dispatch as recorded
    assert max(chart(text, "Routes dispatched as recorded")["data"][0]["y"]) < 1
    assert "Nothing alarming" in page.text
    assert "Look at this first" not in page.text
    live, replayed = lines(chart(text, "Reward"))
    assert (live["name"], live["legendgroup"]) == ("live", "g0")
    assert (replayed["name"], replayed["legendgroup"]) == ("r3-0", "g1")
    of_r3 = lines_of(folder / "r3-0" / "metrics.jsonl")
    assert replayed["y"] == [line["update/reward mean"] for line in of_r3]
    boxes = [at["value"] for tag, at in page.tags if at.get("type") == "checkbox"]
    assert boxes == ["g0", "g1"]
    maps = [one for one in page.figures if one["data"][0].get("zmin") == 0]
    ranges = [one["layout"]["xaxis"]["range"] for one in maps]
    assert len(maps) == 2
    assert ranges[0] == ranges[1]  # though one ends two steps earlier


def test_seeds_are_a_mean_with_a_band(compared: tuple[Path, str]) -> None:
    folder, text = compared
    seeds = [
        [line["update/entropy"] for line in lines_of(folder / f"live-{seed}" / "metrics.jsonl")]
        for seed in (0, 1)
    ]
    band, live, _ = chart(text, "Entropy")["data"]
    pairs = [*zip(*seeds, strict=False)]  # zip ends with the shorter seed
    assert live["x"] == [*range(1, 9)]
    assert live["y"] == pytest.approx([fmean(pair) for pair in pairs], rel=1e-5)
    ends = [*map(max, pairs), *map(min, reversed(pairs))]  # there and back again
    assert band["y"] == ends
    low, mean, high = min(pairs[0]), fmean(pairs[0]), max(pairs[0])
    assert live["hovertext"][0] == f"live: {mean:.3g} ({low:.3g} to {high:.3g})"
    assert Page(text).row("steps") == ["8 to 10 each", "10"]


def test_names_and_groups(tmp_path: Path) -> None:
    paths = [
        make_run(tmp_path / name, 2)
        for name in ("noise/live-0", "noise/live-1", "fp8/live-0", "fp8/live-1", "fp8/run-7")
    ]
    groups = groups_of(read_runs(paths))
    assert [(name, len(group)) for name, group in groups.items()] == [
        ("noise/live", 2),
        ("fp8/live", 2),
        ("fp8/run-7", 1),
    ]
    assert read_runs(paths[:1])[0].name == "live-0"


def test_several_runs_need_a_name_for_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make_run(tmp_path / name, 2) for name in "ab"]
    assert main(["rl", "report", *map(str, runs)]) == 1
    assert "--out FILE" in capsys.readouterr().err
    assert main(["rl", "report", *map(str, runs[:1] * 2), "--out", str(tmp_path / "p")]) == 1
    assert "given twice" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["rl", "report", str(runs[0]), "--out", str(tmp_path / "file" / "p")]) == 1
    assert f"Not a directory: '{tmp_path / 'file'}'" in capsys.readouterr().err


def test_long_runs_are_drawn_as_means_with_their_extremes() -> None:
    curve = {float(step): 1.0 for step in range(1, 1001)} | {500.0: 9.0}
    line = line_of([curve])
    assert line is not None
    assert (len(line.x), line.each) == (100, 10)
    assert max(line.high) == 9.0  # a single step is not lost
    assert max(line.mean) == pytest.approx(1.8)
    assert line_of([{}]) is None
    assert line_of([{1.0: 2.0}, {2.0: 2.0}]) is None


def test_wide_ranges_have_a_logarithmic_axis_and_zeros_are_on_it(run: Path) -> None:
    def drawn(*values: float) -> tuple[str, list[float]]:
        (one,) = read_runs([run])
        one.metrics["made up"] = dict(enumerate(values))
        (figure,) = figures_of(Chart("", "made up", LOG, ""), {"one": [one]})
        return figure["layout"]["yaxis"].get("type", "linear"), figure["data"][0]["y"]

    assert drawn(0.001, 0.01, 1.0) == ("log", [0.001, 0.01, 1.0])
    assert drawn(0.0, 2e-6, 0.3) == ("log", [2e-6, 2e-6, 0.3])  # a logarithm of 0 is not drawn
    assert drawn(0.1, 0.2, 0.3) == ("linear", [0.1, 0.2, 0.3])  # the control


def test_times_by_stage_are_the_time_on_the_clock(run: Path) -> None:
    (one,) = read_runs([run])
    times = stage_times(one)
    clock = [event["time"] for event in one.of("collected")]
    for collection in range(1, 6):
        whole = sum(curve[collection] for curve in times.values())
        assert whole == pytest.approx(clock[collection] - clock[collection - 1], abs=1e-3)
    assert times["the rest"][3] > 8  # the restart
    assert [duration(s) for s in (0.00914, 0.31, 1.0, 12.34)] == ["9 ms", "310 ms", "1 s", "12.3 s"]


def test_the_time_between_a_stop_and_the_next_start_is_no_wall_time(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 12)
    before = wall_seconds(read_runs([run])[0])
    supervisor = run / "events" / "supervisor.jsonl"
    later = lines_of(supervisor)[-1]["time"] + 86400
    parts = ("sampler", "collector", "trainer")
    again = [{"time": later, "event": "started", "part": part} for part in parts]
    ended = [{"time": later + 5, "event": "ended", "part": p, "status": 0} for p in parts[1:]]
    change(supervisor, lambda lines: lines.extend([*again, *ended]))
    assert wall_seconds(read_runs([run])[0]) == pytest.approx(before + 5)
    # the control: a part that died, and was started again three seconds later, is no stop
    (died,) = read_runs([make_run(tmp_path / "died", 12, restarts=True)])
    times = [event["time"] for event in died.events]
    assert wall_seconds(died) == pytest.approx(max(times) - min(times))


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
    assert "Prompts and answers run: " in Page(report(run, out=tmp_path / "page.html")).text


# -- the page as a file


HOSTILE = '</script><img src="http://e.example" onerror=alert(1)>&amp;'


def test_texts_of_a_run_are_escaped(tmp_path: Path) -> None:
    assert ("img", {"src": "x"}) in Page('<img src="x">').tags  # the control: the parser sees one
    runs = [make_run(tmp_path / name, 4) for name in ("<img src=x onerror=alert(1)>", "b")]
    run = runs[0]
    with (run / "config.toml").open("a") as file:
        file.write(f"# {HOSTILE}\n")
    config = run / "policies" / "v000000" / "config.json"
    config.write_text(json.dumps({"model_type": HOSTILE}))
    change(run / "events/collector.jsonl", event_with("pushed", 0, how=f"{HOSTILE}\u202e"))
    change(run / "events/trainer.jsonl", event_with("published", 0, device=f"{HOSTILE}\u202e"))
    change(run / "events/supervisor.jsonl", event_with("started", 0, part=HOSTILE))
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
    assert page.text.count(HOSTILE) >= 7
    assert "\u202e" not in text  # a mark that turns the direction of writing
    # plotly makes links and other tags of a text, unless it is escaped
    assert "<" not in json.dumps(page.figures).replace("<extra></extra>", "")
    assert lines(chart(text, "Reward"))[0]["name"] == "&lt;img src=x onerror=alert(1)&gt;"


def test_the_page_needs_nothing_from_outside(text: str, compared: tuple[Path, str]) -> None:
    for page in (text, compared[1]):
        assert outside(page) == []
        assert "default-src 'none'" in page
    for wrong in (
        '<script src="https://cdn.example/plot.js"></script>',
        '<link href="//fonts.example/a.css">',
        "<style>@import 'a.css'; p { background: url(a.png) }</style>",
        "<script>fetch('http://example.com')</script>",
    ):
        assert outside(wrong) != []


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    (run / "metrics.jsonl").unlink()
    (run / "events" / "collector.jsonl").unlink()
    page = Page(report(run, out=tmp_path / "page.html"))
    assert "metrics.jsonl has no step yet" in page.text
    assert page.row("rollouts") == ["not recorded"]
    assert "Nothing of this was recorded." in page.text
    assert "No push is recorded" in page.text


def test_without_plotly_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", 2)
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.delitem(sys.modules, "plotly.offline", raising=False)
    monkeypatch.delitem(sys.modules, "megatron_r3.loop.report_page", raising=False)
    assert main(["rl", "report", str(run)]) == 1
    assert "needs plotly: pip install 'megatron-r3[report]'" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["rl", "report", str(run)]) == 0  # the control
    assert (run / "report.html").is_file()


def test_the_parser_needs_nothing_heavy() -> None:
    code = (
        "import sys, argparse; from megatron_r3.loop.rl_cli import add_rl;"
        "add_rl(argparse.ArgumentParser().add_subparsers());"
        "print(sorted({'plotly', 'numpy', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
