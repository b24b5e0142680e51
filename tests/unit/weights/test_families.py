"""Megatron's arguments for a config.json, and what Megatron cannot do of it."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_r3.weights.families import FAMILIES, family_named
from megatron_r3.weights.families.tensors import RULES
from megatron_r3.weights.model_arguments import arguments_of, main

COMMON: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,  # as transformers 4 wrote it
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
}
SIGMOID = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
SIGMOID |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "v_head_dim": 16}
LATENT |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
YARN: dict[str, Any] = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
YARN |= {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
OSS_YARN = {"rope_type": "yarn", "rope_theta": 150000, "factor": 32.0, "truncate": False}
OSS_YARN |= {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 48},
    "mixtral": {"num_local_experts": 8, "moe_intermediate_size": "missing"},
    "deepseek_v3": {**SIGMOID, **LATENT},
    "kimi_k2": {**SIGMOID, **LATENT},
    "deepseek_v2": {**SIGMOID, **LATENT},
    "glm4_moe_lite": {**SIGMOID, **LATENT},
    "glm4_moe": SIGMOID,
    "gpt_oss": {
        "num_local_experts": 8,
        "moe_intermediate_size": "missing",
        "attention_bias": True,
        "sliding_window": 128,
        "rope_parameters": OSS_YARN,
    },
}


def config(family: str, **fields: Any) -> dict[str, Any]:
    made = {"model_type": family, **COMMON, **CONFIGS[family], **fields}
    return {name: value for name, value in made.items() if value != "missing"}


def arguments(family: str, **fields: Any) -> str:
    return " ".join(FAMILIES[family].arguments(config(family, **fields)))


@pytest.mark.parametrize(
    ("family", "fields", "argument"),
    [
        ("qwen3_moe", {}, "--rotary-base 10000 "),
        ("qwen3_moe", {}, "--kv-channels 16 "),
        ("qwen3_moe", {"head_dim": 32}, "--kv-channels 32 "),
        ("qwen3_moe", {}, "--moe-router-pre-softmax "),  # transformers' default of norm_topk_prob
        ("qwen3_moe", {"num_experts": "missing", "num_local_experts": 16}, "--num-experts 16 "),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "--moe-layer-freq ([1]*1+[0]*1+[1]*2) "),
        ("qwen3_moe", {"rope_parameters": {"rope_theta": 5e6}}, "--rotary-base 5000000 "),
        ("qwen2_moe", {}, "--add-qkv-bias "),  # transformers' default of qkv_bias
        ("deepseek_v3", {"n_group": 4, "topk_group": 1}, "--moe-router-num-groups 4 "),
        ("deepseek_v3", {"rope_scaling": YARN}, "--rope-type yarn --rotary-scaling-factor 40 "),
        ("deepseek_v2", {}, "--moe-router-pre-softmax --moe-router-dtype fp32 "),
        ("kimi_k2", {"rope_scaling": {**YARN, "beta_fast": 1.0}}, "--yarn-beta-fast 1 "),
        ("glm4_moe", {}, "--rotary-percent 0.5 "),  # transformers' default
        ("glm4_moe", {"partial_rotary_factor": 0.25}, "--rotary-percent 0.25 "),
        ("gpt_oss", {}, "--window-size 127,0 --window-attn-skip-freq [1,0,1,0] "),
    ],
)
def test_an_argument(family: str, fields: dict[str, Any], argument: str) -> None:
    assert argument in arguments(family, **fields) + " "


def test_what_is_not_an_argument() -> None:
    assert "pre-softmax" not in arguments("qwen3_moe", norm_topk_prob=True)
    assert "qkv-bias" not in arguments("qwen2_moe", qkv_bias=False)
    assert "groups" not in arguments("deepseek_v3", n_group=4, topk_group=4)  # all groups
    assert "layer-freq" not in arguments("mixtral")
    assert "yarn-" not in arguments("deepseek_v3", rope_scaling=YARN)  # older releases take it


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "it has quantization_config"),
        ({"hidden_size": "missing"}, "hidden_size is missing"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; expected a number"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True; expected a number"),
        (
            {"rope_parameters": {"rope_theta": 10000, "rope_type": "linear"}},
            "rope_type is 'linear'",
        ),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"made_up": 0}, "made_up is 0, and this project does not know what"),
        (
            {"factor": 40},
            "factor is 40, and this project does not know",
        ),  # it is of RoPE, and stands outside of it
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [8, 8]}},
            "mrope_section is",
        ),
        (
            {"rope_parameters": {"rope_theta": 10000}, "rope_scaling": {"type": "linear"}},
            "rope_scaling is .*'linear'.*, rope_parameters is .*: transformers takes rope_scaling",
        ),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; expected an object"),
    ],
)
def test_a_field_that_megatron_cannot_do(family: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        arguments(family, **fields)


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("qwen3_moe", {"rope_theta": 10000.5}, "rope_theta is 10000.5"),
        ("qwen3_moe", {"rope_theta": float("inf")}, "rope_theta is inf"),
        ("qwen3_moe", {"num_attention_heads": "4"}, "num_attention_heads is '4'; expected a numb"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1; expected true or false"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen3_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("qwen2_moe", {"head_dim": 32}, "head_dim is 32"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 4}, "layer_types is"),
        (
            "qwen3_moe",
            {"layer_types": ["full_attention", "sliding_attention"] * 2},
            "layer_types is",
        ),
        ("mixtral", {"layer_types": 4}, "layer_types is 4"),
        ("mixtral", {"moe_layer_freq": 2}, "moe_layer_freq is 2, and this project does"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window is 4096"),
        ("deepseek_v3", {"n_group": 4, "topk_group": 2}, "topk_group is 2;.* supports 1"),
        ("deepseek_v3", {"n_group": "missing"}, "n_group is"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "supports only 'sigmoid'"),
        ("deepseek_v3", {"rope_scaling": {**YARN, "beta_fast": "16"}}, "beta_fast is '16'"),
        ("deepseek_v3", {"rope_scaling": {**YARN, "mscale": None}}, "mscale is None"),
        ("deepseek_v3", {"rope_scaling": {**YARN, "truncate": False}}, "truncate is False"),
        (
            "deepseek_v3",
            {"rope_scaling": {**YARN, "original_max_position_embeddings": None}},
            "original_max_position_embeddings is missing",
        ),
        (
            "deepseek_v3",
            {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0}},
            "mscale is",
        ),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "topk_method is 'group_lim"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts is"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types is"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window is"),
    ],
)
def test_a_field_of_one_family(family: str, fields: dict[str, Any], words: str) -> None:
    arguments(family)  # the control: without the change nothing is refused
    with pytest.raises(ValueError, match=words):
        arguments(family, **fields)


# What config.json of real models has beside the fields of transformers 5.
REAL = dict.fromkeys(FAMILIES, "rope_theta rope_scaling torch_dtype quantization_config")
REAL["deepseek_v3"] += " auto_map ep_size aux_loss_alpha seq_aux moe_layer_freq pretraining_tp"
REAL["deepseek_v3"] += " scoring_func topk_method num_nextn_predict_layers"
REAL["deepseek_v2"] = REAL["kimi_k2"] = REAL["deepseek_v3"]
REAL["glm4_moe_lite"] += " first_k_dense_replace topk_method num_nextn_predict_layers"
REAL["gpt_oss"] += " experts_per_token initial_context_length"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fields_of_transformers_and_of_real_models_are_known(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind = transformers.AutoConfig.for_model(family.replace("kimi_k2", "deepseek_v3"))
    fields = {*kind.to_dict(), *(field.name for field in dataclasses.fields(kind))}
    assert len(fields) > 30
    known = FAMILIES[family].known_fields()
    assert not {*fields, *REAL[family].split(), *config(family)} - known
    assert "made_up" not in known


def test_what_changes_nothing_is_taken() -> None:
    """The controls of the refusals: an unknown null, both names of one RoPE, full attention."""
    rope = {"rope_theta": 10000, "rope_type": "default"}
    plain = arguments("qwen3_moe")
    for fields in (
        {"made_up": None, "unsloth_fixed": True, "sliding_window": 4096},
        {"layer_types": ["full_attention"] * 4},
        {"rope_theta": "missing", "rope_parameters": rope, "rope_scaling": dict(rope)},
    ):
        assert arguments("qwen3_moe", **fields) == plain


def test_a_family_that_is_refused_by_its_name() -> None:
    with pytest.raises(
        ValueError, match="x: model_type is 'olmoe': the model normalizes the queries"
    ):
        family_named("olmoe", "x")
    with pytest.raises(ValueError, match="moves only models of these types: deepseek_v2"):
        family_named(["mixtral"], "x")


def test_fp8_by_blocks_is_taken() -> None:
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    assert arguments("deepseek_v3", quantization_config=fp8) == arguments("deepseek_v3")
    for block in (None, [128], [128, 0], [128, True], "128"):
        with pytest.raises(ValueError, match="in fp8 with weight_block_size"):
            arguments("deepseek_v3", quantization_config={**fp8, "weight_block_size": block})


def test_mxfp4_is_taken_of_gpt_oss_alone() -> None:
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    assert arguments("gpt_oss", quantization_config=mxfp4) == arguments("gpt_oss")
    with pytest.raises(ValueError, match="or of gpt_oss in mxfp4"):
        arguments("mixtral", quantization_config=mxfp4)


def test_layers_for_prediction_are_left_out() -> None:
    """DeepSeek-V3's directory has a layer 61 behind its 61 layers."""
    megatron = type("Config", (), {"num_layers": 61})
    family = FAMILIES["deepseek_v3"]
    assert family.is_left_out("model.layers.61.eh_proj.weight", megatron)
    assert not family.is_left_out("model.layers.60.mlp.gate.bias", megatron)
    assert not family.is_left_out("model.layers.weight", megatron)
    assert not FAMILIES["mixtral"].is_left_out("model.layers.61.eh_proj.weight", megatron)


@pytest.mark.parametrize(
    ("rule", "ours", "theirs"),
    [
        ("halves", [[0, 1, 2, 3]], [[0, 1], [2, 3]]),
        # two groups of two queries, each with its key and its value
        ("qkv", [[0, 1, 10, 20, 2, 3, 11, 21]], [[0, 1, 2, 3], [10, 11], [20, 21]]),
        ("stacked", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], [[[[0, 2], [1, 3]], [[4, 6], [5, 7]]]]),
        # the rows gate, gate, up, up take turns and become columns
        ("stacked-in-turns", [[[0, 1], [2, 3], [4, 5], [6, 7]]], [[[[0, 4, 2, 6], [1, 5, 3, 7]]]]),
    ],
)
def test_a_rule_and_its_inverse(rule: str, ours: list[Any], theirs: list[Any]) -> None:
    heads = SimpleNamespace(num_query_groups=2, num_attention_heads=4, kv_channels=1)
    wholes = [torch.tensor(each) for each in ours]
    parts = RULES[rule].to_hf(heads, wholes)
    assert [part.tolist() for part in parts] == theirs
    back = RULES[rule].to_megatron(heads, parts)
    assert [whole.tolist() for whole in back] == ours


def test_halves_of_unequal_shapes_are_refused() -> None:
    with pytest.raises(RuntimeError):
        RULES["halves"].to_megatron(None, [torch.ones(3, 2), torch.ones(5, 2)])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = config("deepseek_v3")
    (tmp_path / "config.json").write_text(json.dumps(described))
    main([str(tmp_path)])
    printed = capsys.readouterr().out
    assert shlex.split(printed) == arguments_of(tmp_path)
    assert "'([0]*1+[1]*3)'" in printed  # a shell would look for files of this name
    (tmp_path / "config.json").write_text(json.dumps({**described, "hidden_act": "gelu"}))
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)])
    assert str(ended.value.code).startswith(f"error: {tmp_path / 'config.json'}: hidden_act is")
