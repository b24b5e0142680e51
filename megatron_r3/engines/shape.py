"""Where a model's MoE layers are: what is needed to read an engine's routes.

Shape suffixes: L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["EngineError", "ModelShape"]


class EngineError(ValueError):
    """What an engine returned cannot be used; the message names request, token and layer."""


_SPARSE_STEP = ("qwen2_moe", "qwen3_moe", "qwen3_next")
_FIRST_DENSE = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe")
_EVERY_LAYER = ("mixtral", "gpt_oss", "olmoe", "minimax_m2")
_EXPERT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelShape:
    """What a model's routes look like.

    Attributes:
        num_hidden_layers: dense and MoE layers, without multi-token-prediction layers.
        moe_layers: the 0-based hidden layers that have a router, ascending.
        num_experts: E.
        topk: K.
    """

    num_hidden_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    topk: int

    def __post_init__(self) -> None:
        """Refuse a shape that no model has."""
        layers = list(self.moe_layers)
        if not layers or layers != sorted(set(layers)):
            raise EngineError(f"MoE layers are ascending and at least one; got {layers}")
        if layers[0] < 0 or layers[-1] >= self.num_hidden_layers:
            raise EngineError(f"MoE layers {layers} of {self.num_hidden_layers} hidden layers")
        if not 1 <= self.topk <= self.num_experts:
            raise EngineError(f"top-{self.topk} of {self.num_experts} experts is impossible")

    @classmethod
    def from_hf_config(cls, source: str | Path | Mapping[str, Any]) -> ModelShape:
        """The shape of a transformers model.

        Args:
            source: a model directory, its config.json, or that file's contents.

        Raises:
            EngineError: the file cannot be read, the model type is unknown, or a field is missing.
        """
        config, where = _read(source)
        num_layers = _integer(config, "num_hidden_layers", where)
        return cls(
            num_hidden_layers=num_layers,
            moe_layers=_moe_layers(config, num_layers, where),
            num_experts=_num_experts(config, where),
            topk=_integer(config, "num_experts_per_tok", where),
        )


def _read(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    if isinstance(source, Mapping):
        return source, "config"
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{path}: not a readable model config ({error})") from error
    if not isinstance(config, dict):
        raise EngineError(f"{path}: a model config is a JSON object")
    return config, str(path)


def _integer(config: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise EngineError(f"{where}: `{name}` is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise EngineError(f"{where}: `{name}` is a whole number; got {value!r}")
    return value


def _num_experts(config: Mapping[str, Any], where: str) -> int:
    found = {name: config[name] for name in _EXPERT_NAMES if config.get(name) is not None}
    if not found:
        raise EngineError(f"{where}: the number of experts is missing (one of {_EXPERT_NAMES})")
    if len(set(found.values())) > 1:
        raise EngineError(f"{where}: the number of experts is given twice: {found}")
    return _integer(config, next(iter(found)), where)


def _moe_layers(config: Mapping[str, Any], num_layers: int, where: str) -> tuple[int, ...]:
    model_type = config.get("model_type")
    if config.get("mlp_layer_types") is not None:
        return _from_names(config["mlp_layer_types"], num_layers, where)
    if model_type in _SPARSE_STEP:
        step = _integer(config, "decoder_sparse_step", where, default=1)
        if step == 0:
            raise EngineError(f"{where}: `decoder_sparse_step` is 0")
        dense = config.get("mlp_only_layers") or ()
        return tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    if model_type in _FIRST_DENSE:
        return _after_first_dense(config, num_layers, where)
    if model_type in _EVERY_LAYER:
        return tuple(range(num_layers))
    known = ", ".join((*_SPARSE_STEP, *_FIRST_DENSE, *_EVERY_LAYER))
    raise EngineError(
        f"{where}: model type {model_type!r} is unknown, so which layers are MoE layers is missing;"
        f" known: {known}. For another one build ModelShape(num_hidden_layers, moe_layers, "
        "num_experts, topk) yourself"
    )


def _from_names(names: list[str], num_layers: int, where: str) -> tuple[int, ...]:
    if len(names) != num_layers or not set(names) <= {"dense", "sparse"}:
        raise EngineError(
            f"{where}: `mlp_layer_types` names each of {num_layers} layers dense or sparse; "
            f"got {names}"
        )
    return tuple(i for i, name in enumerate(names) if name == "sparse")


def _after_first_dense(config: Mapping[str, Any], num_layers: int, where: str) -> tuple[int, ...]:
    first = _integer(config, "first_k_dense_replace", where)
    frequency = config.get("moe_layer_freq", 1)
    if isinstance(frequency, list):
        if len(frequency) != num_layers:
            raise EngineError(
                f"{where}: `moe_layer_freq` has {len(frequency)} entries for {num_layers} layers"
            )
        return tuple(i for i in range(first, num_layers) if frequency[i])
    step = _integer(config, "moe_layer_freq", where, default=1)
    if step == 0:
        raise EngineError(f"{where}: `moe_layer_freq` is 0")
    return tuple(i for i in range(first, num_layers) if i % step == 0)
