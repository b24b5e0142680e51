"""Where a model's MoE layers are, from its transformers config."""

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


def test_the_language_model_of_a_wrapped_config_is_read():
    expected = ModelShape.from_hf_config({**QWEN3, "vocab_size": 512})
    inner = {**QWEN3, "vocab_size": 512}
    assert ModelShape.from_hf_config({**WRAPPED, "text_config": inner}) == expected
    assert ModelShape.from_hf_config({**WRAPPED, "vocab_size": 512}) == expected
    assert ModelShape.from_hf_config({"thinker_config": {"text_config": inner}}) == expected
    # `mlp_layer_types` and `model_type` may stand outside of the language model's config
    unknown = {"text_config": {**inner, "model_type": "x"}, "mlp_layer_types": ["sparse"] * 6}
    assert ModelShape.from_hf_config(unknown) == expected
    nameless = {key: value for key, value in inner.items() if key != "model_type"}
    assert ModelShape.from_hf_config({"model_type": "mixtral", "text_config": nameless}) == expected


def test_options_say_what_an_unknown_config_does_not():
    unknown = {"model_type": "x", "num_hidden_layers": 6, "router": {"experts": 16}}
    said = {"moe_layers": (1, 2, 5), "num_experts": 16, "topk": 4}
    assert ModelShape.from_hf_config(unknown, **said) == ModelShape(16, 4, (1, 2, 5), 6)
    for name in said:
        with pytest.raises(EngineError, match=r"unknown|missing"):
            ModelShape.from_hf_config(unknown, **{**said, name: None})
    with pytest.raises(EngineError, match="has only 6 hidden layers"):
        ModelShape.from_hf_config(unknown, **{**said, "moe_layers": (1, 6)})
    assert ModelShape.from_hf_config(QWEN3, topk=4) == ModelShape.from_hf_config(QWEN3)


@pytest.mark.parametrize(
    ("option", "value"), [("moe_layers", (1, 2)), ("num_experts", 8), ("topk", 2)]
)
def test_an_option_does_not_contradict_a_config(option, value):
    with pytest.raises(EngineError, match=f"--{option.replace('_', '-')} is .*; the config says"):
        ModelShape.from_hf_config(QWEN3, **{option: value})


def test_options_do_not_help_where_ids_cannot_name_experts():
    for change in ({"model_type": "ernie4_5_vl_moe_text"}, {"zero_expert_num": 4}):
        with pytest.raises(EngineError, match="cannot be replayed"):
            ModelShape.from_hf_config({**QWEN3, **change}, moe_layers=(1, 2))


def test_a_list_of_one_number_for_every_layer():
    hunyuan = {**QWEN3, "model_type": "hunyuan_v1_moe", "num_experts_per_tok": None}
    shape = ModelShape.from_hf_config({**hunyuan, "moe_topk": [4] * 6})
    assert shape == ModelShape.from_hf_config(QWEN3)
    for wrong in ([4, 4, 4, 4, 4, 2], [], ["4"] * 6, [[4]] * 6):
        with pytest.raises(EngineError, match="number"):
            ModelShape.from_hf_config({**hunyuan, "moe_topk": wrong})


def test_both_names_of_the_number_of_experts():
    config = dict(QWEN3)
    config["num_local_experts"] = config.pop("num_experts")
    assert ModelShape.from_hf_config(config).num_experts == 16
    with pytest.raises(EngineError, match="given with different values"):
        ModelShape.from_hf_config({**config, "num_experts": 8})


def test_a_directory_or_its_config_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    expected = ModelShape.from_hf_config(QWEN3)
    assert ModelShape.from_hf_config(tmp_path) == expected
    assert ModelShape.from_hf_config(str(tmp_path / "config.json")) == expected


WRONG_FREQUENCIES = ([0, 1, 0, 1, 1, "0"], [0, 1, 0, 1, 1, 2], [[1]] * 6, "1", -1, {})


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (QWEN3, {"model_type": "no_such"}, "'no_such' is unknown, so nothing says"),
        (QWEN3, {"model_type": None}, "None is unknown"),
        (
            QWEN3,
            {"model_type": "no_such"},
            "give --moe-layers; or add the list `mlp_layer_types`",
        ),
        (WRAPPED, {"text_config": {**QWEN3, "model_type": "x"}}, "model type 'x' is unknown"),
        (WRAPPED, {"text_config": {}}, "model type 'qwen3_vl_moe' is unknown"),
        (WRAPPED, {"text_config": [QWEN3]}, "model type 'qwen3_vl_moe' is unknown"),
        (QWEN3, {"num_experts": None}, "number of experts is missing"),
        (QWEN3, {"num_experts_per_tok": None}, "number of experts for a token is missing"),
        (QWEN3, {"moe_k": 2}, "number of experts for a token is given with different values"),
        (QWEN3, {"model_type": "afmoe"}, "`num_dense_layers` is missing"),
        (
            QWEN3,
            {"model_type": "llama4_text", "moe_layers": [9]},
            "the MoE layers are [9], counted from 0; the model has only 6",
        ),
        (QWEN3, {"model_type": "llama4_text", "moe_layers": "1"}, "be a list of hidden layers"),
        (QWEN3, {"model_type": "ernie4_5_moe"}, "`moe_layer_start_index` is missing"),
        (
            {**QWEN3, "model_type": "jamba", "expert_layer_period": 2},
            {"expert_layer_offset": 2},
            "`expert_layer_offset` is 2; possible are 0 to 1",
        ),
        (QWEN3, {"zero_expert_num": 2}, "experts that compute nothing"),
        (
            {**QWEN3, "num_experts_per_tok": 1},
            {"model_type": "jamba", "num_experts": 1},
            "moe_layers must be",
        ),
        (QWEN3, {"model_type": "nemotron_h"}, "`layers_block_type` must name each of 6 layers"),
        (
            {**QWEN3, "model_type": "nemotron_h"},
            {"hybrid_override_pattern": "ME"},
            "`layers_block_type` must name each of 6 layers",
        ),
        (QWEN3, {"model_type": "gemma4_text"}, "moe_layers must be the numbers"),
        (
            {**QWEN3, "model_type": "step3p5"},
            {"moe_layers_enum": "1,x"},
            "`moe_layers_enum` must be like \"3,4,5\"; got '1,x'",
        ),
        (QWEN3, {"num_hidden_layers": "6"}, "`num_hidden_layers` must be a whole number"),
        (QWEN3, {"num_experts_per_tok": 17}, "topk must be a whole number from 1 to 16; got 17"),
        (QWEN3, {"decoder_sparse_step": 0}, "`decoder_sparse_step` is 0"),
        (QWEN3, {"decoder_sparse_step": 7}, "moe_layers must be the numbers"),
        (QWEN3, {"mlp_layer_types": ["sparse"]}, "`mlp_layer_types`"),
        (DEEPSEEK, {"first_k_dense_replace": None}, "`first_k_dense_replace` is missing"),
        (DEEPSEEK, {"moe_layer_freq": [1]}, "for each of 6 layers; got [1]"),
        (DEEPSEEK, {"moe_layer_freq": 0}, "`moe_layer_freq` is 0"),
        (
            QWEN3,
            {"num_hidden_layers": 4_000_000_000},
            "`num_hidden_layers` is 4000000000; possible are",
        ),
        (QWEN3, {"num_hidden_layers": 0}, "`num_hidden_layers` is 0; possible are 1 to 10000"),
        (QWEN3, {"num_experts": 32769}, "`num_experts` is 32769; possible are 1 to 32768"),
        (QWEN3, {"num_experts": [16]}, "`num_experts` must be a whole number; got [16]"),
        (QWEN3, {"num_experts": 16.0}, "`num_experts` must be a whole number; got 16.0"),
        (QWEN3, {"num_local_experts": {}}, "`num_local_experts` must be a whole number; got {}"),
        (
            QWEN3,
            {"num_experts_per_tok": 10**6},
            "`num_experts_per_tok` is 1000000; possible are 1 to",
        ),
        (QWEN3, {"vocab_size": 0}, "`vocab_size` is 0; possible are 1 to 2147483648"),
        (QWEN3, {"vocab_size": "512"}, "`vocab_size` must be a whole number; got '512'"),
        (QWEN3, {"decoder_sparse_step": -1}, "`decoder_sparse_step` is -1"),
        (QWEN3, {"mlp_only_layers": 3}, "`mlp_only_layers` must be a list of hidden layers; got 3"),
        (
            QWEN3,
            {"mlp_only_layers": ["0"]},
            "`mlp_only_layers` must be a list of hidden layers; got ['0']",
        ),
        (QWEN3, {"mlp_only_layers": {"0": 1}}, "`mlp_only_layers` must be a list of hidden layers"),
        (
            QWEN3,
            {"mlp_layer_types": 3},
            "`mlp_layer_types` must name each of 6 layers dense or sparse; got 3",
        ),
        (
            QWEN3,
            {"mlp_layer_types": [["sparse"]] * 6},
            "`mlp_layer_types` must name each of 6 layers",
        ),
        (QWEN3, {"mlp_layer_types": {"sparse": 1}}, "`mlp_layer_types` must name each of 6 layers"),
        (QWEN3, {"model_type": ["qwen3_moe"]}, "model type ['qwen3_moe'] is unknown"),
        (QWEN3, {"model_type": "\x1b[2J" + "x" * 10**5}, "model type '\\x1b[2Jxxx"),
        *(
            (DEEPSEEK, {"moe_layer_freq": wrong}, "`moe_layer_freq` ")
            for wrong in WRONG_FREQUENCIES
        ),
    ],
)
def test_fields_that_no_model_has(tmp_path, base, change, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**base, **change}))
    with pytest.raises(EngineError) as caught:
        ModelShape.from_hf_config(path)
    error = str(caught.value)
    assert error.startswith(f"{path}: ")
    assert message in error
    assert error.isprintable()
    assert len(error) < 900


@pytest.mark.parametrize("layers", [(), (2, 1), (1, 1), (-1, 0), (5, 6)])
def test_layers_that_no_model_has_are_refused(layers):
    with pytest.raises(EngineError):
        ModelShape(16, 4, layers, 6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": ' * 5000 + "1" + "}" * 5000, "more than 64 brackets"),
        ('{"num_experts": ' + "9" * 5000 + "}", "not JSON"),
        (" " * (1 << 23), "bytes of JSON; at most"),
        ("\ufeff{}", "not JSON"),
        ("{", "not JSON"),
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
