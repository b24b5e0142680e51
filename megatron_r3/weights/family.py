"""The interface of a model family, and what all families share.

A family (families/) maps whole Megatron tensors to whole transformers tensors, and Megatron's
config to config.json. A family does not know how a model is split over ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_r3.replay.layers import unwrapped
from megatron_r3.weights.pieces import Place

Change = Callable[[list[Tensor]], list[Tensor]]

EMBEDDING = Place("embedding.word_embeddings.weight")
FINAL_NORM = Place("decoder.final_layernorm.weight")
HEAD = Place("output_layer.weight")
# Megatron pads the rows of these tensors to a multiple of some number; transformers pads no rows.
VOCABULARY = (EMBEDDING, HEAD)


@dataclass(frozen=True)
class ModelSettings:
    """What a GPTModel is built with beside its TransformerConfig.

    Attributes:
        vocab_size: without padding; None if it is not known.
        tied: whether the head shares the weights of the embedding.
        position_embedding_type: "rope", "yarn", ...
        rotary_base: theta of RoPE.
        rotary_percent: the part of a head that RoPE rotates, 1.0 for all of it.
        rotary_scaling: whether RoPE's frequencies are scaled as Llama 3.1 scales them.
        interpolation: the number by which RoPE's positions are divided; None if they are not.
        max_positions: Megatron's --max-position-embeddings.
    """

    vocab_size: int | None
    tied: bool
    position_embedding_type: str
    rotary_base: float
    rotary_percent: float
    rotary_scaling: bool
    interpolation: float | None
    max_positions: int


def settings_of(model: torch.nn.Module, vocab_size: int | None) -> ModelSettings:
    """The settings of one chunk of a GPTModel, in Megatron's wrappers or without.

    Args:
        vocab_size: without padding, a number that the model does not store; None if it is not
            known.
    """
    chunk: Any = unwrapped(model)
    # Only the module of position embeddings stores this; with MLA or without RoPE there is none.
    rotary = getattr(chunk, "rotary_pos_emb", None)
    interpolation = getattr(rotary, "seq_len_interpolation_factor", None)
    return ModelSettings(
        vocab_size,
        chunk.share_embeddings_and_output_weights,
        chunk.position_embedding_type,
        float(chunk.rotary_base),
        float(chunk.rotary_percent),
        bool(chunk.rotary_scaling),
        None if interpolation == 1 else interpolation,
        chunk.max_position_embeddings,
    )


@dataclass(frozen=True)
class Mapped:
    """Whole Megatron tensors, and the whole transformers tensors that hold the same values.

    Example: `linear_qkv` is one place and three names. If transformers has all experts of a layer
    in one tensor, there is a place for each expert, and one name.

    Attributes:
        places: the Megatron tensors, all of one layer or all outside of the layers.
        names: the names of the transformers tensors.
        to_hf: makes the tensors of `names` from the tensors of `places`; the results may share
            memory with the arguments.
        to_megatron: the inverse of `to_hf`.
        dtype: float32 for tensors that transformers always stores in float32; None for others, of
            which the caller chooses the dtype.
    """

    places: tuple[Place, ...]
    names: tuple[str, ...]
    to_hf: Change
    to_megatron: Change
    dtype: torch.dtype | None = None


class Family(Protocol):
    """A model family of transformers, as far as weights and config are concerned."""

    @property
    def model_type(self) -> str:
        """The `model_type` in config.json."""

    def check(self, config: Any, settings: ModelSettings) -> None:
        """Refuse a Megatron model that is not of this family.

        Args:
            config: Megatron's TransformerConfig.

        Raises:
            ValueError: the message says what the model lacks.
        """

    def hf_config(self, config: Any, settings: ModelSettings) -> dict[str, Any]:
        """transformers' config.json of a Megatron model that `check` accepts."""

    def tensors(self, config: Any) -> list[Mapped]:
        """All tensors of the model, in any order."""

    def is_left_out(self, name: str, config: Any) -> bool:
        """Whether reading skips the transformers tensor `name`, because it is of an MTP layer.

        MTP layers predict further tokens; transformers skips their tensors too. Any other tensor
        must have a place in Megatron.
        """

    def compare(self, hf_config: Mapping[str, Any], config: Any, settings: ModelSettings) -> None:
        """Refuse a config.json that does not describe the Megatron model.

        Raises:
            ValueError: the message names the first field that differs, or that cannot be moved.
        """


def check_described(
    family: Family, theirs: Mapping[str, Any], config: Any, settings: ModelSettings, file: Path
) -> None:
    """Refuse a config.json that does not describe the model of Megatron's arguments.

    Names and shapes of tensors do not show all of a model. The same weights are another model if
    for example the number of experts of a token, the base of RoPE or an epsilon differs.

    Args:
        theirs: the content of `file`.
        config: Megatron's TransformerConfig.
        file: the config.json, named in messages.

    Raises:
        ValueError: the message names `file`, and the first field that differs or cannot be moved.
    """
    try:
        family.compare(theirs, config, settings)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def follows_last_layer(name: str, config: Any) -> bool:
    """Whether a transformers tensor is of a layer after Megatron's last one, as MTP layers are."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= config.num_layers
