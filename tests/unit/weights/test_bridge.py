"""Who moves the weights of a model, and what is asked of a bridge."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_r3.weights.bridge import BRIDGES, VARIABLE, choice_of_environment, choose
from megatron_r3.weights.bridge_checks import compare_models
from megatron_r3.weights.bridge_family import BridgeFamily, shapes_of, spellings
from megatron_r3.weights.families import FAMILIES
from megatron_r3.weights.family import EMBEDDING, ModelSettings
from megatron_r3.weights.pieces import Place

WHERE = Path("model/config.json")


def test_our_own_families_need_no_bridge() -> None:
    for model_type in FAMILIES:
        assert choose("auto", {"model_type": model_type}, WHERE) == "own"


@pytest.mark.parametrize("choice", ["own", "auto"])
def test_a_model_that_nobody_can_move(choice: str) -> None:
    with pytest.raises(ValueError, match="normalizes the queries and keys of all heads"):
        choose(choice, {"model_type": "olmoe"}, WHERE)
    with pytest.raises(ValueError, match=r"model/config.json: model_type is 7"):
        choose(choice, {"model_type": 7}, WHERE)


def absent(name: str) -> None:
    if importlib.util.find_spec("megatron") and importlib.util.find_spec(BRIDGES[name].module):
        pytest.skip(f"{name} is installed here; tests/clients/test_bridge_weights.py runs it")


def test_a_model_of_which_only_absent_bridges_could_know() -> None:
    for name in BRIDGES:
        absent(name)
    with pytest.raises(ValueError, match="model_type is 'qwen3'") as said:
        choose("auto", {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, WHERE)
    assert "\n" not in str(said.value)
    for name in BRIDGES:
        assert f"{name} is not installed (pip install {name})" in str(said.value)


@pytest.mark.parametrize("name", BRIDGES)
def test_a_bridge_that_is_chosen_and_absent(name: str) -> None:
    absent(name)
    with pytest.raises(ValueError, match=rf"config.json: --hf-bridge {name}: {name} is not inst"):
        choose(name, {"model_type": "qwen3_moe"}, WHERE)
    with pytest.raises(ValueError, match=rf"config.json: {VARIABLE} {name}: {name} is not inst"):
        choose(name, {"model_type": "qwen3_moe"}, WHERE, VARIABLE)


def test_the_choice_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert choice_of_environment() == "auto"
    monkeypatch.setenv(VARIABLE, "mbridge")
    assert choice_of_environment() == "mbridge"
    monkeypatch.setenv(VARIABLE, "nemo")
    with pytest.raises(ValueError, match=f"{VARIABLE} is 'nemo'; expected one of auto, megatron-b"):
        choice_of_environment()


def test_the_spellings_of_a_tensor() -> None:
    inside = "decoder.layers.3."
    norm = Place("decoder.layers.input_layernorm.weight", 3)
    fused = "self_attention.linear_qkv.layer_norm_weight"
    assert spellings(norm) == [f"{inside}{fused}", f"{inside}input_layernorm.weight"]
    expert = Place("decoder.layers.mlp.experts.experts.linear_fc1.weight", 3, 5)
    assert spellings(expert) == [f"{inside}mlp.experts.linear_fc1.weight5"]
    assert spellings(EMBEDDING) == ["embedding.word_embeddings.weight"]


class Doubling:
    """A translator that calls a tensor by another name, and doubles it."""

    title = "doubling 1"

    def __init__(self, names: dict[str, tuple[str, ...]], back: float = 0.5) -> None:
        self._names, self._back = names, back

    def built(self) -> Any:
        return None

    def names(self, name: str) -> tuple[str, ...] | None:
        return self._names.get(name)

    def to_hf(self, name: str, whole: Tensor) -> dict[str, Tensor]:
        return dict.fromkeys(self._names[name], whole * 2)

    def to_megatron(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        return parts[0] * self._back


QWEN = SimpleNamespace(model_type="qwen3")
NORM = Place("decoder.final_layernorm.weight")
NAMES = {EMBEDDING.key: ("a",), NORM.key: ("b",)}


def family(names: dict[str, tuple[str, ...]], back: float = 0.5, **shapes: Any) -> BridgeFamily:
    return BridgeFamily(Doubling(names, back), QWEN, [EMBEDDING, NORM], shapes)


def test_a_bridge_translates_each_tensor() -> None:
    embedding, norm = family(NAMES, a=(3, 2), b=(2,)).tensors(None)
    assert (embedding.names, norm.names) == (("a",), ("b",))
    whole = torch.arange(8.0).view(4, 2)  # with a row of padding
    assert torch.equal(embedding.to_hf([whole])[0], whole * 2)
    assert torch.equal(embedding.to_megatron([whole * 2])[0], whole)


@pytest.mark.parametrize(
    ("names", "shapes", "words"),
    [
        ({EMBEDDING.key: ("a",)}, {}, "has no name for decoder.final_layernorm.weight"),
        ({**NAMES, NORM.key: ("a",)}, {}, "makes a of several Megatron tensors"),
        (NAMES, {"a": (3, 2)}, r"do not have the same tensors: 1 are .* e.g. \['b'\]"),
        (
            NAMES,
            {"a": (3, 2), "b": (2,), "c": (1,)},
            r"the same tensors: 1 are in only one of them, e.g. \['c'\]",
        ),
    ],
)
def test_names_that_a_bridge_lacks(names: Any, shapes: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"doubling 1.* {words}"):
        family(names, **shapes).tensors(None)


def test_values_that_a_bridge_changes() -> None:
    tensor = torch.ones(4, 2)
    entry = family(NAMES, back=0.25).tensors(None)[0]
    for way in (entry.to_hf, entry.to_megatron):
        with pytest.raises(ValueError, match=r"changes embedding.* in a conversion and its"):
            way([tensor])
    entry = family(NAMES, a=(4, 3), b=(2,)).tensors(None)[0]
    with pytest.raises(
        ValueError, match=r"of shape \(4, 2\) out of .* the transformers directory has"
    ):
        entry.to_hf([tensor])


def test_an_error_of_a_bridge_names_it() -> None:
    entry = family(NAMES).tensors(None)[0]
    with pytest.raises(ValueError, match=r"doubling 1 fails on embedding.* IndexError"):
        entry.to_megatron([])


def test_the_shapes_of_a_directory(tmp_path: Path) -> None:
    assert shapes_of(tmp_path) == {}
    save_file({"a": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert shapes_of(tmp_path) == {"a": (3, 2)}


HF = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "rms_norm_eps": 1e-6}
HF |= {"num_key_value_heads": 1, "head_dim": 4, "vocab_size": 9, "tie_word_embeddings": False}
HF |= {"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e4}
MEGATRON = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 1}
MEGATRON |= {"kv_channels": 4, "layernorm_epsilon": 1e-6, "ffn_hidden_size": 16}
MEGATRON |= {"num_moe_experts": None, "multi_latent_attention": False, "qk_layernorm": True}
SETTINGS = ModelSettings(9, False, "rope", 1e4, 1.0, False, None, 64)


def compared(hf: dict[str, Any], built: dict[str, Any]) -> None:
    theirs, made = SimpleNamespace(**{**HF, **hf}), SimpleNamespace(**{**MEGATRON, **built})
    compare_models(theirs, made, "bridge 1", SimpleNamespace(**MEGATRON), SETTINGS)


def test_the_same_model() -> None:
    compared({}, {})
    compared({"head_dim": None}, {"qk_layernorm": 1, "window_size": None})


@pytest.mark.parametrize(
    ("hf", "built", "words"),
    [
        ({"rope_theta": 1e6}, {}, "rope_theta is 1000000.0; Megatron's arguments say 10000.0"),
        ({"tie_word_embeddings": True}, {}, "tie_word_embeddings is True"),
        ({"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor is 0.5"),
        (
            {"rope_parameters": {"rope_type": "llama3"}},
            {},
            "rope_type is 'llama3'; bridge 1 can move",
        ),
        ({"quantization_config": {"bits": 8}}, {}, "quantization_config is {'bits': 8}"),
        ({"layer_types": ["sliding_attention"]}, {}, "layer_types is"),
        (
            {},
            {"qk_layernorm": False},
            "bridge 1 reads qk_layernorm as False; Megatron's arguments say True",
        ),
        ({}, {"window_size": (4, 0)}, "bridge 1 reads window_size as"),
        ({}, {"num_moe_experts": 8}, "bridge 1 reads num_moe_experts as 8"),
        ({}, {"ffn_hidden_size": 12}, "bridge 1 reads ffn_hidden_size as 12"),
    ],
)
def test_another_model(hf: dict[str, Any], built: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compared(hf, built)


def test_an_option_that_nothing_compares() -> None:
    """As a newer Megatron's class would have it; its default is taken."""
    layout = dataclasses.make_dataclass("ModelParallelConfig", [("made_up_width", int, 1)])
    fields: list[Any] = [(name, Any, value) for name, value in MEGATRON.items()]
    fields += [("made_up", int, 3), ("hidden_dropout", float, 0.0)]
    kind: Any = dataclasses.make_dataclass("TransformerConfig", fields, bases=(layout,))
    kind.__module__ = "megatron.core.newer"
    hf, built = SimpleNamespace(**HF), SimpleNamespace(**MEGATRON)
    harmless = kind(hidden_dropout=0.5, made_up_width=2)
    compare_models(hf, built, "bridge 1", harmless, SETTINGS)
    with pytest.raises(ValueError, match="made_up is 4; bridge 1 can move a model only with 3"):
        compare_models(hf, built, "bridge 1", kind(made_up=4), SETTINGS)
    scaled = dataclasses.replace(SETTINGS, interpolation=2.0)
    with pytest.raises(ValueError, match="only models with plain RoPE"):
        compare_models(hf, built, "bridge 1", kind(), scaled)
