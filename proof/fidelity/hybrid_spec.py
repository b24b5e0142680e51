"""Hybrid models of attention (*), MLP (-) and MoE (E) layers from Megatron's local modules.

    pretrain_hybrid.py ... --hybrid-layer-pattern "*E*E" --spec proof.fidelity.hybrid_spec spec

Upstream's hybrid_layer_specs.py needs Transformer Engine and mamba-ssm. As in that file, attention
and MLP are layers of their own; here their submodules come from the local GPT spec. MTP is not in
the spec. Importing this module changes Megatron: see `_use_torch_norm`.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid import hybrid_block
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import (
    ModuleSpec,
    TransformerLayer,
    TransformerLayerSubmodules,
    attention,
)
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import MoETransformerLayer

from megatron_r3.cpu.errors import NotEmulated


def _use_torch_norm() -> None:
    """Replace TENorm, which upstream hard-codes in two places outside of the spec.

    hybrid_block.py makes the final norm of the stack with TENorm, and attention.py the norms of
    queries and keys if --qk-layernorm is given and the spec leaves them to the config.
    """
    hybrid_block.TENorm = WrappedTorchNorm
    attention.TENorm = WrappedTorchNorm


class _NotHere(torch.nn.Module):
    """Stands for a kind of layer that this spec does not have, and refuses to be built."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotEmulated("hybrid_spec has attention (*), MLP (-) and MoE (E) layers only")


def _layer(kind: type, *names: str, num_experts: int | None = None) -> ModuleSpec:
    """The spec of a layer that has some submodules of the local GPT layer.

    Args:
        kind: the module class of the layer.
        names: the names of these submodules.
        num_experts: None for a dense MLP; any number for a MoE layer, since the real number comes
            from the config.
    """
    # "RMSNorm" chooses WrappedTorchNorm even if apex is installed; the config says which norm
    whole = get_gpt_layer_local_submodules(num_experts=num_experts, normalization="RMSNorm")
    parts = TransformerLayerSubmodules(**{name: getattr(whole, name) for name in names})
    if "self_attention" in names:
        # None, as in upstream's hybrid spec. The local spec's IdentityOp would silently turn
        # --qk-layernorm off.
        inside = parts.self_attention.submodules
        inside.q_layernorm = inside.k_layernorm = None
    return ModuleSpec(module=kind, submodules=parts)


_use_torch_norm()
_not_here = ModuleSpec(module=_NotHere)
_mlp = ("pre_mlp_layernorm", "mlp", "mlp_bda")

spec = ModuleSpec(
    module=hybrid_block.HybridStack,
    submodules=hybrid_block.HybridStackSubmodules(
        mamba_layer=_not_here,
        gdn_layer=_not_here,
        dsa_layer=_not_here,
        mla_layer=_not_here,
        attention_layer=_layer(
            TransformerLayer, "input_layernorm", "self_attention", "self_attn_bda"
        ),
        mlp_layer=_layer(MLPLayer, *_mlp),
        moe_layer=_layer(MoETransformerLayer, *_mlp, num_experts=1),
    ),
)
