"""A family as tables: fields of config.json, of Megatron's arguments and of its TransformerConfig.

One table serves every direction: from config.json to Megatron's arguments, from a Megatron model
to config.json, and the comparison of the two. A family's own file has what is its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from megatron_r3.data.engines.shape import ModelShape
from megatron_r3.replay.layers import moe_layer_indices
from megatron_r3.replay.words import quoted
from megatron_r3.weights.family import Mapped, ModelSettings, refuse
from megatron_r3.weights.known import (
    BALANCING,
    CONFIG_CHANGES_NOTHING,
    ROPE,
    defaults,
    rope_of,
    routes_itself,
)

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Number:
    """A number that config.json and Megatron both have.

    Attributes:
        name: in config.json.
        flag: Megatron's argument, without its dashes.
        attribute: of Megatron's TransformerConfig, or of ModelSettings.
        default: what transformers takes where config.json lacks the field. None: it must be there.
        also: other names in config.json; releases of transformers differ.
    """

    name: str
    flag: str
    attribute: str
    default: float | None = None
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Switch:
    """A field of config.json that is true or false, and an argument of Megatron without a value.

    Attributes:
        default: what transformers takes where config.json lacks the field.
        reverse: whether the argument says the opposite of the field.
    """

    name: str
    flag: str
    attribute: str
    default: bool
    reverse: bool = False


Rows = tuple[Number | Switch, ...]
Flags = tuple[str, ...]
COMMON: Rows = (
    Number("num_hidden_layers", "num-layers", "num_layers"),
    Number("hidden_size", "hidden-size", "hidden_size"),
    Number("num_attention_heads", "num-attention-heads", "num_attention_heads"),
    Number("num_experts_per_tok", "moe-router-topk", "moe_router_topk"),
    Number("rms_norm_eps", "norm-epsilon", "layernorm_epsilon"),
    Number("rope_theta", "rotary-base", "rotary_base"),
    Number("vocab_size", "vocab-size", "vocab_size"),
    Number("max_position_embeddings", "max-position-embeddings", "max_positions"),
)
GROUPED_QUERIES: Rows = (
    Number("num_key_value_heads", "num-query-groups", "num_query_groups"),
    Number("head_dim", "kv-channels", "kv_channels"),
)
# Megatron's softmax over the chosen experts is transformers' over all of them, divided by the
# sum of the chosen ones
NORMALISED = Switch(
    "norm_topk_prob", "moe-router-pre-softmax", "moe_router_pre_softmax", False, reverse=True
)
EXPERT_SIZE = Number("moe_intermediate_size", "moe-ffn-hidden-size", "moe_ffn_hidden_size")
DENSE_SIZE = Number("intermediate_size", "ffn-hidden-size", "ffn_hidden_size")


def experts_named(name: str) -> Number:
    """The number of experts; config.json has it under one of three names."""
    also = {"num_experts", "num_local_experts", "n_routed_experts"} - {name}
    return Number(name, "num-experts", "num_moe_experts", also=tuple(sorted(also)))


# What all models here are, as arguments: Megatron's defaults are those of GPT-2, with dropout.
BASE_FLAGS: Flags = (
    *("--normalization", "RMSNorm", "--untie-embeddings-and-output-weights"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
)
PLAIN_FLAGS: Flags = (
    *BASE_FLAGS,
    *("--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope"),
)
# ... as fields of config.json: the values that mean it. The first one is written, and is what
# transformers takes where the field is missing.
_FIXED: Fields = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "rope_type": ("default",),
    "partial_rotary_factor": (None, 1.0),
    "layer_types": (None, ["full_attention"]),
}
# ... as fields of TransformerConfig, where it is not the default of Megatron's class
PLAIN: Fields = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "multi_latent_attention": False,
}
# ... and as ModelSettings, of which the rows of a family describe others
_PLAIN_SETTINGS: Fields = {
    "tied": False,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_scaling": False,
    "interpolation": None,
}
# ... of config.json that `described` looks at, whatever the family
_READ: Flags = (
    "model_type",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)
_READ += ("partial_rotary_factor",)
# Fields of TransformerConfig that the shapes of the tensors or MOE_LAYERS show, whatever the family
SHOWN = ("num_query_groups", "kv_channels", "ffn_hidden_size", "moe_layer_freq")
# how messages say that an option is off, where its name is not enough
_OFF = {"tied": "untied embeddings", "interpolation": "no rotary_seq_len_interpolation_factor"}
# what `described` calls the layers that have experts: messages name all fields that may say it
MOE_LAYERS = "mlp_only_layers, decoder_sparse_step, first_k_dense_replace or moe_layer_freq"
ANY = object()  # in a family's table: the family's own code looks at the field


class Described:
    """What the families share; a family gives its tables, and overrides the methods `own_...`."""

    model_type: str
    architecture: ClassVar[str]
    rows: ClassVar[Rows]
    flags: ClassVar[Flags] = PLAIN_FLAGS  # Megatron's arguments of every such model
    fixed: ClassVar[Fields] = {}  # of config.json, as in _FIXED
    reads: ClassVar[Flags] = ()  # other fields of config.json at which the family's code looks
    ignores: ClassVar[Flags] = ()  # ... and those that change nothing of such a model
    plain: ClassVar[Fields] = {}  # of TransformerConfig, as in PLAIN, or ANY
    settings: ClassVar[Fields] = {}  # of ModelSettings, as in _PLAIN_SETTINGS, or ANY

    def own_check(self, config: Any, settings: ModelSettings) -> list[tuple[bool, str]]:
        """What `check` needs beyond the tables: whether it holds, and what it is."""
        return []

    def own_fields(self, config: Any) -> dict[str, Any]:
        """The fields of config.json that no table makes."""
        return {}

    def own_arguments(self, fields: Fields) -> list[str]:
        """Megatron's arguments that no table makes.

        Args:
            fields: config.json as `described` gives it.

        Raises:
            ValueError: naming the field of which Megatron cannot do the value.
        """
        return []

    def own_described(self, theirs: Fields, fields: Fields) -> dict[str, Any]:
        """What `described` adds to the tables' fields, or corrects.

        Args:
            theirs: config.json; the fields of its rope_parameters stand beside the others.
            fields: of the tables.

        Raises:
            ValueError: naming the field of which Megatron cannot do the value.
        """
        return {}

    def tensors(self, config: Any) -> list[Mapped]:
        """All tensors of the model, in any order."""
        raise NotImplementedError

    def is_left_out(self, name: str, config: Any) -> bool:
        """See `Family`; most families have no such layers."""
        return False

    def check(self, config: Any, settings: ModelSettings) -> None:
        """Refuse a Megatron model that is not of this family.

        Raises:
            ValueError: it says what the model lacks.
        """
        wanted = {**defaults(type(config)), **PLAIN, **self.plain}
        wanted |= dict.fromkeys((*SHOWN, *(row.attribute for row in self.rows)), ANY)
        del wanted[BALANCING]
        needed = [
            (config.num_moe_experts is not None, "num_moe_experts"),
            (not routes_itself(getattr(config, BALANCING, "none")), f"{BALANCING}=none"),
        ]
        for table, place in ((wanted, config), ({**_PLAIN_SETTINGS, **self.settings}, settings)):
            for name, want in table.items():
                have = getattr(place, name, None)  # a release that lacks the field has it off
                holds = want is ANY or have == want or (have is None and not want)
                shown = getattr(want, "__name__", want)
                needed.append((holds, f"{name}={shown}" if want else _OFF.get(name, f"no {name}")))
        refuse(self.model_type, [*needed, *self.own_check(config, settings)])

    def hf_config(self, config: Any, settings: ModelSettings) -> dict[str, Any]:
        """transformers' config.json of a Megatron model that `check` accepts."""
        fields: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        for name, values in self._fixed().items():
            if values[0] is not None:
                fields[name] = values[0]
        for row in self.rows:
            place = config if hasattr(config, row.attribute) else settings
            value = getattr(place, row.attribute)
            fields[row.name] = bool(value) != row.reverse if isinstance(row, Switch) else value
        fields |= self.own_fields(config)
        rope = {name: fields.pop(name) for name in ROPE if name in fields}
        return {**fields, "rope_parameters": rope}

    def arguments(self, hf_config: Fields) -> list[str]:
        """Megatron's arguments for the model that a config.json describes.

        Raises:
            ValueError: naming a field that is missing, or whose value Megatron cannot do.
        """
        fields = self.described(hf_config)
        found = []
        for row in self.rows:
            value = fields[row.name]
            if isinstance(row, Switch):
                found += [f"--{row.flag}"] if value != row.reverse else []
            elif value is not None:
                whole = isinstance(value, float) and value.is_integer()
                found += [f"--{row.flag}", str(int(value) if whole else value)]
        if "--num-query-groups" in found:
            found.append("--group-query-attention")
        if fields[MOE_LAYERS] != tuple(range(fields["num_hidden_layers"])):
            found += ["--moe-layer-freq", _pattern(fields)]
        return [*found, *self.flags, *self.own_arguments(fields)]

    def described(self, hf_config: Fields) -> dict[str, Any]:
        """The fields of a config.json that matter, under one name each, and none of them missing.

        Two config.json describe the same model if this is equal, but for `max_position_embeddings`.

        Raises:
            ValueError: naming a field that is missing, or whose value Megatron cannot do.
        """
        if (named := hf_config.get("model_type")) != self.model_type:
            raise ValueError(f"model_type is {quoted(named)}; expected {self.model_type}")
        if hf_config.get("quantization_config"):
            raise ValueError(
                "it has quantization_config; only weights in 16 or 32 bits can be moved: take a "
                "directory of the model without it"
            )
        rope = rope_of(hf_config)
        theirs = {**hf_config, **rope}
        theirs.setdefault("rope_type", "default")
        self._refuse_unknown(hf_config, rope)
        for name, values in self._fixed().items():
            value = theirs.get(name, values[0])
            if name == "layer_types" and isinstance(value, list):
                value = sorted({*map(str, value)})
            if value not in values:
                raise cannot(self.model_type, name, value, f"only {values[-1]!r}")
        if theirs.get("head_dim") is None and isinstance(theirs.get("hidden_size"), int):
            theirs["head_dim"] = theirs["hidden_size"] // (theirs.get("num_attention_heads") or 1)
        fields = {row.name: _value(row, theirs) for row in self.rows}
        fields[MOE_LAYERS] = ModelShape.from_hf_config(hf_config).moe_layers
        return {**fields, **self.own_described(theirs, fields)}

    def compare(self, hf_config: Fields, config: Any, settings: ModelSettings) -> None:
        """Refuse a config.json that describes another model than Megatron's arguments do.

        Raises:
            ValueError: naming the first field that differs.
        """
        theirs = self.described(hf_config)
        made = self.hf_config(config, settings)
        if settings.vocab_size is None:
            made["vocab_size"] = theirs["vocab_size"]
        ours = self.described(made)
        skipped = {"max_position_embeddings"}  # RoPE has no table that ends there
        if DENSE_SIZE in self.rows and len(theirs[MOE_LAYERS]) == theirs["num_hidden_layers"]:
            skipped.add(DENSE_SIZE.name)  # of no layer
        for name in theirs:
            if name not in skipped and theirs[name] != ours[name]:
                raise ValueError(
                    f"{name} is {quoted(theirs[name])}; Megatron's arguments make it "
                    f"{quoted(ours[name])}: other model arguments"
                )

    def known_fields(self) -> set[str]:
        """The fields that a config.json may have beside those of RoPE."""
        rows = {name for row in self.rows for name in (row.name, *getattr(row, "also", ()))}
        known = {*rows, *_FIXED, *self.fixed, *self.reads, *self.ignores, *CONFIG_CHANGES_NOTHING}
        return known - {*ROPE} | {*_READ}

    def _refuse_unknown(self, hf_config: Fields, rope: Fields) -> None:
        """Refuse a field of which nobody has looked at what it changes.

        Raises:
            ValueError: naming the field.
        """
        for fields, known in ((hf_config, self.known_fields()), (rope, {*ROPE})):
            for name, value in fields.items():
                if value is not None and name not in known:
                    raise ValueError(
                        f"{name} is {quoted(value)}, and nobody here has looked at what it does to "
                        f"a {self.model_type} model: take it out if it does nothing"
                    )

    def _fixed(self) -> dict[str, tuple[Any, ...]]:
        return {n: values for n, values in {**_FIXED, **self.fixed}.items() if values is not ANY}


def cannot(model_type: str, name: str, value: object, can: str) -> ValueError:
    """The error for a value of config.json that Megatron cannot do; `can` is what it can do."""
    return ValueError(f"{name} is {quoted(value)}; of a {model_type} model Megatron can do {can}")


def dense_and_moe(config: Any) -> dict[str, Any]:
    """Which layers have experts, as the config.json of a Qwen says it."""
    moe = moe_layer_indices(config)
    without = [layer for layer in range(config.num_layers) if layer not in moe]
    return {"decoder_sparse_step": 1, "mlp_only_layers": without}


def _value(row: Number | Switch, theirs: Fields) -> Any:
    """The value of a field, by any of its names."""
    names = (row.name, *(row.also if isinstance(row, Number) else ()))
    value = next((theirs[name] for name in names if theirs.get(name) is not None), row.default)
    kinds = bool if isinstance(row, Switch) else (int, float)
    if value is None:
        raise ValueError(f"{row.name} is missing")
    if not isinstance(value, kinds) or (isinstance(value, bool) and isinstance(row, Number)):
        expected = "true or false" if isinstance(row, Switch) else "a number"
        raise ValueError(f"{row.name} is {quoted(value)}; expected {expected}")
    if row.name == "rope_theta" and value != int(value):
        raise ValueError(f"rope_theta is {value}; --rotary-base takes whole numbers")
    return value


def _pattern(fields: Fields) -> str:
    """Megatron's --moe-layer-freq: `([0]*3+[1]*58)` for 3 dense layers in front of 58 others."""
    moe = [int(layer in fields[MOE_LAYERS]) for layer in range(fields["num_hidden_layers"])]
    runs = [f"[{kind}]*{len(list(run))}" for kind, run in itertools.groupby(moe)]
    return f"({'+'.join(runs)})"
