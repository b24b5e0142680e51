"""Reads from a transformers config which layers of a model are MoE layers, their experts, top-k."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megatron_r3.data.untrusted import read_json
from megatron_r3.data.values import MOST_TOKEN_ID
from megatron_r3.replay.routes import MOST_EXPERTS, MoEShape, RoutesError
from megatron_r3.replay.words import quoted

_T = TypeVar("_T")


class EngineError(ValueError):
    """A response or a model config that cannot be used; the message says which one, and why."""


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Put `where` in front of the message of an error that the block raises.

    So inner functions need not know the name of the request or of the file. Example:
    `naming("request 7, choice 0")` turns "no log-probs" into "request 7, choice 0: no log-probs".

    Raises:
        EngineError: for every EngineError and RoutesError of the block.
    """
    try:
        yield
    except (EngineError, RoutesError) as error:
        raise EngineError(f"{where}: {error}") from error


# The fields of configs with the number of experts of a layer, and of the experts a token takes.
_EXPERT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOPK_NAMES = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)
# The object with the language model in the config of a model that also sees or hears.
_INNER_NAMES = ("text_config", "llm_config", "language_config", "thinker_config")
# Model types with two routers in a layer: a list of ids does not say which of them chose.
_SEVERAL_ROUTERS = ("ernie4_5_vl_moe_text",)
# A config that says 4000000000 layers must be refused before a tuple of this length fills the
# memory.
_MOST_LAYERS = 10_000
_MOST_BYTES = 1 << 22  # of a config.json; the longest real ones have 400 kB


@dataclass(frozen=True)
class ModelShape(MoEShape):
    """The MoE layers of a model, and what else a decoder of responses needs.

    Attributes:
        num_hidden_layers: how many dense and MoE layers the model has, without layers of
            multi-token prediction. Most engines send rows of all hidden layers.
        vocab_size: rows of the output layer; None if the config does not say it.

    Raises:
        EngineError: no model has such a shape.
    """

    num_hidden_layers: int
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        """Refuse a shape that no model has."""
        if wrong := self.wrong_shape():
            raise EngineError(wrong)
        if self.moe_layers[-1] >= self.num_hidden_layers:
            raise EngineError(
                f"the MoE layers are {quoted(list(self.moe_layers))}, counted from 0; the model "
                f"has only {self.num_hidden_layers} hidden layers"
            )

    @classmethod
    def from_hf_config(
        cls,
        source: str | Path | Mapping[str, Any],
        moe_layers: tuple[int, ...] | None = None,
        num_experts: int | None = None,
        topk: int | None = None,
    ) -> ModelShape:
        """The shape of a transformers model.

        Args:
            source: a model directory, the path of a config.json, or the object in that file.
            moe_layers, num_experts, topk: given by the user if the config does not say them in a
                known way, for example because the model type is not known; else None.

        Raises:
            EngineError: the file cannot be read; the model type is unknown; a field is missing, has
                another type, or is a number that no model has; or the config contradicts an
                argument. The message names the file and the field.
        """
        config, where = _read(source)
        with naming(where):
            config = _language_model(config)
            _refuse_other_routers(config)
            experts, chosen = (
                partial(_one_of, config, _EXPERT_NAMES, "number of experts"),
                partial(_one_of, config, _TOPK_NAMES, "number of experts for a token"),
            )
            vocab_size = config.get("vocab_size")
            if vocab_size is not None:
                vocab_size = _integer(config, "vocab_size", 1, MOST_TOKEN_ID + 1)
            return cls(
                moe_layers=_said("--moe-layers", moe_layers, lambda: _layers(config)),
                num_experts=_said("--num-experts", num_experts, experts),
                topk=_said("--topk", topk, chosen),
                num_hidden_layers=_num_layers(config),
                vocab_size=vocab_size,
            )


def _said(option: str, given: _T | None, read: Callable[[], _T]) -> _T:
    """The value that `read` finds in the config, or else `given`; an error if the two differ."""
    try:
        found = read()
    except EngineError:
        if given is None:
            raise
        return given
    if given not in (None, found):
        raise EngineError(
            f"{option} is {quoted(given)}; the config says {quoted(found)}: leave the option out"
        )
    return found


def _read(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """A config, and its name in errors."""
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


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model: `config`, or an object inside of it."""
    for name in _INNER_NAMES:
        inner = config.get(name)
        if isinstance(inner, Mapping) and config.get("num_hidden_layers") is None:
            names = ("model_type", "vocab_size", "mlp_layer_types")
            outer = {key: config.get(key) for key in names}
            known = {key: value for key, value in inner.items() if value is not None}
            return _language_model({**outer, **known})
    return config


def _num_layers(config: Mapping[str, Any]) -> int:
    blocks = _blocks(config)
    given = None if blocks is None else len(blocks)
    return _integer(config, "num_hidden_layers", 1, _MOST_LAYERS, default=given)


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


def _one_of(config: Mapping[str, Any], names: Sequence[str], what: str) -> int:
    """The number that a config has under one of several names.

    Hunyuan's `moe_topk` may also be a list that has the same number for each layer.
    """
    given = {}
    for name in names:
        value = config.get(name)
        if name == "moe_topk" and isinstance(value, list) and value == value[:1] * len(value):
            value = value[0] if value else None
        if value is not None:
            given[name] = _integer({name: value}, name, 1, MOST_EXPERTS)
    if not given:
        raise EngineError(
            f"the {what} is missing (one of {', '.join(names)}); `model_type` is "
            f"{quoted(config.get('model_type'))}"
        )
    if len(set(given.values())) > 1:
        raise EngineError(f"the {what} is given with different values: {given}")
    return next(iter(given.values()))


def _refuse_other_routers(config: Mapping[str, Any]) -> None:
    """Refuse a model with routes that cannot be replayed, though its config can be read."""
    model_type = config.get("model_type")
    if model_type in _SEVERAL_ROUTERS:
        raise EngineError(
            f"a layer of model type {quoted(model_type)} has a router for text and one for images: "
            "its routes do not say which router chose; such a model cannot be replayed"
        )
    if config.get("zero_expert_num"):
        raise EngineError(
            "`zero_expert_num` is set: the router also chooses experts that compute nothing; such a"
            " model cannot be replayed"
        )


def _layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The MoE layers, in ascending order."""
    rule = _rule(config)
    return tuple(sorted(rule(config, _num_layers(config))))


def _rule(config: Mapping[str, Any]) -> _Rule:
    """The function that finds the MoE layers in this config, by `mlp_layer_types` or model type."""
    model_type = config.get("model_type")
    if config.get("mlp_layer_types") is not None:
        return _from_names
    if not isinstance(model_type, str) or model_type not in _RULES:
        raise EngineError(
            f"model type {quoted(model_type)} is unknown, so nothing says which layers are MoE "
            "layers; docs/engines.md names the known types. For another type give --moe-layers; or "
            'add the list `mlp_layer_types`, with "dense" or "sparse" for each layer, to a copy of '
            "its config.json, and give the path of the copy"
        )
    return _RULES[model_type]


def _listed(config: Mapping[str, Any], name: str, right: bool, expected: str) -> None:
    """Refuse the list `name` of a config if `right` is False: "`name` must {expected}"."""
    if not right:
        raise EngineError(f"`{name}` must {expected}; got {quoted(config[name], 200)}")


def _from_names(config: Mapping[str, Any], num_layers: int) -> Iterable[int]:
    names = config["mlp_layer_types"]
    right = isinstance(names, list) and len(names) == num_layers
    right = right and all(name in ("dense", "sparse") for name in names)
    _listed(config, "mlp_layer_types", right, f"name each of {num_layers} layers dense or sparse")
    return (i for i, name in enumerate(names) if name == "sparse")


def _numbers(config: Mapping[str, Any], name: str, default: Sequence[int] = ()) -> Sequence[int]:
    """The list `name` of hidden layers in a config; `default` if the config does not have it."""
    given = config.get(name)
    if given is None:
        return default
    right = isinstance(given, list) and all(type(n) is int and n >= 0 for n in given)
    _listed(config, name, right, "be a list of hidden layers")
    return given


# Rules. Each takes a config and its number of hidden layers, and returns the MoE layers.


def _every(config: Mapping[str, Any], num_layers: int) -> Iterable[int]:
    return range(num_layers)


def _by_step(
    config: Mapping[str, Any], num_layers: int, dense: Sequence[int] = ()
) -> Iterable[int]:
    """Qwen: every `decoder_sparse_step`-th layer, but not the layers in `mlp_only_layers`.

    Example: with a step of 2, layers 1, 3, 5 are MoE layers, as transformers counts. Megatron's
    --moe-layer-freq 2 means layers 0, 2, 4 instead.

    Args:
        dense: the dense layers of a config that has no `mlp_only_layers`.
    """
    step = _integer(config, "decoder_sparse_step", 1, _MOST_LAYERS, default=1)
    dense = _numbers(config, "mlp_only_layers", dense)
    return (i for i in range(step - 1, num_layers, step) if i not in dense)


def _after_first_dense(
    config: Mapping[str, Any], num_layers: int, least: int | None = None
) -> Iterable[int]:
    """DeepSeek: the first layers are dense; a frequency picks the MoE layers among the others.

    Example: `first_k_dense_replace` 1 and `moe_layer_freq` 2 of 6 layers mean layers 2 and 4; the
    frequency may also be a list with a 0 or 1 for each layer.

    Args:
        least: the value for a config without `first_k_dense_replace`; None refuses such a config.
    """
    first = _integer(config, "first_k_dense_replace", 0, _MOST_LAYERS, default=least)
    frequency = config.get("moe_layer_freq")
    if not isinstance(frequency, list):
        step = _integer(config, "moe_layer_freq", 1, _MOST_LAYERS, default=1)
        return (i for i in range(first, num_layers) if i % step == 0)
    right = len(frequency) == num_layers and all(type(n) is int and n in (0, 1) for n in frequency)
    expected = f"be a number, or a list of 0 and 1 for each of {num_layers} layers"
    _listed(config, "moe_layer_freq", right, expected)
    return (i for i in range(first, num_layers) if frequency[i])


def _by_flags(config: Mapping[str, Any], num_layers: int) -> Iterable[int]:
    """MiMo: `moe_layer_freq` has a 1 for each MoE layer and a 0 for each dense layer."""
    if not isinstance(config.get("moe_layer_freq"), list):
        raise EngineError(f"`moe_layer_freq` must be a list of 0 and 1 for {num_layers} layers")
    return _after_first_dense(config, num_layers, least=0)


def _after_num_dense(config: Mapping[str, Any], num_layers: int) -> Iterable[int]:
    return range(_integer(config, "num_dense_layers", 0, _MOST_LAYERS), num_layers)


def _interleaved(config: Mapping[str, Any], num_layers: int) -> Iterable[int]:
    """Llama 4: the layers in `moe_layers`, or every `interleave_moe_layer_step`-th layer."""
    step = _integer(config, "interleave_moe_layer_step", 1, _MOST_LAYERS, default=1)
    return _numbers(config, "moe_layers", range(step - 1, num_layers, step))


def _between(config: Mapping[str, Any], num_layers: int) -> Iterable[int]:
    """ERNIE: every `moe_layer_interval`-th layer.

    Only layers from `moe_layer_start_index` to `moe_layer_end_index` (-1: the last one) count.
    """
    first = _integer(config, "moe_layer_start_index", 0, _MOST_LAYERS)
    last = _integer(config, "moe_layer_end_index", -1, _MOST_LAYERS, default=-1)
    last = num_layers - 1 if last == -1 else last
    step = _integer(config, "moe_layer_interval", 1, _MOST_LAYERS, default=1)
    return (i for i in range(step - 1, num_layers, step) if first <= i <= last)


def _periodic(config: Mapping[str, Any], num_layers: int) -> Iterable[int]:
    """Jamba: one layer of each period; none if there is one expert."""
    if config.get("num_experts") == 1:
        return ()
    period = _integer(config, "expert_layer_period", 1, _MOST_LAYERS)
    return range(_integer(config, "expert_layer_offset", 0, period - 1), num_layers, period)


def _blocks(config: Mapping[str, Any]) -> Sequence[str] | None:
    """Nemotron-H: a text for each layer, "E" for an MoE layer; None if the config has none."""
    names, letters = config.get("layers_block_type"), config.get("hybrid_override_pattern")
    if isinstance(names, list):
        return ["E" if name == "moe" else "" for name in names]
    return letters if isinstance(letters, str) else None


def _by_blocks(config: Mapping[str, Any], num_layers: int) -> Iterable[int]:
    blocks = _blocks(config)
    if blocks is None or len(blocks) != num_layers:
        raise EngineError(
            f"`layers_block_type` must name each of {num_layers} layers, or "
            "`hybrid_override_pattern` must have a letter for each layer"
        )
    return (i for i, block in enumerate(blocks) if block == "E")


def _if_enabled(config: Mapping[str, Any], num_layers: int) -> Iterable[int]:
    """Gemma 4: every layer, or none."""
    return range(num_layers if config.get("enable_moe_block") is True else 0)


def _enumerated(config: Mapping[str, Any], num_layers: int) -> Iterable[int]:
    """Step: a text with the numbers of the layers. Example: "3,4,5"."""
    given = config.get("moe_layers_enum")
    if not isinstance(given, str) or not re.fullmatch(r"[0-9]{1,4}(, ?[0-9]{1,4})*", given):
        raise EngineError(f'`moe_layers_enum` must be like "3,4,5"; got {quoted(given)}')
    return map(int, given.split(","))


_Rule = Callable[[Mapping[str, Any], int], Iterable[int]]
_RULES_OF_TYPES: list[tuple[_Rule, str]] = [
    (
        _every,
        """flex_olmo gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared
        hunyuan_v1_moe inkling2_text aria_text kolibri1 minimax minimax_m1 minimax_m2 mixtral olmoe
        phimoe qwen3_5_moe_text qwen4_exp_text solar_open""",
    ),
    (
        _by_step,
        """qwen2_moe qwen3_moe qwen3_next qwen3_omni_moe_text qwen3_vl_moe_text""",
    ),
    (partial(_by_step, dense=(0, 1)), "flint"),
    (
        _after_first_dense,
        """axk1 axk2 bailing_moe bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 dots1
        exaone_moe glm4_moe glm4_moe_lite glm4v_moe_text glm_moe_dsa kimi_k2 kimi_linear""",
    ),
    (partial(_after_first_dense, least=0), "mistral4"),
    (_by_flags, "mimo_v2_flash"),
    (_after_num_dense, "afmoe lfm2_moe"),
    (_interleaved, "llama4_text"),
    (_between, "ernie4_5_moe"),
    (_periodic, "jamba"),
    (_by_blocks, "nemotron_h"),
    (_if_enabled, "gemma4_text"),
    (_enumerated, "step3p5"),
]
_RULES = {name: rule for rule, names in _RULES_OF_TYPES for name in names.split()}
