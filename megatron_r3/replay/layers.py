"""Which MoE layers a model has, and which of them this rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer
    from megatron.core.transformer.moe.router import TopKRouter


def hybrid_pattern(config: Any) -> str:
    """The layer pattern of a hybrid model in Megatron's notation; empty for any other model.

    0.17 renamed the option, so both names are looked up.
    """
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")
    return next((pattern for name in names if (pattern := getattr(config, name, None))), "")


def moe_layer_indices(config: Any) -> tuple[int, ...]:
    """The 0-based indices of the MoE layers among the decoder layers.

    Megatron's rule (megatron/core/models/gpt/gpt_layer_specs.py): an integer frequency f makes
    layer i MoE where i % f == 0; a list has an entry for each layer. In the pattern of a hybrid
    model `E` is a MoE layer, `|` separates pipeline stages, and MTP follows the first `/`
    (models/hybrid/hybrid_layer_allocation.py).

    Args:
        config: the parsed arguments; or a TransformerConfig, but not that of a hybrid model,
            because a TransformerConfig lacks the pattern.
    """
    pattern = hybrid_pattern(config)
    if pattern:
        layers = pattern.split("/")[0].replace("|", "")
        return tuple(i for i, kind in enumerate(layers) if kind == "E")
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return tuple(i for i in range(config.num_layers) if i % frequency == 0)
    return tuple(i for i, moe in enumerate(frequency) if moe)


def local_routers(model: torch.nn.Module) -> dict[int, TopKRouter]:
    """This model chunk's decoder routers by Megatron's layer number in the whole model, from 1."""
    from megatron.core.transformer.moe.router import TopKRouter

    return _by_number(model, TopKRouter)


def local_moe_layers(model: torch.nn.Module) -> dict[int, BaseMoELayer]:
    """This model chunk's decoder MoE layers by Megatron's layer number."""
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    return _by_number(model, BaseMoELayer)


def layers_with_gradients(model: torch.nn.Module) -> frozenset[int]:
    """Which MoE layers of a model chunk route with gradients on in a step's forward pass.

    The router of a recomputed layer has gradients on only in the recompute. Megatron recomputes
    (megatron/core/transformer/transformer_block.py and moe/moe_layer.py) all layers ("uniform"),
    the first layers of each chunk ("block"), or what `recompute_modules` names.
    """
    chunk: Any = unwrapped(model)
    config = chunk.config
    numbers = frozenset(local_routers(model))
    if config.recompute_granularity == "selective":
        return frozenset() if "moe" in config.recompute_modules else numbers
    if config.recompute_granularity != "full":
        return numbers
    if config.recompute_method == "uniform":
        return frozenset()
    first = chunk.decoder.layers[: config.recompute_num_layers]
    return numbers - {layer.layer_number for layer in first}


def _by_number(model: torch.nn.Module, kind: Any) -> dict[int, Any]:
    """The modules of a kind by layer number, without the modules inside MTP layers.

    An MTP layer is recognised by its class, because before 0.17 the router of an MTP layer has no
    number.
    """
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    modules: list[Any] = [*model.modules()]
    mtp_layers = [module for module in modules if isinstance(module, MultiTokenPredictionLayer)]
    in_mtp = {module for layer in mtp_layers for module in layer.modules()}
    found = [module for module in modules if isinstance(module, kind) and module not in in_mtp]
    return {module.layer_number: module for module in found}


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model chunk without its wrappers (DDP, Float16Module), if it has any."""
    from megatron.core.utils import unwrap_model

    return unwrap_model(model)
