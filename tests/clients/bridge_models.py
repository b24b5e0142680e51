"""Models that mbridge and megatron-bridge build, for a tiny Qwen3-MoE config of transformers.

The libraries are unchanged, and each model comes from the call that its library has for that. Their
layers would be Transformer Engine's, which the CPU has not; the layers here are Megatron's own.
`tests/functional/replay_layouts.py` makes the plain model of the same shape.
"""

from __future__ import annotations

from typing import Any

import torch
from replay_layouts import LAYOUTS, RECOMPUTE

from megatron_r3.cpu import CPU_CONFIG
from proof.fidelity.tiny import EXPERTS, LAYERS, SEQUENCE, SHAPE, TOPK, VOCABULARY, fill

# what this rig is, and not what a library decides: no CUDA kernels, and 32 bits
RIG = {
    **CPU_CONFIG,
    "moe_permute_fusion": False,
    "moe_grouped_gemm": False,
    "cross_entropy_loss_fusion": False,
    "pipeline_dtype": torch.float32,
    "params_dtype": torch.float32,
    "bf16": False,
}
# what a library decides and the plain model must then have too
DECIDES: dict[str, dict[str, Any]] = {
    "mbridge": {},
    "megatron-bridge": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-3},
}


def qwen3_moe() -> Any:
    """The config of a Hugging Face model with the shape of the plain model."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQUENCE,
        num_hidden_layers=LAYERS,
        hidden_size=SHAPE["hidden_size"],
        intermediate_size=SHAPE["ffn_hidden_size"],
        num_attention_heads=SHAPE["num_attention_heads"],
        num_key_value_heads=SHAPE["num_query_groups"],
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        moe_intermediate_size=SHAPE["moe_ffn_hidden_size"],
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        norm_topk_prob=True,
    )


def build(
    library: str,
    layout: str,
    recompute: str,
    wrapped: bool = False,
    adapters: tuple[str, ...] = (),
    **options: Any,
) -> list[Any]:
    """This rank's model chunks, with the weights of the plain model; process groups exist.

    Args:
        library: a key of DECIDES.
        layout: a key of `replay_layouts.LAYOUTS`.
        recompute: a key of `replay_layouts.RECOMPUTE`.
        wrapped: in bfloat16, inside of Float16Module and DistributedDataParallel.
        adapters: the layers that get LoRA adapters of megatron-bridge; all else is frozen.
        options: given to the library as its users give options.
    """
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import ModelType as SameName

    # get_model of mbridge and of megatron-bridge 0.3.1 compares with this member, which Megatron
    # 0.19 no longer has; no model here is of that type.
    for enum in (ModelType, SameName):
        if not hasattr(enum, "encoder_and_decoder"):
            enum.encoder_and_decoder = object()
    options = {**RIG, **RECOMPUTE[recompute], **options}
    if wrapped:
        half = torch.bfloat16
        options |= {"bf16": True, "params_dtype": half, "pipeline_dtype": half}
    if "VPP" in layout:  # as `make_chunks` gives them; and gloo cannot exchange shapes there
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        options["variable_seq_lengths"] = False
    if library == "mbridge":  # it takes the sizes from Megatron's process groups
        chunks = _of_mbridge(options, wrapped)
    else:
        sizes = {**LAYOUTS[layout][1], "sequence_parallel": "SP" in layout}
        chunks = _of_megatron_bridge({**sizes, **options}, wrapped, adapters)
    for chunk in chunks:
        fill(chunk)
    return chunks


def local_layers(config: Any, vp_stage: int | None = None, **others: Any) -> Any:
    """Megatron's own layers, in the place of Transformer Engine's."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)


def _of_mbridge(options: dict[str, Any], wrapped: bool) -> list[Any]:
    from mbridge import AutoBridge
    from mbridge.core import llm_bridge

    # LLMBridge._get_transformer_layer_spec asks for Transformer Engine's layers in any case. It
    # reads the arguments of this function, so that their names count.
    llm_bridge.get_gpt_decoder_block_spec = local_layers
    hf_config = qwen3_moe()
    # transformers 5 has this number in rope_parameters; mbridge reads the name of transformers 4
    hf_config.rope_theta = hf_config.rope_parameters["rope_theta"]
    bridge = AutoBridge.from_config(hf_config, dtype=options["params_dtype"])
    bridge.set_extra_args(**options)
    return list(
        bridge.get_model(
            bf16=wrapped,
            wrap_with_ddp=wrapped,
            ddp_config={"use_distributed_optimizer": False},
            use_cpu_initialization=True,
        )
    )


def _of_megatron_bridge(
    options: dict[str, Any], wrapped: bool, adapters: tuple[str, ...]
) -> list[Any]:
    from megatron.bridge import AutoBridge
    from megatron.core.distributed import DistributedDataParallelConfig

    provider = AutoBridge.from_hf_config(qwen3_moe()).to_megatron_provider(load_weights=False)
    provider.transformer_layer_spec = local_layers
    for name, value in options.items():
        setattr(provider, name, value)
    provider.finalize()
    if adapters:
        from megatron.bridge.peft import utils
        from megatron.bridge.peft.lora import LoRA

        utils.HAVE_TE = False  # it looks for names that Megatron has as None without it
        lora = LoRA(target_modules=list(adapters), dim=4, alpha=8)
        provider.register_pre_wrap_hook(lambda models: lora(models, training=True))
    return list(
        provider.provide_distributed_model(
            wrap_with_ddp=wrapped,
            ddp_config=DistributedDataParallelConfig(),
            use_cpu_initialization=True,
        )
    )
