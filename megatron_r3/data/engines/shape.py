"""What must be known of a model to read its routes, taken from its transformers config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_r3.data.untrusted import read_json
from megatron_r3.data.values import MOST_TOKEN_ID
from megatron_r3.replay.routes import MOST_EXPERTS, MoEShape, RoutesError
from megatron_r3.replay.words import quoted


class EngineError(ValueError):
    """What an engine returned cannot be used; the message names request, token and layer."""


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Put `where` in front of the message of an error that the block raises.

    So only the outermost function, which knows what the request or the file is called, has to know
    it: `naming("request 7, choice 0")` makes "no log-probs" into "request 7, choice 0: no
    log-probs".

    Raises:
        EngineError: for every EngineError and RoutesError of the block.
    """
    try:
        yield
    except (EngineError, RoutesError) as error:
        raise EngineError(f"{where}: {error}") from error


# Model types whose config says in the same fields which hidden layers are MoE layers.
_SPARSE_STEP = ("qwen2_moe", "qwen3_moe", "qwen3_next")
_FIRST_DENSE = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe")
_EVERY_LAYER = ("mixtral", "gpt_oss", "olmoe", "minimax_m2")
_EXPERT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")
# The numbers of a config become tuples and arrays here: a config that says 4000000000 layers must
# not fill the memory before anybody sees that it is wrong.
_MOST_LAYERS = 10_000
_MOST_BYTES = 1 << 22  # of a config.json; the longest real ones list quantized modules, 400 kB


@dataclass(frozen=True)
class ModelShape(MoEShape):
    """The MoE layers of a model, and what else decoding needs.

    Attributes:
        num_hidden_layers: dense and MoE layers, without multi-token-prediction layers. Most engines
            send rows of all hidden layers.
        vocab_size: rows of the output layer; None where the config does not say.
    """

    num_hidden_layers: int
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        """Refuse a shape that no model has."""
        if wrong := self.wrong_shape():
            raise EngineError(wrong)
        if self.moe_layers[-1] >= self.num_hidden_layers:
            raise EngineError(
                f"MoE layers {quoted(list(self.moe_layers))} of {self.num_hidden_layers} hidden "
                "layers"
            )

    @classmethod
    def from_hf_config(cls, source: str | Path | Mapping[str, Any]) -> ModelShape:
        """The shape of a transformers model.

        Args:
            source: a model directory, its config.json, or that file's contents.

        Raises:
            EngineError: naming the file and the field: the file cannot be read, the model type is
                unknown, a field is missing, of another type, or a number that no model has.
        """
        config, where = _read(source)
        with naming(where):
            _refuse_wrapped(config)
            num_layers = _integer(config, "num_hidden_layers", 1, _MOST_LAYERS)
            return cls(
                moe_layers=_moe_layers(config, num_layers),
                num_experts=_num_experts(config),
                topk=_integer(config, "num_experts_per_tok", 1, MOST_EXPERTS),
                num_hidden_layers=num_layers,
                vocab_size=_vocab_size(config),
            )


def _read(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """A config, and what errors call it."""
    if isinstance(source, Mapping):
        return source, "config"
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        with path.open("rb") as file:
            # a bounded read, not read_bytes: the path may be a device without end, as /dev/zero is
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
        raise EngineError(f"{path}: a model config must be a JSON object; got {quoted(config)}")
    return config, str(path)


def _refuse_wrapped(config: Mapping[str, Any]) -> None:
    """Refuse a config whose language model is an object inside of it, e.g. one that sees images."""
    inner = next((name for name in ("text_config", "llm_config") if name in config), None)
    if inner is not None and config.get("num_hidden_layers") is None:
        raise EngineError(
            f"a model of type {quoted(config.get('model_type'))} has its language model in "
            f"`{inner}`: save that object as a config.json of its own, and give its path"
        )


def _integer(
    config: Mapping[str, Any], name: str, least: int, most: int, default: int | None = None
) -> int:
    value = config.get(name)  # an explicit null means the same as a field that is not there
    value = default if value is None else value
    if value is None:
        raise EngineError(
            f"`{name}` is missing; `model_type` is {quoted(config.get('model_type'))}"
        )
    if isinstance(value, bool) or not isinstance(value, int):
        raise EngineError(f"`{name}` must be a whole number; got {quoted(value)}")
    if not least <= value <= most:
        raise EngineError(f"`{name}` is {quoted(value)}; possible are {least} to {most}")
    return value


def _num_experts(config: Mapping[str, Any]) -> int:
    given = {
        name: _integer(config, name, 1, MOST_EXPERTS)
        for name in _EXPERT_NAMES
        if config.get(name) is not None
    }
    if not given:
        raise EngineError(f"the number of experts is missing (one of {_EXPERT_NAMES})")
    if len(set(given.values())) > 1:
        raise EngineError(f"the number of experts is given twice: {given}")
    return next(iter(given.values()))


def _vocab_size(config: Mapping[str, Any]) -> int | None:
    if config.get("vocab_size") is None:
        return None
    return _integer(config, "vocab_size", 1, MOST_TOKEN_ID + 1)


def _moe_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The 0-based hidden layers that are MoE layers; each model family says it in its own way."""
    model_type = config.get("model_type")
    if config.get("mlp_layer_types") is not None:
        return _from_names(config, num_layers)
    if model_type in _SPARSE_STEP:
        step = _integer(config, "decoder_sparse_step", 1, _MOST_LAYERS, default=1)
        dense = _dense_layers(config)
        # i + 1, as transformers counts: with a step of 2, layers 1, 3, 5 are MoE layers. Megatron's
        # --moe-layer-freq 2 means layers 0, 2, 4 instead.
        return tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    if model_type in _FIRST_DENSE:
        return _after_first_dense(config, num_layers)
    if model_type in _EVERY_LAYER:
        return tuple(range(num_layers))
    known = ", ".join((*_SPARSE_STEP, *_FIRST_DENSE, *_EVERY_LAYER))
    raise EngineError(
        f"model type {quoted(model_type)} is unknown, so nobody can tell which layers are "
        f"MoE layers; known: {known}. For another one add `mlp_layer_types` to a copy of its "
        'config.json, a list that names each layer "dense" or "sparse", and give the path of the '
        "copy"
    )


def _listed(config: Mapping[str, Any], name: str, right: bool, expected: str) -> None:
    """Refuse a list of a config that is not right."""
    if not right:
        raise EngineError(f"`{name}` must {expected}; got {quoted(config[name], 200)}")


def _dense_layers(config: Mapping[str, Any]) -> set[int]:
    given = config.get("mlp_only_layers")
    given = [] if given is None else given
    right = isinstance(given, list) and all(type(n) is int and n >= 0 for n in given)
    _listed(config, "mlp_only_layers", right, "be a list of hidden layers")
    return set(given)


def _from_names(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    names = config["mlp_layer_types"]
    right = isinstance(names, list) and len(names) == num_layers
    right = right and all(name in ("dense", "sparse") for name in names)
    _listed(config, "mlp_layer_types", right, f"name each of {num_layers} layers dense or sparse")
    return tuple(i for i, name in enumerate(names) if name == "sparse")


def _after_first_dense(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """DeepSeek: the first layers are dense; of the others a frequency says which are MoE layers.

    Example: `first_k_dense_replace` 1 and `moe_layer_freq` 2 of 6 layers mean layers 2 and 4; the
    frequency may also be a list with a 0 or 1 for each layer.
    """
    first = _integer(config, "first_k_dense_replace", 0, _MOST_LAYERS)
    frequency = config.get("moe_layer_freq")
    if not isinstance(frequency, list):
        step = _integer(config, "moe_layer_freq", 1, _MOST_LAYERS, default=1)
        return tuple(i for i in range(first, num_layers) if i % step == 0)
    right = len(frequency) == num_layers and all(type(n) is int and n in (0, 1) for n in frequency)
    expected = f"be a number, or a list of 0 and 1 for each of {num_layers} layers"
    _listed(config, "moe_layer_freq", right, expected)
    return tuple(i for i in range(first, num_layers) if frequency[i])
