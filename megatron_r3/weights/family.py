"""What a model family says of itself, and what the families share.

A family (families/) maps whole Megatron tensors to whole transformers tensors, and Megatron's
config to config.json. How a model is split over ranks is not its concern.
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
# Megatron pads these to a multiple of some number of rows; transformers does not.
VOCABULARY = (EMBEDDING, HEAD)


@dataclass(frozen=True)
class ModelSettings:
    """What a GPTModel is built with beside its TransformerConfig.

    Attributes:
        vocab_size: without padding. None where the caller does not know it.
        tied: whether the head shares the weights of the embedding.
        position_embedding_type: "rope", "yarn", ...
        rotary_base: theta of RoPE.
        rotary_percent: the part of a head that RoPE turns.
        rotary_scaling: whether RoPE's frequencies are scaled as Llama 3.1 scales them.
        interpolation: by how much RoPE's positions are divided; None means by nothing.
        max_positions: the longest sequence of which Megatron was told.
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
    """The settings of one chunk of a GPTModel, in its wrappers or without.

    Args:
        vocab_size: without padding, which a model does not know. None: unknown.
    """
    chunk: Any = unwrapped(model)
    return ModelSettings(
        vocab_size,
        chunk.share_embeddings_and_output_weights,
        chunk.position_embedding_type,
        float(chunk.rotary_base),
        float(chunk.rotary_percent),
        bool(chunk.rotary_scaling),
        _interpolation(chunk),
        chunk.max_position_embeddings,
    )


def _interpolation(chunk: Any) -> float | None:
    """By how much RoPE's positions are divided. Only the embedding of positions keeps it."""
    rotary = getattr(chunk, "rotary_pos_emb", None)  # MLA and models without RoPE have none here
    factor = getattr(rotary, "seq_len_interpolation_factor", None)
    return None if factor == 1 else factor


@dataclass(frozen=True)
class Mapped:
    """Whole Megatron tensors, and the whole transformers tensors that hold the same values.

    Example: `linear_qkv` is one place and three names. A family whose experts are one tensor in
    transformers has a place for each expert, and one name.

    Attributes:
        places: all of one layer, or all outside of the layers.
        names: of the transformers tensors.
        to_hf: from the tensors of `places` to those of `names`. Both may share memory.
        to_megatron: the inverse.
        dtype: what the directory holds; None means that the caller chooses. A family gives it where
            transformers keeps a tensor in float32.
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
        """Of config.json."""

    def check(self, config: Any, settings: ModelSettings) -> None:
        """Refuse a Megatron model that is not of this family.

        Args:
            config: Megatron's TransformerConfig.

        Raises:
            ValueError: it says what the model lacks.
        """

    def hf_config(self, config: Any, settings: ModelSettings) -> dict[str, Any]:
        """transformers' config.json of a Megatron model that `check` accepts."""

    def tensors(self, config: Any) -> list[Mapped]:
        """All tensors of the model, in any order."""

    def is_left_out(self, name: str, config: Any) -> bool:
        """Whether reading passes over a transformers tensor: that of a layer for prediction (MTP).

        transformers itself passes over it too. All other tensors must have a place in Megatron.
        """

    def compare(self, hf_config: Mapping[str, Any], config: Any, settings: ModelSettings) -> None:
        """Refuse a config.json that describes another model than a Megatron model is.

        Raises:
            ValueError: it names the first field that differs, or what `arguments` names.
        """


def check_described(
    family: Family, theirs: Mapping[str, Any], config: Any, settings: ModelSettings, file: Path
) -> None:
    """Refuse a config.json that describes another model than Megatron's arguments make.

    Tensors show most of a model by their names and shapes. What they do not show (how many experts
    a token takes, the base of RoPE, an epsilon) would make another model of the same weights.

    Args:
        theirs: what `file` has.
        config: Megatron's TransformerConfig.
        file: what messages name.

    Raises:
        ValueError: it names the first field that differs, and both values.
    """
    try:
        family.compare(theirs, config, settings)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def follows_last_layer(name: str, config: Any) -> bool:
    """Whether a transformers tensor is of a layer behind the last one; MTP's layers are there."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= config.num_layers
