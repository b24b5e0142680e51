"""Load a checkpoint that was made with Megatron's local layers into Transformer Engine's.

In the keys of a distributed checkpoint the two kinds of layers differ in one name. In a local layer
the norm before the MLP has the key that this norm has in Transformer Engine's *dense* layer, where
it is part of the first linear layer. A MoE layer has no such linear layer, so there
Transformer Engine's norm stays a module of its own (megatron/core/models/gpt/gpt_layer_specs.py,
`sharded_state_dict_keys_map` of both specs):

    local layers, also of a MoE layer   decoder.layers.mlp.linear_fc1.layer_norm_weight
    Transformer Engine, MoE layer       decoder.layers.pre_mlp_layernorm.weight

Experts have the same keys in SequentialMLP and in TEGroupedMLP. Megatron is imported only inside of
functions.
"""

from __future__ import annotations

from typing import Any

NORM, NORM_OF_LOCAL = ".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"


def load_local_checkpoints() -> None:
    """Have Megatron's `load_checkpoint` ask for the names that the checkpoint has.

    A checkpoint that has the names of the model is loaded as without this function. If the
    checkpoint has a tensor under neither name, Megatron's loader raises an error.
    """
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
    from megatron.training import checkpointing

    dist = checkpointing.dist_checkpointing
    load = dist.load

    def renamed_load(state: Any, directory: Any, *rest: Any, **more: Any) -> Any:
        saved = load_sharded_metadata(str(directory))
        state["model"] = asked(state["model"], {item.key for item in saved.values()})
        return load(state, directory, *rest, **more)

    dist.load = renamed_load


def asked(state: dict[str, Any], saved: set[str]) -> dict[str, Any]:
    """The state dict with the names that the checkpoint has.

    Args:
        state: the model's sharded state dict, by parameter. An item's `key` is changed to the name
            in local layers, if `saved` has only that name.
        saved: the keys of the checkpoint.

    Returns:
        The state. If the checkpoint lacks an `_extra_state`, the state has none: these items hold
        the scales of fp8, and Megatron also loads a checkpoint without scales.
    """
    for item in state.values():
        other = item.key.replace(NORM, NORM_OF_LOCAL)
        if item.key not in saved and other in saved:
            item.key = other
    scales = {n for n in state if n.rpartition(".")[2].startswith("_extra_state")}
    if all(state[name].key in saved for name in scales):
        return state
    return {name: item for name, item in state.items() if name not in scales}
