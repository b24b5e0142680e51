"""A model family for which mbridge or Megatron-Bridge names and converts the tensors.

A bridge gives transformers' names for a Megatron tensor, and converts the values. Everything else
(what each rank sends, errors on all ranks, files, dtypes) is as for the families of this project.
The libraries' own export and import are not called, because they

- skip a tensor for which they have no name, with a warning (Megatron-Bridge),
- know the names of experts in Transformer Engine's layers only, not in local ones,
- leave the other ranks waiting when one rank fails midway,
- put each tensor on every rank.

A bridge is not trusted: each converted tensor is converted back, and must have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_r3.replay.words import one_line
from megatron_r3.weights.bridge_checks import compare_models
from megatron_r3.weights.directory import Reading
from megatron_r3.weights.families import FAMILIES
from megatron_r3.weights.families.tensors import own_dtype
from megatron_r3.weights.family import VOCABULARY, Mapped, ModelSettings, follows_last_layer
from megatron_r3.weights.pieces import NORMS, Place

T = TypeVar("T")
Shapes = Mapping[str, tuple[int, ...]]


class Translator(Protocol):
    """A bridge's names and conversions for one model. The methods do not communicate.

    Args:
        title: the bridge and its version, for messages.
        hf_config: transformers' config of the model.
        config: Megatron's TransformerConfig.

    Attributes:
        module: the name under which the bridge is imported.
        field: the field of config.json by which the bridge knows a model.
    """

    module: str
    field: str
    title: str

    def __init__(self, title: str, hf_config: Any, config: Any) -> None: ...

    @staticmethod
    def known_models() -> set[str]:
        """The values of `field` in the models that the bridge knows.

        Raises:
            ImportError: the bridge cannot be imported. The import may raise other errors too.
        """

    def built(self) -> Any:
        """The config that the bridge makes of config.json, with TransformerConfig's fields."""

    def names(self, name: str) -> tuple[str, ...] | None:
        """The transformers tensors of Megatron's tensor `name`; None if the bridge knows none."""

    def to_hf(self, name: str, whole: Tensor) -> dict[str, Tensor]:
        """A whole Megatron tensor as transformers' tensors, by name."""

    def to_megatron(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `to_hf`; `parts` are in the order of `names`."""


class BridgeFamily:
    """A family (`megatron_r3.weights.family.Family`) with a bridge's names and conversions.

    If this project has a family of the same model type, that family's checks are made too.

    Args:
        translator: the bridge's names and conversions for this model.
        hf_config: transformers' config of the model.
        places: all tensors of the Megatron model.
        shapes: the shapes of the tensors in a transformers directory of the model, by name; empty
            if that directory has no weights. Written tensors must have these names and shapes.
    """

    def __init__(
        self, translator: Translator, hf_config: Any, places: Sequence[Place], shapes: Shapes
    ) -> None:
        self.model_type: str = hf_config.model_type
        self._translator, self._hf_config = translator, hf_config
        self._places, self._shapes = places, shapes
        self._own = FAMILIES.get(self.model_type)

    def check(self, config: Any, settings: ModelSettings) -> None:
        """See `Family`; without a family of this project nothing is checked here."""
        if self._own is not None:
            self._own.check(config, settings)

    def hf_config(self, config: Any, settings: ModelSettings) -> dict[str, Any]:
        """Raise a ValueError: a bridge writes no config.json, so the caller must copy one."""
        raise ValueError(
            f"{self._translator.title} does not write config.json: name a transformers directory "
            "of the model (--hf-like DIR)"
        )

    def is_left_out(self, name: str, config: Any) -> bool:
        """See `Family`."""
        if self._own is not None:
            return self._own.is_left_out(name, config)
        predicts = getattr(self._hf_config, "num_nextn_predict_layers", 0)
        return bool(predicts) and follows_last_layer(name, config)

    def compare(self, hf_config: Mapping[str, Any], config: Any, settings: ModelSettings) -> None:
        """See `Family`; without a family of this project `compare_models` compares."""
        if self._own is not None:
            self._own.compare(hf_config, config, settings)
            return
        built = self._asked("a config of the model", self._translator.built)
        compare_models(self._hf_config, built, self._translator.title, config, settings)

    def tensors(self, config: Any) -> list[Mapped]:
        """All tensors of the model.

        Raises:
            ValueError: the bridge has no name for a tensor, or one name for two tensors; or the
                bridge's names are not those in the transformers directory.
        """
        mapped = [self._mapped(place) for place in self._places]
        where: dict[str, Place] = {}
        for entry in mapped:
            for name in entry.names:
                if name in where:
                    raise ValueError(
                        f"{self._translator.title} makes {name} of several Megatron tensors "
                        f"({where[name]}, {entry.places[0]}); such a model cannot be moved"
                    )
                where[name] = entry.places[0]
        if self._shapes:
            others = [n for n in self._shapes if not self.is_left_out(n, config)]
            if differing := sorted({*others} ^ where.keys()):
                raise ValueError(
                    f"{self._translator.title} and the transformers directory do not have the "
                    f"same tensors: {len(differing)} are in only one of them, e.g. {differing[:3]}"
                )
        return mapped

    def _mapped(self, place: Place) -> Mapped:
        names_of = {name: self._translator.names(name) for name in spellings(place)}
        found = {name: names for name, names in names_of.items() if names}
        if place.key.startswith("mtp."):
            found = {}
        if len(set(found.values())) != 1:
            raise ValueError(
                f"{self._translator.title} has no name for {place} of a {self.model_type} model, "
                "or more than one: that tensor would be lost"
            )
        name, names = next(iter(found.items()))

        def to_hf(wholes: list[Tensor]) -> list[Tensor]:
            (whole,) = wholes
            parts = self._to_hf(name, names, whole)
            self._check_shapes(place, names, parts)
            back = self._asked(place, lambda: self._translator.to_megatron(name, parts))
            self._refuse_changed(place, [whole], [back])
            return parts

        def to_megatron(parts: list[Tensor]) -> list[Tensor]:
            whole = self._asked(place, lambda: self._translator.to_megatron(name, parts))
            self._refuse_changed(place, parts, self._to_hf(name, names, whole))
            return [whole]

        return Mapped((place,), names, to_hf, to_megatron, own_dtype(place))

    def _to_hf(self, name: str, names: tuple[str, ...], whole: Tensor) -> list[Tensor]:
        parts = self._asked(name, lambda: self._translator.to_hf(name, whole))
        if parts.keys() != {*names}:
            raise ValueError(
                f"{self._translator.title} makes {sorted(parts)} of {name}; expected {[*names]}"
            )
        return [parts[each] for each in names]

    def _check_shapes(self, place: Place, names: Sequence[str], parts: Sequence[Tensor]) -> None:
        rows = slice(1 if place in VOCABULARY else 0, None)  # padding is cut off later
        for name, part in zip(names, parts, strict=True):
            want = self._shapes.get(name)
            if want is not None and want[rows] != tuple(part.shape)[rows]:
                raise ValueError(
                    f"{self._translator.title} makes {name} of shape {tuple(part.shape)} out of "
                    f"{place}; the transformers directory has {want}: give Megatron the arguments "
                    "of the model in that directory"
                )

    def _refuse_changed(
        self, place: Place, before: Sequence[Tensor], after: Sequence[Tensor]
    ) -> None:
        if not all(_same_bits(a, b) for a, b in zip(before, after, strict=True)):
            raise ValueError(
                f"{self._translator.title} changes {place} in a conversion and its inverse: the "
                "bridge rounds, or the arguments are not this model's: give this model's arguments"
            )

    def _asked(self, what: object, question: Callable[[], T]) -> T:
        """The answer of the bridge to `question`; an error names the bridge and `what`."""
        try:
            return question()
        except Exception as error:  # a foreign package can raise anything
            reason = one_line(str(error), 500)
            raise ValueError(
                f"{self._translator.title} fails on {what}: {type(error).__name__}: {reason}"
            ) from error


def spellings(place: Place) -> list[str]:
    """Megatron's names of a tensor: in Transformer Engine's layers, and in the local layers.

    For an expert's tensor there is only the name in Transformer Engine's layers, because bridges
    know no other. A tensor with the same name in both kinds of layers has one name. Example of two:
    `decoder.layers.3.self_attention.linear_qkv.layer_norm_weight` and
    `decoder.layers.3.input_layernorm.weight`.
    """
    if place.layer is None:
        return [place.key]
    prefix, _, name = place.key.partition(".layers.")
    inside = f"{prefix}.layers.{place.layer}."
    if place.expert is not None:
        # experts.experts.linear_fc1.weight of expert 5 is experts.linear_fc1.weight5
        return [f"{inside}{name.replace('.experts.experts.', '.experts.')}{place.expert}"]
    fused = [
        name.replace(norm, linear, 1) for linear, norm in NORMS.items() if name.startswith(norm)
    ]
    return [*(inside + each for each in fused), inside + name]


def shapes_of(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a transformers directory's tensors, by name; none if it has no weights.

    Raises:
        ValueError: a file of weights is missing, or not whole.
    """
    if not next(directory.glob("*.safetensors"), None):
        return {}
    with Reading(directory) as reading:
        return {name: reading.shape(name) for name in reading.names}


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # The bits are compared, because a NaN does not equal itself; `write_policy` refuses NaN later.
    return torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (one, other)))
