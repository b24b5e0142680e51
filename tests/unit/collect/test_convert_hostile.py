"""Recordings and tables that somebody else made: one line that names file, line and field."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import engine_bodies as made
import pytest

from megatron_r3.cli import main
from megatron_r3.collect.convert import Recording, _Reader, convert_responses
from megatron_r3.collect.prompt_plan import Model
from megatron_r3.collect.prompts import prompt_digest
from megatron_r3.collect.request_fields import settings_of
from megatron_r3.collect.reward import RewardError
from megatron_r3.data.engines.shape import EngineError, ModelShape
from megatron_r3.data.store import RolloutStore, StoreError
from megatron_r3.data.store.schema import SamplingSettings
from proof.fuzz.damage import damage
from tests.unit.collect.test_convert import convert, payload

MODEL = Model("tiny", ModelShape(16, 4, (0, 1, 2, 3), 4, 512), (), 512)


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that was printed."""
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert error[:-1].isprintable()
    return error[len("error: ") : -1]


def recording(path: Path, engine: str = "vllm", **more: Any) -> Recording:
    return Recording(path, engine, "0.30.0", MODEL, **more)


def written(lines: list[Any], path: Path = Path("raw.jsonl")) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_store_says_how_its_responses_were_sampled(folder):
    two = payload("14_p12_g10_n2")
    two["request"] |= {"top_k": -1, "top_p": 1}
    assert convert([{**two, "reward": 1} | {"reward": [1, 2]}]) == 0
    info = RolloutStore(["store"]).info
    assert info.sampling == SamplingSettings(temperature=1.0, top_p=1.0, top_k=0)
    assert info.vocab_size == 512


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({}, SamplingSettings()),
        ({"temperature": 0, "min_p": 0.1}, SamplingSettings(0.0, min_p=0.1)),
        ({"top_k": 0, "top_p": 0.9}, SamplingSettings(top_p=0.9, top_k=0)),
        (
            {"sampling_params": {"max_new_tokens": 8, "temperature": 0.7, "top_k": 50}},
            SamplingSettings(0.7, top_k=50, max_tokens=8),
        ),
        (
            {
                "sampling_params": [
                    {"temperature": 1.0, "top_k": -1},
                    {"temperature": 1, "top_k": -1},
                ]
            },
            SamplingSettings(1.0, top_k=0),
        ),
        ({"temperature": 2, "sampling_params": {"temperature": 2.0}}, SamplingSettings(2.0)),
        ({"max_completion_tokens": 5, "sampling_params": None}, SamplingSettings(max_tokens=5)),
    ],
)
def test_settings_of_a_request(request_, expected):
    assert settings_of(request_, "line 1") == expected


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"temperature": "1"}, "temperature must be a number from 0 to 2.14748e+09; got '1'"),
        ({"temperature": float("nan")}, "temperature must be a number from 0"),
        ({"temperature": True}, "temperature must be a number from 0"),
        ({"top_p": 1.5}, "top_p must be a number from 0 to 1; got 1.5"),
        ({"top_p": [1]}, "top_p must be a number from 0 to 1; got [1]"),
        ({"min_p": -0.5}, "min_p must be a number from 0 to 1; got -0.5"),
        ({"top_k": 2.5}, "top_k must be a whole number from -1 on; got 2.5"),
        ({"top_k": 10**400}, "top_k must be a number from -1"),
        ({"max_tokens": -1}, "max_tokens must be a whole number from 0 to 2147483647; got -1"),
        (
            {"sampling_params": [{"temperature": 1}, {"temperature": 0.5}]},
            "temperature differs between the prompts of one request",
        ),
        ({"sampling_params": [{"top_p": 1}, None]}, "top_p differs between the prompts"),
        ({"temperature": 1, "sampling_params": {"temperature": 2}}, "and its sampling_params"),
    ],
)
def test_settings_that_cannot_be(request_, message):
    with pytest.raises(EngineError) as caught:
        settings_of(request_, "line 1")
    assert str(caught.value).startswith("line 1: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "temperature",
            0.5,
            "temperature is 0.5 here and 1 in raw.jsonl, line 1: a store has one model",
        ),
        ("temperature", None, "temperature is not given here and 1 in raw.jsonl, line 1"),
        ("top_p", 0.9, "top_p is 0.9 here and not given in raw.jsonl, line 1"),
        ("top_k", 20, "top_k is 20 here and not given in"),
        ("model", None, "model is not given here and 'qwen3"),
    ],
)
def test_lines_that_were_sampled_in_another_way(folder, capsys, field, value, message):
    one = payload("03_p5_g1") | {"reward": 1}
    other = copy.deepcopy(one)
    other["request"][field] = value
    assert convert([one, one, other]) == 1
    assert error_of(capsys).startswith(f"raw.jsonl, line 3: {message}")
    assert not Path("store").exists()
    assert convert([one, other, one], "--skip-refused") == 0
    assert capsys.readouterr().out == "store has 2 rollouts; lines left out: 1\n"


def test_lines_may_differ_in_how_long_a_response_may_get(folder, capsys):
    one = payload("03_p5_g1") | {"reward": 1}
    other = copy.deepcopy(one)
    other["request"]["max_tokens"] = 41
    assert convert([one, other]) == 0
    (shard,) = RolloutStore(["store"]).shards
    assert shard.info.sampling == SamplingSettings(temperature=1.0)
    assert convert([one | {"group": 5}, other | {"group": 6}], "--out", "groups") == 0
    capsys.readouterr()
    assert convert([one | {"group": 5}, other | {"group": 5}], "--out", "one") == 1
    assert error_of(capsys).startswith(
        "raw.jsonl, line 2: max_tokens is 41 here and 40 in raw.jsonl, line 1, of the same group"
    )


def test_each_rollout_knows_its_prompt(folder):
    """Token ids, several of them in one request, a text and a chat."""
    names = ("14_p12_g10_n2", "15_batch3_lists", "21_text_stop_string", "19_chat_turn1")
    lines = [payload(name) for name in names]
    lines = [{**one, "reward": [0] * len(one["response"]["choices"])} for one in lines]
    ids, batch, text, chat = (line["request"] for line in lines)
    for request in (ids, batch, text, chat):
        request |= {"max_tokens": 40, "temperature": 1.0}
    found = [
        rollout.prompt_digest
        for rollouts, _ in _Reader(recording(written(lines))).lines()
        for rollout in rollouts
    ]
    asked = [ids["prompt"], ids["prompt"], *batch["prompt"], text["prompt"], chat["messages"]]
    assert found == [prompt_digest(one) for one in asked]
    assert len({*found}) == 6
    assert all(0 < digest < 2**63 for digest in found)


def test_a_group_has_one_prompt(folder, capsys):
    one, other = payload("03_p5_g1") | {"reward": 1}, payload("19_chat_turn1") | {"reward": 1}
    assert convert([one | {"group": 5}, other | {"group": 5}]) == 1
    message = "raw.jsonl, line 2: group 5 has another prompt in raw.jsonl, line 1; give each prompt"
    assert error_of(capsys).startswith(message)
    assert convert([one | {"group": 5}, other | {"group": 6}, one | {"group": 5}]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": 2**63}, f"group {2**63}: must be a whole number from {-(2**63)} on, of 64 bits"),
        ({"group": -(2**63) - 1}, "of 64 bits"),
        ({"group": 1.0}, "`group` must be a whole number"),
        ({"reward": [1, 10**400]}, "line 1, choice 1: `reward` is 1000"),
        ({"reward": [1, float("nan")]}, "choice 1: `reward` is nan; a reward is finite"),
        ({"reward": [1, "\x1b[2J"]}, "choice 1: `reward` is '\\x1b[2J'; a reward is a number"),
        ({"reward": [1, [2]]}, "choice 1: `reward` is [2]; a reward is a number"),
        ({"reward": {"a": 1}}, "`reward` has 1 numbers for 2 choices"),
        ({"reward": None}, "line 1: the line has no `reward`"),
        ({"reward": [1, 1e39]}, "finite, in float32"),
        ({"response": {"choices": [3, 4]}}, "a choice is not an object"),
    ],
)
def test_lines_that_a_store_cannot_hold(folder, capsys, change, message):
    assert convert([{**payload("14_p12_g10_n2"), "reward": [1, 2], **change}]) == 1
    error = error_of(capsys)
    assert error.startswith("raw.jsonl, line 1")
    assert message in error
    assert len(error) < 400
    assert not Path("store").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "no responses to store"),
        (b"[" * 100_000, "line 1: JSON with more than 64 brackets"),
        (b'{"request": {"a": ' + b"9" * 5000 + b'}, "response": {}}', "line 1: not JSON"),
        (b"\xff\xfe{\x00}\x00", "line 1: not JSON"),
        (b'\n\n{"request": {}, "response": {}', "line 3: not JSON"),
        (b"[]", "line 1: an object with `request` and `response` is expected"),
        (b'{"request": [], "response": {}}', "line 1: `request` must be the JSON object"),
    ],
)
def test_lines_that_are_no_json(folder, capsys, text, message):
    Path("raw.jsonl").write_bytes(text)
    arguments = ["--engine", "vllm", "--model", "config.json", "--out", "store"]
    assert main(["rollouts", "convert", "responses", "raw.jsonl", *arguments]) == 1
    assert message in error_of(capsys)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "raw.jsonl"]


def test_files_that_cannot_be_read_or_written(folder, capsys):
    line = {**payload("14_p12_g10_n2"), "reward": [1, 2]}
    written([line])
    Path("file").write_text("")

    def run(raw: str, out: str) -> str:
        arguments = ["--engine", "vllm", "--model", "config.json", "--out", out]
        assert main(["rollouts", "convert", "responses", raw, *arguments]) == 1
        return error_of(capsys)

    assert run(".", "store") == ".: cannot be read (Is a directory)"
    assert run("none", "store") == "none: cannot be read (No such file or directory)"
    there = f"file/store: cannot be written ({folder / 'file'} is no directory)"
    assert run("raw.jsonl", "file/store") == there
    assert (
        run("raw.jsonl", "file")
        == "file: exists already; a conversion writes a new store: give another --out"
    )
    long = "x" * 300
    assert run("raw.jsonl", long) == f"{long}: cannot be written (File name too long)"


LIMITED = (
    "import resource, sys\n"
    "sys.dont_write_bytecode = True\n"  # a .pyc of 200 bytes would break later imports
    "from megatron_r3.cli import main\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))\n"
    "sys.exit(main(sys.argv[1:]))\n"
)


def limited(*arguments: str) -> str:
    """What a command says that cannot write 200 bytes, as on a full disk."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, "rollouts", "convert", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr[len("error: ") : -1]


def test_a_full_disk(store):
    written([{**payload("14_p12_g10_n2"), "reward": [1, 2]}])
    there = sorted(p.name for p in store.iterdir())
    responses = ("responses", "raw.jsonl", "--engine", "vllm", "--model", "config.json")
    for arguments in (
        (*responses, "--out", "new"),
        ("from-parquet", "r.parquet", "--store", "store", "--out", "new"),
        ("to-parquet", "store", "--out", "new"),
    ):
        error = limited(*arguments)
        assert error.startswith("new: ")  # and no temporary name
        assert "File too large" in error
    assert sorted(p.name for p in store.iterdir()) == there


@pytest.mark.parametrize(
    ("version", "model", "message"),
    [
        ("\x1b[31m0.30", "tiny", "engine_version must be a text without control characters"),
        ("0" * 201, "tiny", "engine_version must be a text of at most 200 characters; got 201"),
        ("0.30.0", "a\nb", "the header of the new store: model must be a text without control"),
    ],
)
def test_names_that_a_terminal_would_obey(folder, version, model, message):
    wrong = Recording(
        written([]), "vllm", version, Model(model, MODEL.shape, (), None), reward=lambda _: 0.0
    )
    with pytest.raises(StoreError, match=message):
        convert_responses(wrong, folder / "store", 8)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_an_engine_gave_up_is_left_out(folder, engine):
    rows = made.made_rows()
    if engine == "sglang":
        body, request = made.sglang(rows)
        body["meta_info"]["finish_reason"] = {"type": "abort"}
    else:
        body, request = made.vllm(rows)
        body["choices"][0]["finish_reason"] = "error"
    model = Model("tiny", made.SHAPE, (), None)
    line = {"request": request, "response": body, "reward": 1}
    found = _Reader(Recording(written([line]), engine, "1", model)).lines()
    ((rollouts, refused),) = found
    assert rollouts == []
    assert "line 1, choice 0: the engine ended the response with" in refused


@pytest.mark.parametrize("name", ["vllm", "sglang", "sglang-openai", "megatron", "megatron-0.17"])
@pytest.mark.filterwarnings("ignore")
def test_damaged_lines(folder, name):
    """Each line is stored whole, or refused in one line that names it: nothing else is raised."""
    rng, model = random.Random(f"lines {name}"), Model("tiny", made.SHAPE, (), None)
    engine, make = made.ENGINES[name]
    response, request = make(made.made_rows())
    right = {"request": request, "response": response, "reward": 1.0, "group": 3}
    whole, refused, net = 0, 0, 0
    for round_ in range(500):
        damage(line := copy.deepcopy(right), rng)
        reader = _Reader(Recording(written([line]), engine, "1", model))
        try:
            ((rollouts, why),) = reader.lines()
        except (EngineError, RewardError) as error:
            rollouts, why = [], str(error)
        refused += bool(why)
        whole += bool(rollouts)
        net += "cannot be read" in why
        if why:
            assert why.startswith("raw.jsonl, line 1"), round_
            assert why.isprintable(), (round_, why)
            assert len(why) < 2000, round_
        for rollout in rollouts:
            rollout.check("rollout")
            assert 0 < rollout.prompt_digest < 2**63
    assert whole > 20
    assert refused > 200
    assert net < refused / 50  # nearly all are refused by what they are
