"""Where a model's MoE layers are: what is needed to read an engine's routes.

Shape suffixes: L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_r3.untrusted import quoted, read_json
from megatron_r3.values import MOST_TOKEN_ID


class EngineError(ValueError):
    """What an engine returned cannot be used; the message names request, token and layer."""


_SPARSE_STEP = ("qwen2_moe", "qwen3_moe", "qwen3_next")
_FIRST_DENSE = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe")
_EVERY_LAYER = ("mixtral", "gpt_oss", "olmoe", "minimax_m2")
_EXPERT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")
# The numbers of a config become tuples and arrays here: a config that says 4000000000 layers must
# not fill the memory before anybody sees that it is wrong.
_MOST_LAYERS = 10_000
_MOST_EXPERTS = 32_768  # `routes.id_dtype`
_MOST_BYTES = 1 << 22  # of a config.json; the longest real ones list quantized modules, 400 kB


@dataclass(frozen=True)
class ModelShape:
    """What a model's routes look like.

    Attributes:
        num_hidden_layers: dense and MoE layers, without multi-token-prediction layers.
        moe_layers: the 0-based hidden layers that have a router, ascending.
        num_experts: E.
        topk: K.
        vocab_size: rows of the output layer; None where the config does not say.
    """

    num_hidden_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    topk: int
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        """Refuse a shape that no model has."""
        layers = list(self.moe_layers)
        if not layers or layers != sorted(set(layers)):
            raise EngineError(f"MoE layers are ascending and at least one; got {quoted(layers)}")
        if layers[0] < 0 or layers[-1] >= self.num_hidden_layers:
            raise EngineError(
                f"MoE layers {quoted(layers)} of {self.num_hidden_layers} hidden layers"
            )
        if not 1 <= self.topk <= self.num_experts:
            raise EngineError(f"top-{self.topk} of {self.num_experts} experts is impossible")

    @classmethod
    def from_hf_config(cls, source: str | Path | Mapping[str, Any]) -> ModelShape:
        """The shape of a transformers model.

        Args:
            source: a model directory, its config.json, or that file's contents.

        Raises:
            EngineError: naming the file and the field: it cannot be read, the model type is
                unknown, a field is missing, of another type, or a number that no model has.
        """
        config, where = _read(source)
        num_layers = _integer(config, "num_hidden_layers", where, 1, _MOST_LAYERS)
        moe_layers = _moe_layers(config, num_layers, where)
        num_experts = _num_experts(config, where)
        topk = _integer(config, "num_experts_per_tok", where, 1, _MOST_EXPERTS)
        vocab_size = _vocab_size(config, where)
        try:
            return cls(num_layers, moe_layers, num_experts, topk, vocab_size)
        except EngineError as error:
            raise EngineError(f"{where}: {error}") from error


def _read(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    if isinstance(source, Mapping):
        return source, "config"
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        with path.open("rb") as file:  # at most so much: it may be a device without end
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise EngineError(
            f"{path}: not a readable model config ({error.strerror or error})"
        ) from error
    try:
        config = read_json(data, str(path), _MOST_BYTES)
    except ValueError as error:
        raise EngineError(f"{error}; a model config is expected") from error
    if not isinstance(config, dict):
        raise EngineError(f"{path}: a model config is a JSON object; got {quoted(config)}")
    return config, str(path)


def _integer(
    config: Mapping[str, Any],
    name: str,
    where: str,
    least: int,
    most: int,
    default: int | None = None,
) -> int:
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise EngineError(f"{where}: `{name}` is missing")
    if isinstance(value, bool) or not isinstance(value, int):
        raise EngineError(f"{where}: `{name}` is a whole number; got {quoted(value)}")
    if not least <= value <= most:
        raise EngineError(f"{where}: `{name}` is {quoted(value)}; possible are {least} to {most}")
    return value


def _num_experts(config: Mapping[str, Any], where: str) -> int:
    found = {
        name: _integer(config, name, where, 1, _MOST_EXPERTS)
        for name in _EXPERT_NAMES
        if config.get(name) is not None
    }
    if not found:
        raise EngineError(f"{where}: the number of experts is missing (one of {_EXPERT_NAMES})")
    if len(set(found.values())) > 1:
        raise EngineError(f"{where}: the number of experts is given twice: {found}")
    return next(iter(found.values()))


def _vocab_size(config: Mapping[str, Any], where: str) -> int | None:
    if config.get("vocab_size") is None:
        return None
    return _integer(config, "vocab_size", where, 1, MOST_TOKEN_ID + 1)


def _moe_layers(config: Mapping[str, Any], num_layers: int, where: str) -> tuple[int, ...]:
    model_type = config.get("model_type")
    if config.get("mlp_layer_types") is not None:
        return _from_names(config["mlp_layer_types"], num_layers, where)
    if model_type in _SPARSE_STEP:
        step = _integer(config, "decoder_sparse_step", where, 1, _MOST_LAYERS, default=1)
        dense = _dense_layers(config, where)
        return tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    if model_type in _FIRST_DENSE:
        return _after_first_dense(config, num_layers, where)
    if model_type in _EVERY_LAYER:
        return tuple(range(num_layers))
    known = ", ".join((*_SPARSE_STEP, *_FIRST_DENSE, *_EVERY_LAYER))
    raise EngineError(
        f"{where}: model type {quoted(model_type)} is unknown, so which layers are MoE layers is "
        f"missing; known: {known}. For another one build ModelShape(num_hidden_layers, moe_layers, "
        "num_experts, topk) yourself"
    )


def _dense_layers(config: Mapping[str, Any], where: str) -> set[int]:
    given = config.get("mlp_only_layers")
    given = [] if given is None else given
    if not isinstance(given, list) or not all(type(one) is int and one >= 0 for one in given):
        raise EngineError(
            f"{where}: `mlp_only_layers` is a list of hidden layers; got {quoted(given)}"
        )
    return set(given)


def _from_names(names: Any, num_layers: int, where: str) -> tuple[int, ...]:
    if (
        not isinstance(names, list)
        or len(names) != num_layers
        or not all(name in ("dense", "sparse") for name in names)
    ):
        raise EngineError(
            f"{where}: `mlp_layer_types` names each of {num_layers} layers dense or sparse; "
            f"got {quoted(names, 200)}"
        )
    return tuple(i for i, name in enumerate(names) if name == "sparse")


def _after_first_dense(config: Mapping[str, Any], num_layers: int, where: str) -> tuple[int, ...]:
    first = _integer(config, "first_k_dense_replace", where, 0, _MOST_LAYERS)
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list):
        if len(frequency) != num_layers:
            raise EngineError(
                f"{where}: `moe_layer_freq` has {len(frequency)} entries for {num_layers} layers"
            )
        if not all(isinstance(one, int) and one in (0, 1) for one in frequency):
            raise EngineError(
                f"{where}: `moe_layer_freq` is a number, or a list of 0 and 1; got "
                f"{quoted(frequency, 200)}"
            )
        return tuple(i for i in range(first, num_layers) if frequency[i])
    step = _integer(config, "moe_layer_freq", where, 1, _MOST_LAYERS, default=1)
    return tuple(i for i in range(first, num_layers) if i % step == 0)
