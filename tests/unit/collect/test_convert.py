"""Recorded responses to a store, a store to parquet and back.

Shape suffixes (docs/glossary.md): K, L, N, T.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_server import CONFIG, DATA
from stored import GROUPED_ROLLOUTS, INFO

from megatron_r3.cli import main
from megatron_r3.data import engines
from megatron_r3.data.engines.shape import ModelShape
from megatron_r3.data.store import RolloutStore

ZEROS = DATA.parent / "reject-vllm-0.24.0-qwen3moe-fp32-all-zero" / "14_p12_g10_n2.json"


def payload(path: str | Path) -> dict:
    """A recorded line; all of them ask for the same sampling."""
    line = json.loads((DATA / f"{path}.json").read_text())
    return {**line, "request": {**line["request"], "temperature": 1.0, "max_tokens": 40}}


def convert(lines: list[dict], *more: str) -> int:
    Path("raw.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    arguments = ["--engine", "vllm", "--model", "config.json", "--out", "store"]
    return main(["rollouts", "convert", "responses", "raw.jsonl", *arguments, *more])


def test_responses(folder, capsys):
    two, three = payload("14_p12_g10_n2"), payload("15_batch3_lists")
    lines = [
        {**two, "reward": [0.5, -1]},
        {**three, "reward": [1, 2, 3]},
        {**two, "reward": [7, 8]},
    ]
    assert convert(lines, "--shard-size", "3", "--policy-version", "4") == 0
    assert capsys.readouterr().out == "store has 7 rollouts\n"
    store = RolloutStore(["store"])
    store.verify()
    assert [shard.num_rollouts for shard in store.shards] == [5, 2]  # of two and three groups
    assert store.column("reward").tolist() == [0.5, -1, 1, 2, 3, 7, 8]
    assert store.column("group").tolist() == [0, 0, 1, 2, 3, 4, 4]
    assert store.column("sample").tolist() == [0, 1, 0, 0, 0, 0, 1]
    assert {*store.column("policy_version").tolist()} == {4}
    shape = ModelShape.from_hf_config(CONFIG)
    expected = engines.decode("vllm", three["response"], three["request"], shape, "")[1]
    got = store.rollout(3)
    assert np.array_equal(got.routes.ids_LTK, expected.routes.ids_LTK)
    assert np.array_equal(got.logprobs_N, expected.logprobs_N)


def test_the_shape_of_a_model_that_nobody_knows_is_an_option(folder, capsys):
    config = json.loads(Path("config.json").read_text())
    known = ModelShape.from_hf_config(config)
    config["model_type"] = "nobody"
    Path("config.json").write_text(json.dumps(config))
    lines = [{**payload("14_p12_g10_n2"), "reward": [0.5, -1]}]
    assert convert(lines) == 1
    assert "give --moe-layers" in capsys.readouterr().err
    told = f"--moe-layers 0-{known.moe_layers[-1]}"
    assert convert(lines, *told.split()) == 0
    assert RolloutStore(["store"]).info.moe_layers == known.moe_layers
    assert main(["rollouts", "verify", "store", "--model", "config.json", *told.split()]) == 0
    assert main(["rollouts", "verify", "store", "--model", "config.json", "--moe-layers", "0"]) == 1


@pytest.mark.parametrize("text", ["", "1-", "1-2-3", "0-10000", "x", "1-3,9-7"])
def test_a_list_of_layers_is_short_and_whole(folder, capsys, text):
    with pytest.raises(SystemExit):
        convert([], "--moe-layers", text)
    assert 'invalid list of layers, as in "1-3,7", value' in capsys.readouterr().err


def test_groups_that_are_given_count_their_samples_on(folder):
    two, chat = payload("14_p12_g10_n2"), payload("19_chat_turn1")
    (folder / "scores.py").write_text(
        "def f(sample):\n"
        "    assert sample.finish_reason == 'length' and sample.response_text\n"
        "    return sample.fields['weight'] * 100 + sample.group * 10 + sample.sample\n"
    )
    lines = [{**two, "group": 5, "weight": 1}, {**chat, "group": 6, "weight": 2}]
    lines += [{**two, "group": 5, "weight": 3}]
    assert convert(lines, "--reward", "scores:f") == 0
    assert RolloutStore(["store"]).column("reward").tolist() == [150, 151, 260, 352, 353]


def test_a_group_stays_in_one_shard(folder):
    two, chat = payload("14_p12_g10_n2"), payload("19_chat_turn1")
    lines = [{**one, "reward": [0] * len(one["response"]["choices"])} for one in (two, two, chat)]
    lines = [{**line, "group": group} for line, group in zip(lines, (5, 5, 6), strict=True)]
    assert convert(lines, "--shard-size", "1") == 0
    groups = [shard.tensors["group"].tolist() for shard in RolloutStore(["store"]).shards]
    assert groups == [[5, 5, 5, 5], [6]]


def test_what_cannot_be_decoded(folder, capsys):
    two, zeros = payload("14_p12_g10_n2"), json.loads(ZEROS.read_text())
    zeros["request"] |= {"max_tokens": 40}
    lines = [{**two, "reward": [1, 2]}, {**zeros, "reward": [1, 2]}]
    assert convert(lines) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: raw.jsonl, line 2, choice 0: the engine did not capture")
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "raw.jsonl"]
    assert convert(lines, "--skip-refused") == 0
    output = capsys.readouterr()
    assert output.out == "store has 2 rollouts; lines left out: 1\n"
    assert output.err.startswith("left out: raw.jsonl, line 2, choice 0: ")
    assert convert(lines, "--skip-refused") == 1
    assert "store: exists already" in capsys.readouterr().err


REWARD = """
def text(sample):
    return float("42" in sample.response_text)
def whole(sample):
    return float("42" in str(sample.message)) + len(sample.message)
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"content": None, "tool_calls": [{"function": {"arguments": '{"x": 42}'}}]}, "tool_calls"),
        ({"content": None, "reasoning": "so it is 42"}, "reasoning too, and response_text is"),
        ({"content": "4", "reasoning_content": "42"}, "reasoning_content"),
        ({"content": None, "refusal": "42?"}, "refusal"),
    ],
)
def test_a_reward_sees_all_that_the_model_wrote(folder, capsys, change, message):
    (folder / "seen_rewards.py").write_text(REWARD)
    line = payload("19_chat_turn1")
    parts = line["response"]["choices"][0]["message"]
    parts |= {"content": "42", "reasoning": None, "tool_calls": []}
    assert convert([line], "--reward", "seen_rewards:text", "--out", "whole") == 0
    parts |= change
    assert convert([line], "--reward", "seen_rewards:text") == 1
    error = capsys.readouterr().err
    assert "line 1, choice 0: the reward seen_rewards:text raised RewardError: " in error
    assert f"the message has {message}" in error
    assert "read sample.message instead" in error
    assert not Path("store").exists()
    assert convert([line], "--reward", "seen_rewards:whole") == 0
    assert RolloutStore(["store"]).column("reward").tolist() == [1 + len({*parts} & SEEN)]


# what of a message is the model's own: annotations, for example, are not
SEEN = {*("content", "reasoning", "reasoning_content", "tool_calls", "function_call", "refusal")}


def test_a_response_without_text_has_no_text_to_reward(folder, capsys):
    (folder / "seen_rewards.py").write_text(REWARD)
    line = payload("03_p5_g1")
    assert convert([line], "--reward", "seen_rewards:text", "--out", "whole") == 0
    del line["response"]["choices"][0]["text"]
    assert convert([line], "--reward", "seen_rewards:text") == 1
    assert "the engine sent no text: read sample.response_tokens" in capsys.readouterr().err


def back(table: pa.Table, out: str = "new") -> int:
    pq.write_table(table, "new.parquet")
    arguments = ["new.parquet", "--store", "store", "--out", out]
    return main(["rollouts", "convert", "from-parquet", *arguments])


def test_a_row_a_rollout(store, capsys):
    rows = pq.read_table("r.parquet").to_pylist()
    assert len(rows) == 5
    for row, rollout in zip(rows, GROUPED_ROLLOUTS, strict=True):
        assert row["tokens"] == rollout.tokens_N.tolist()
        assert row["response"] == rollout.response_N.tolist()
        assert row["logprobs"] == rollout.logprobs_N.tolist()
        assert row["recorded"] == [True] * (len(rollout.tokens_N) - 1)
        assert (row["reward"], row["group"], row["sample"]) == (
            rollout.reward,
            rollout.group,
            rollout.sample,
        )
        assert (row["policy_version"], row["prompt_length"]) == (7, 2)
        assert (row["engine"], row["model"]) == ("vllm", "tiny")
    assert sorted(p.name for p in store.iterdir()) == ["config.json", "r.parquet", "store"]


def test_new_rewards_in_any_order_make_a_new_store(store, capsys):
    table = pq.read_table("r.parquet").take([4, 0, 3, 1, 2])
    reward = [value.as_py() * 2 for value in table["reward"]]
    table = table.set_column(table.schema.get_field_index("reward"), "reward", [reward])
    assert back(table.drop_columns(["logprobs", "engine"])) == 0
    assert "rewards that changed: 4\n" in capsys.readouterr().out  # twice 0 is 0
    new = RolloutStore(["new"])
    assert new.column("reward").tolist() == [0, 2, 4, 6, 8]
    assert new.info == INFO
    for index, rollout in enumerate(GROUPED_ROLLOUTS):
        assert np.array_equal(new.rollout(index).routes.ids_LTK, rollout.routes.ids_LTK)
    for a, b in zip(RolloutStore(["store"]).shards, new.shards, strict=True):
        different = {
            name
            for name, tensor in a.tensors.items()
            if tensor.tobytes() != b.tensors[name].tobytes()  # NaN stands for no advantage
        }
        assert different == {"reward"}
    assert back(table) == 1
    assert "new: exists already" in capsys.readouterr().err


COLLECT = "collect --prompts p --out o --n 1 --reward a:b --model config.json --engine "


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("pyarrow", "convert to-parquet store --out x", "megatron-r3[parquet]"),
        ("aiohttp", COLLECT + "vllm --url http://127.0.0.1:9", "megatron-r3[collect]"),
        ("transformers", COLLECT + "transformers", "transformers>=5"),
    ],
)
def test_without_the_extra(store, module, arguments, extra):
    code = f"import sys; sys.modules[{module!r}] = None; from megatron_r3.cli import main; "
    code += f"sys.exit(main(['rollouts', *{arguments.split()!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"pip install '{extra}'" in done.stderr
    assert done.stderr.count("\n") == 1
