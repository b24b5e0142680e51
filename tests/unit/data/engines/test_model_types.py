"""The config of every MoE class of transformers is read as the class is built, or refused.

Each class is built on the meta device. Then its modules tell which decoder layers have experts, how
many experts a layer has, and how many of them the router takes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_r3.data.engines.shape import _RULES, EngineError, ModelShape

# The errors for types whose routes cannot be replayed, or that are no language models.
REFUSED = {
    "dbrx": "model type 'dbrx' is unknown",
    "deepseek_v4": "`mlp_layer_types` must name each",  # the first layers choose by token id
    "ernie4_5_vl_moe": "a router for text and one for images",
    "diffusion_gemma": "model type 'diffusion_gemma_text' is unknown",  # not autoregressive
    "jetmoe": "model type 'jetmoe' is unknown",  # attention has routed experts too
    "longcat_flash": "`zero_expert_num` is set",
    "nllb-moe": "model type 'nllb-moe' is unknown",  # an encoder and a decoder
    "openai_privacy_filter": "model type 'openai_privacy_filter' is unknown",  # an encoder
    "zaya": "model type 'zaya' is unknown",  # the router may also choose none
}
# Fields without which the class cannot be built.
GEMMA = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 8}
INDEXER = dict.fromkeys(("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio"), 256)
INDEXER = {f"indexer_{name}": number for name, number in INDEXER.items()} | {"indexer_kv_heads": 1}
NEEDED: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 1e4}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", *["sparse"] * 31], "num_experts_per_tok": 2}
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma": {"text_config": GEMMA},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma4": {"text_config": GEMMA},
    "gemma4_text": GEMMA,
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv"] * 32},
}
# Configs with other numbers than the class's defaults.
VARIED: list[tuple[str, dict[str, Any]]] = [
    ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("qwen3_moe", {"decoder_sparse_step": 3}),
    ("qwen3_vl_moe_text", {"decoder_sparse_step": 2}),
    ("flint", {"mlp_only_layers": [2, 5], "decoder_sparse_step": 2}),
    ("deepseek_v2", {"first_k_dense_replace": 3}),
    ("deepseek_v3", {"first_k_dense_replace": 5}),
    ("dots1", {"first_k_dense_replace": 2}),
    ("glm4_moe", {"first_k_dense_replace": 4}),
    ("mistral4", {"first_k_dense_replace": 2}),
    ("afmoe", {"num_dense_layers": 3}),
    ("lfm2_moe", {"num_dense_layers": 4}),
    ("llama4_text", {"interleave_moe_layer_step": 2}),
    ("llama4_text", {"moe_layers": [2, 5]}),
    ("ernie4_5_moe", {"moe_layer_start_index": 3, "moe_layer_end_index": 20}),
    ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_start_index": 4}),
    ("jamba", {"expert_layer_period": 4, "expert_layer_offset": 2}),
    ("nemotron_h", {"hybrid_override_pattern": "ME*EM-E"}),
]
# Public configs of these types have `first_k_dense_replace`; transformers computes
# `mlp_layer_types` from it.
FIRST_DENSE = ("axk1", "axk2", "bailing_hybrid", "deepseek_v32", "exaone_moe", "glm4_moe_lite")
FIRST_DENSE += ("glm_moe_dsa", "kimi_linear")
# Types with a rule, for which transformers has no class, or a class inside a larger model's.
NOT_BUILT = {"bailing_moe", "kimi_k2", "minimax_m1", "qwen3_omni_moe_text", "step3p5"}
Built = tuple[list[int], set[int], set[int]]


def built(config: Any) -> Built:
    """The decoder layers with experts, the counts of experts in them, and the top-k of routers."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    with torch.device("meta"):
        for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel):
            try:
                model = auto.from_config(config)
            except ValueError as error:
                if "Unrecognized configuration class" not in str(error):
                    raise
                continue
            break
        else:
            return [], set(), set()
    layers, experts, topk = set(), set(), set()
    for name, module in model.named_modules():
        match = re.match(r"(?:.*\.)?(?:layers|blocks)\.(\d+)\.", name)
        kind = type(module).__name__
        if match and re.search(r"(?<!Shared)Experts$|^GraniteMoeSharedExperts$", kind):
            layers.add(int(match[1]))
            experts.add(getattr(module, "num_experts", None))
        if match and re.search("(Router|Gate)$", kind):
            found = getattr(module, "top_k", None) or getattr(
                getattr(module, "config", None), "top_k_experts", None
            )
            topk |= {found} if isinstance(found, int) else set()
    return sorted(layers), experts, topk


def moe_types() -> Iterator[str]:
    """The model types of transformers whose code has experts."""
    import transformers
    from transformers import CONFIG_MAPPING

    models = Path(transformers.__file__).parent / "models"
    for name, config in CONFIG_MAPPING.items():
        folder = models / config.__module__.split(".")[2]
        code = "".join(path.read_text() for path in folder.glob("modeling_*.py"))
        if re.search(r"class \w*Experts\(", code):
            yield name


def compared(name: str, change: dict[str, Any]) -> str:
    """The result as text: right, no experts, the error of a refusal, or what differs."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[name](**NEEDED.get(name, {}), **change)
    layers, experts, topk = built(config)
    if not layers:
        return "no experts"
    for text in (config.to_json_string(use_diff=False), config.to_json_string()):
        try:
            shape = ModelShape.from_hf_config(json.loads(text))
        except EngineError as error:
            return f"refused: {error}"
        got = [*shape.moe_layers], {shape.num_experts}, {shape.topk}
        if got != (layers, experts, topk):
            return f"wrong: {got}, not {(layers, experts, topk)}"
    return "right"


@pytest.mark.slow
def test_every_class_is_read_as_it_is_built_or_refused() -> None:
    found = {name: compared(name, {}) for name in moe_types()}
    wrong = {name: said for name, said in found.items() if said.startswith("wrong")}
    assert not wrong
    right = {name for name, said in found.items() if said == "right"}
    assert set(_RULES) - right == NOT_BUILT
    refused = {name: said for name, said in found.items() if said.startswith("refused")}
    assert set(refused) == set(REFUSED)
    assert all(REFUSED[name] in said for name, said in refused.items())
    assert len(right) >= 35, found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "change"), VARIED)
def test_other_numbers_of_the_fields_mean_other_layers(name: str, change: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING

    assert compared(name, change) == "right"
    usual, other = (CONFIG_MAPPING[name](**NEEDED.get(name, {}), **c) for c in ({}, change))
    assert built(usual)[0] != built(other)[0]  # the control: the class reads the field


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FIRST_DENSE, "mimo_v2_flash"])
def test_the_fields_of_public_configs_mean_what_the_class_makes_of_them(name: str) -> None:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[name]()
    layers = built(config)[0]
    public = json.loads(config.to_json_string(use_diff=False)) | {"mlp_layer_types": None}
    if name in FIRST_DENSE:
        public |= {"first_k_dense_replace": layers[0], "moe_layer_freq": None}
    else:
        public["moe_layer_freq"] = [int(i in layers) for i in range(public["num_hidden_layers"])]
    assert [*ModelShape.from_hf_config(public).moe_layers] == layers
    if name == "mimo_v2_flash":
        with pytest.raises(EngineError, match="`moe_layer_freq` must be a list"):
            ModelShape.from_hf_config(public | {"moe_layer_freq": None})


@pytest.mark.slow
def test_the_layers_of_step() -> None:
    """transformers has only the class of a larger model, whose text config has the same field."""
    from transformers import CONFIG_MAPPING

    layers, experts, topk = built(CONFIG_MAPPING["step3p7"](text_config={"moe_layers_enum": "3,5"}))
    public = {"model_type": "step3p5", "num_hidden_layers": 45, "moe_layers_enum": "3,5"}
    shape = ModelShape.from_hf_config(public | {"moe_num_experts": 288, "moe_top_k": 8})
    assert ([*shape.moe_layers], {shape.num_experts}, {shape.topk}) == (layers, experts, topk)


def test_docs_name_every_type() -> None:
    page = (Path(__file__).parents[4] / "docs" / "engines.md").read_text()
    section = page.split("## Which layers are MoE layers")[1]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")]
    assert sorted(re.findall(r"\w+", " ".join(rows[1:-1]))) == sorted(_RULES)
