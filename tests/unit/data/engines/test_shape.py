"""Where a model's MoE layers are, from its transformers config."""

from __future__ import annotations

import json

import pytest

from megatron_r3.data.engines.shape import EngineError, ModelShape

QWEN3 = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 6,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
WRAPPED = {"model_type": "qwen3_vl_moe", "text_config": QWEN3, "vision_config": {}}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 6,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize(
    ("base", "change", "layers"),
    [
        (QWEN3, {}, (0, 1, 2, 3, 4, 5)),
        (QWEN3, {"decoder_sparse_step": 1, "mlp_only_layers": [0]}, (1, 2, 3, 4, 5)),
        (QWEN3, {"decoder_sparse_step": 2}, (1, 3, 5)),  # not Megatron's i % 2 == 0
        (QWEN3, {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5)),
        (QWEN3, {"decoder_sparse_step": 4, "mlp_only_layers": None}, (3,)),
        (QWEN3, {"model_type": "mixtral"}, (0, 1, 2, 3, 4, 5)),
        (DEEPSEEK, {}, (1, 2, 3, 4, 5)),
        (DEEPSEEK, {"first_k_dense_replace": 0, "moe_layer_freq": 1}, (0, 1, 2, 3, 4, 5)),
        (DEEPSEEK, {"moe_layer_freq": 2}, (2, 4)),
        (DEEPSEEK, {"moe_layer_freq": [0, 1, 0, 1, 1, 0]}, (1, 3, 4)),
        (DEEPSEEK, {"num_nextn_predict_layers": 1}, (1, 2, 3, 4, 5)),
        (
            DEEPSEEK,
            {"model_type": "x", "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4},
            (2, 3, 4, 5),
        ),
    ],
)
def test_moe_layers(base, change, layers):
    assert ModelShape.from_hf_config({**base, **change}) == ModelShape(16, 4, layers, 6)


def test_the_cure_of_a_wrapped_config():
    assert ModelShape.from_hf_config(WRAPPED["text_config"]) == ModelShape.from_hf_config(QWEN3)


def test_both_names_of_the_number_of_experts():
    config = dict(QWEN3)
    config["num_local_experts"] = config.pop("num_experts")
    assert ModelShape.from_hf_config(config).num_experts == 16
    with pytest.raises(EngineError, match="given twice"):
        ModelShape.from_hf_config({**config, "num_experts": 8})


def test_a_directory_or_its_config_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    expected = ModelShape.from_hf_config(QWEN3)
    assert ModelShape.from_hf_config(tmp_path) == expected
    assert ModelShape.from_hf_config(str(tmp_path / "config.json")) == expected


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_unreadable_configs_are_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(EngineError, match="config"):
        ModelShape.from_hf_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (QWEN3, {"model_type": "no_such"}, "'no_such' is unknown, so nobody can tell"),
        (QWEN3, {"model_type": None}, "None is unknown"),
        (QWEN3, {"model_type": "no_such"}, "add `mlp_layer_types` to a copy of its config.json"),
        (WRAPPED, {}, "'qwen3_vl_moe' has its language model in `text_config`: save that object"),
        (QWEN3, {"num_experts": None}, "number of experts is missing"),
        (QWEN3, {"num_experts_per_tok": None}, "`num_experts_per_tok` is missing"),
        (QWEN3, {"num_hidden_layers": "6"}, "`num_hidden_layers` must be a whole number"),
        (QWEN3, {"num_experts_per_tok": 17}, "topk must be a whole number from 1 to 16; got 17"),
        (QWEN3, {"decoder_sparse_step": 0}, "`decoder_sparse_step` is 0"),
        (QWEN3, {"decoder_sparse_step": 7}, r"moe_layers must be the numbers .*; got \[\]"),
        (QWEN3, {"mlp_layer_types": ["sparse"]}, "`mlp_layer_types`"),
        (DEEPSEEK, {"first_k_dense_replace": None}, "`first_k_dense_replace` is missing"),
        (DEEPSEEK, {"moe_layer_freq": [1]}, "1 entries for 6 layers"),
        (DEEPSEEK, {"moe_layer_freq": 0}, "`moe_layer_freq` is 0"),
    ],
)
def test_incomplete_configs_are_refused(base, change, message):
    with pytest.raises(EngineError, match=message):
        ModelShape.from_hf_config({**base, **change})


@pytest.mark.parametrize("layers", [(), (2, 1), (1, 1), (-1, 0), (5, 6)])
def test_layers_that_no_model_has_are_refused(layers):
    with pytest.raises(EngineError):
        ModelShape(16, 4, layers, 6)
