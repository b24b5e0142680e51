"""Configs that somebody else made: an EngineError, little memory, no crash."""

from __future__ import annotations

import copy
import json
import random
import tracemalloc

import pytest
from engine_mutations import mutated_json

from megatron_r3.data.engines.shape import EngineError, ModelShape
from tests.unit.data.engines.test_shape import DEEPSEEK, QWEN3

ROUNDS = 1500
CONFIGS = {
    "qwen3_moe": {
        **QWEN3,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0, 3],
        "vocab_size": 512,
        "rope_scaling": {"type": "yarn", "factor": 4.0},
    },
    "deepseek_v3": {**DEEPSEEK, "moe_layer_freq": 1, "vocab_size": 512},
    "deepseek_v3, a list": {**DEEPSEEK, "moe_layer_freq": [0, 1, 1, 1, 0, 1]},
    "by names": {**QWEN3, "mlp_layer_types": ["dense", *["sparse"] * 5], "vocab_size": 512},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_mutated_configs(tmp_path, name):
    rng, path = random.Random(f"configs {name}"), tmp_path / "config.json"
    expected = ModelShape.from_hf_config(CONFIGS[name])
    refused, same = [], 0
    tracemalloc.start()
    for round_ in range(ROUNDS):
        config = mutated_json(CONFIGS[name], rng)
        text = json.dumps(config)
        path.write_text(text[: rng.randrange(len(text))] if rng.random() < 0.02 else text)
        try:
            shape = ModelShape.from_hf_config(path)
        except EngineError as error:
            refused.append(str(error))
            continue
        same += shape == expected
        assert 1 <= shape.topk <= shape.num_experts <= 32768, round_
        assert 0 <= shape.moe_layers[0] <= shape.moe_layers[-1] < shape.num_hidden_layers, round_
        assert shape.num_hidden_layers <= 10_000, round_
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(m.startswith(str(path)) and m.isprintable() and len(m) < 900 for m in refused)
    assert ROUNDS // 4 < len(refused) < ROUNDS
    assert same  # what was changed is not always looked at
    assert peak < 16 << 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 4_000_000_000}, "`num_hidden_layers` is 4000000000; possible are"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0; possible are 1 to 10000"),
        ({"num_experts": 32769}, "`num_experts` is 32769; possible are 1 to 32768"),
        ({"num_experts": [16]}, "`num_experts` must be a whole number; got [16]"),
        ({"num_experts": 16.0}, "`num_experts` must be a whole number; got 16.0"),
        ({"num_local_experts": {}}, "`num_local_experts` must be a whole number; got {}"),
        ({"num_experts_per_tok": 10**6}, "`num_experts_per_tok` is 1000000; possible are 1 to"),
        ({"vocab_size": 0}, "`vocab_size` is 0; possible are 1 to 2147483648"),
        ({"vocab_size": "512"}, "`vocab_size` must be a whole number; got '512'"),
        ({"decoder_sparse_step": -1}, "`decoder_sparse_step` is -1"),
        ({"mlp_only_layers": 3}, "`mlp_only_layers` must be a list of hidden layers; got 3"),
        (
            {"mlp_only_layers": ["0"]},
            "`mlp_only_layers` must be a list of hidden layers; got ['0']",
        ),
        ({"mlp_only_layers": {"0": 1}}, "`mlp_only_layers` must be a list of hidden layers"),
        (
            {"mlp_layer_types": 3},
            "`mlp_layer_types` must name each of 6 layers dense or sparse; got 3",
        ),
        ({"mlp_layer_types": [["sparse"]] * 6}, "`mlp_layer_types` must name each of 6 layers"),
        ({"mlp_layer_types": {"sparse": 1}}, "`mlp_layer_types` must name each of 6 layers"),
        ({"model_type": ["qwen3_moe"]}, "model type ['qwen3_moe'] is unknown"),
        ({"model_type": "\x1b[2J" + "x" * 10**5}, "model type '\\x1b[2Jxxx"),
    ],
)
def test_fields_that_no_model_has(tmp_path, change, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**QWEN3, **change}))
    with pytest.raises(EngineError) as caught:
        ModelShape.from_hf_config(path)
    error = str(caught.value)
    assert error.startswith(f"{path}: {message}")
    assert error.isprintable()
    assert len(error) < 900


@pytest.mark.parametrize(
    "wrong", [[0, 1, 0, 1, 1, "0"], [0, 1, 0, 1, 1, 2], [[1]] * 6, "1", -1, {}]
)
def test_frequencies_that_no_model_has(wrong):
    with pytest.raises(EngineError, match=r"`moe_layer_freq` (must be|is)"):
        ModelShape.from_hf_config({**DEEPSEEK, "moe_layer_freq": wrong})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000 + "]" * 100_000, "more than 64 brackets"),
        ('{"a": ' * 5000 + "1" + "}" * 5000, "more than 64 brackets"),
        ('{"num_experts": ' + "9" * 5000 + "}", "not JSON"),
        (" " * (1 << 23), "bytes of JSON; at most"),
        ("\ufeff{}", "not JSON"),
        ("3", "must be a JSON object; got 3"),
    ],
)
def test_texts_that_are_no_config(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(EngineError) as caught:
        ModelShape.from_hf_config(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_a_config_without_end_is_not_read_to_it():
    with pytest.raises(EngineError, match="/dev/zero: 4194305 bytes of JSON; at most"):
        ModelShape.from_hf_config("/dev/zero")


def test_the_vocabulary_is_the_configs():
    assert ModelShape.from_hf_config(QWEN3).vocab_size is None
    assert ModelShape.from_hf_config({**QWEN3, "vocab_size": 151936}).vocab_size == 151936


def test_mutations_leave_what_they_are_given_alone():
    before = copy.deepcopy(CONFIGS)
    mutated_json(CONFIGS["qwen3_moe"], random.Random(1))
    assert before == CONFIGS
