"""A model family that its entry in `table.py` defines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_r3.replay.layers import moe_layer_indices
from megatron_r3.replay.words import quoted
from megatron_r3.weights.families.field_rows import Fields, Needed, Row, shown
from megatron_r3.weights.families.odd_rows import MOE_LAYERS
from megatron_r3.weights.families.tensors import Tensors, mapped, table
from megatron_r3.weights.family import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    Mapped,
    ModelSettings,
    follows_last_layer,
)
from megatron_r3.weights.known import (
    BALANCING,
    CONFIG_CHANGES_NOTHING,
    ROPE,
    defaults,
    rope_of,
    routes_itself,
)
from megatron_r3.weights.quantized import format_of

# The values of these fields of TransformerConfig in every family, whatever the class's defaults
# are; a family's `config` or rows may say otherwise.
PLAIN: Fields = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "multi_latent_attention": False,
}
# The values of these fields of ModelSettings in every family; a family's `settings` or rows may say
# otherwise.
_PLAIN_SETTINGS: Fields = {
    "tied": False,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_scaling": False,
    "interpolation": None,
}
# Fields of TransformerConfig that may have any value in every family, because the shapes of tensors
# or the row MOE_LAYERS show the value
SHOWN = ("num_query_groups", "kv_channels", "ffn_hidden_size", "moe_layer_freq")
# how a message names an option that must be off, if "no NAME" would be unclear
_OFF = {"tied": "untied embeddings", "interpolation": "no rotary_seq_len_interpolation_factor"}
# fields of config.json that are read for every family
_READ = ("model_type", "quantization_config", "rope_parameters", "rope_scaling", "rope_theta")
_OUTSIDE = table(f"""
{EMBEDDING}    model.embed_tokens.weight    same
{FINAL_NORM}   model.norm.weight            same
{HEAD}         lm_head.weight               same
""")


class OtherFamilyError(ValueError):
    """A Megatron model does not belong to a family.

    Args:
        lacks: what the family needs and the model does not have.
    """

    def __init__(self, model_type: str, lacks: Sequence[str]) -> None:
        super().__init__(f"not a {model_type} model, which needs {', '.join(lacks)}")
        self.lacks = lacks


@dataclass(frozen=True)
class TableFamily:
    """The family (`megatron_r3.weights.family.Family`) of one entry in the table.

    Attributes:
        model_type, architecture: the two values in config.json.
        rows: the fields of config.json. Of two rows with the same name the later one counts.
        flags: Megatron's arguments of every such model; `{name}` is what the row `name` has read.
        config: fields of TransformerConfig that differ from PLAIN and from Megatron's defaults.
        settings: fields of ModelSettings that differ from _PLAIN_SETTINGS.
        layer: the tensors of every layer, without those of its MLP.
        sparse, dense: the tensors of an MLP with experts, and of an MLP without experts.
        predicts: whether layers for prediction (MTP) may follow the last layer.
        by_name: whether another family has the same Megatron models, so that only config.json shows
            that a model is of this family.
    """

    model_type: str
    architecture: str
    rows: Sequence[Row]
    flags: str
    layer: Sequence[Tensors]
    sparse: Sequence[Tensors]
    dense: Sequence[Tensors] = ()
    config: Fields = field(default_factory=dict)
    settings: Fields = field(default_factory=dict)
    predicts: bool = False
    by_name: bool = False

    def __post_init__(self) -> None:
        """Keep the last row of each name."""
        last = {row.name: number for number, row in enumerate(self.rows)}
        rows = tuple(self.rows[number] for number in sorted(last.values()))
        object.__setattr__(self, "rows", rows)

    def attributes(self) -> set[str]:
        """The fields of TransformerConfig or ModelSettings that the rows read."""
        return {name for row in self.rows for name in row.attributes}

    def known_fields(self) -> set[str]:
        """The fields that a config.json may have outside of rope_parameters."""
        rows = {name for row in self.rows for name in row.names or (row.name,)}
        return {*rows, *CONFIG_CHANGES_NOTHING} - {*ROPE} | {*_READ, "partial_rotary_factor"}

    def tensors(self, config: Any) -> list[Mapped]:
        """See `Family`."""
        found = [*mapped(_OUTSIDE, config)]
        moe = moe_layer_indices(config)
        for layer in range(config.num_layers):
            rows = (*self.layer, *(self.sparse if layer in moe else self.dense))
            found += mapped(rows, config, layer)
        return found

    def is_left_out(self, name: str, config: Any) -> bool:
        """See `Family`."""
        return self.predicts and follows_last_layer(name, config)

    def check(self, config: Any, settings: ModelSettings) -> None:
        """See `Family`.

        Raises:
            OtherFamilyError: the model lacks something; the error names everything that it lacks.
        """
        wanted = {**defaults(type(config)), **PLAIN, **self.config}
        del wanted[BALANCING]
        needed: Needed = [
            (config.num_moe_experts is not None, "num_moe_experts"),
            (not routes_itself(getattr(config, BALANCING, "none")), f"{BALANCING}=none"),
        ]
        any_value = {*SHOWN, *self.attributes()}
        for values, place in ((wanted, config), ({**_PLAIN_SETTINGS, **self.settings}, settings)):
            for name, want in values.items():
                have = getattr(place, name, None)  # None if this release has no such field
                holds = name in any_value or have == want or (have is None and not want)
                value = getattr(want, "__name__", want)
                needed.append((holds, f"{name}={value}" if want else _OFF.get(name, f"no {name}")))
        needed += [each for row in self.rows for each in row.needs(config)]
        if lacks := [name for holds, name in needed if not holds]:
            raise OtherFamilyError(self.model_type, lacks)

    def hf_config(self, config: Any, settings: ModelSettings) -> dict[str, Any]:
        """See `Family`."""
        fields: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        for row in self.rows:
            fields |= row.write(config, settings, fields)
        rope = {name: fields.pop(name) for name in ROPE if name in fields}
        return {**fields, "rope_parameters": rope}

    def arguments(self, hf_config: Fields) -> list[str]:
        """Megatron's arguments for the model that a config.json describes.

        Raises:
            ValueError: a field is missing, or has a value that Megatron does not support.
        """
        fields = self.described(hf_config)
        found = [word for row in self.rows for word in row.arguments(fields[row.name], fields)]
        return [*found, *self.flags.format_map({n: shown(v) for n, v in fields.items()}).split()]

    def described(self, hf_config: Fields) -> dict[str, Any]:
        """What the rows read of a config.json, by the names of the rows.

        Two config.json describe the same model if all of these values are equal, apart from
        `max_position_embeddings`.

        Raises:
            ValueError: a field is missing, or has a value that Megatron does not support.
        """
        if (named := hf_config.get("model_type")) != self.model_type:
            raise ValueError(f"model_type is {quoted(named)}; expected {self.model_type}")
        if hf_config.get("quantization_config") and not format_of(hf_config):
            raise ValueError(
                "it has quantization_config; only weights in 16 or 32 bits, in fp8 with "
                "weight_block_size, or of gpt_oss in mxfp4, can be moved: take such a directory of "
                "the model"
            )
        rope = rope_of(hf_config)
        self._refuse_unknown(hf_config, rope)
        theirs = {"rope_type": "default", **hf_config, **rope}
        fields: dict[str, Any] = {}
        for row in self.rows:
            fields[row.name] = row.read(theirs, fields)
        return fields

    def compare(self, hf_config: Fields, config: Any, settings: ModelSettings) -> None:
        """See `Family`."""
        theirs = self.described(hf_config)
        made = self.hf_config(config, settings)
        if settings.vocab_size is None:
            made["vocab_size"] = theirs["vocab_size"]
        ours = self.described(made)
        skipped = {"max_position_embeddings"}  # does nothing with RoPE
        if self.dense and len(theirs[MOE_LAYERS]) == theirs["num_hidden_layers"]:
            skipped.add("intermediate_size")  # no layer has an MLP of this size
        for name in theirs:
            if name not in skipped and theirs[name] != ours[name]:
                raise ValueError(
                    f"{name} is {quoted(theirs[name])}; Megatron's arguments say "
                    f"{quoted(ours[name])}: give this model's arguments"
                )

    def _refuse_unknown(self, hf_config: Fields, rope: Mapping[str, Any]) -> None:
        """Refuse a config.json with a field that this project does not know.

        Raises:
            ValueError: naming the field.
        """
        for fields, known in ((hf_config, self.known_fields()), (rope, {*ROPE})):
            for name, value in fields.items():
                if value is not None and name not in known:
                    raise ValueError(
                        f"{name} is {quoted(value)}, and this project does not know what {name} "
                        f"does in a {self.model_type} model: remove it from the file if it does "
                        "nothing"
                    )
