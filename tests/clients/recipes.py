"""Published H100 recipes of Megatron-Bridge, scaled down to what a CPU can train.

A recipe's function runs as it is, but for the model that it names, which is tiny here. Then
`scaled` takes away what CPU tensors do not have. Megatron is imported only inside the functions.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import torch
from bridge_models import local_layers, qwen3_moe

from keepers.bridge_recipes import StandIns
from megatron_r3.cpu import CPU_CONFIG
from proof.fidelity.tiny import EXPERTS, LAYERS, SEQUENCE, TOPK, VOCABULARY, fill, start

# what recipes import and no model needs: data sets, and images
_STAND_INS = ("megatron.energon", "megatron.bridge.recipes.flux", "megatron.bridge.recipes.wan")
_STAND_INS += ("megatron.bridge.diffusion", "nvidia_resiliency_ext")

QWEN = "qwen.h100.qwen3_moe.qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config"
QWEN_8 = "qwen.h100.qwen3_moe.qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config"
DEEPSEEK = "deepseek.h100.deepseek_v3.deepseek_v3_pretrain_1024gpu_h100_bf16_config"

# what CPU tensors do not have: of each option the value here
LEFT_OUT: dict[str, Any] = {
    **CPU_CONFIG,
    "transformer_impl": "local",
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "cross_entropy_loss_fusion": False,
    "cross_entropy_fusion_impl": "native",
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_flex_dispatcher_backend": None,
    "cuda_graph_impl": "none",
    "cuda_graph_scope": [],
    "use_te_rng_tracker": False,
}


class _Only(StandIns):
    """Stand-ins for _STAND_INS alone."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if any(f"{name}.".startswith(f"{absent}.") for absent in _STAND_INS):
            return ModuleSpec(name, self, is_package=True)
        return None


def _tiny(name: str) -> Any:
    """A config of transformers for the model of a recipe."""
    from transformers import DeepseekV3Config

    if "Qwen" in name:
        return qwen3_moe()
    yarn = {"rope_theta": 10000, "rope_type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1}
    yarn |= {"original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
    return DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        vocab_size=VOCABULARY,
        num_hidden_layers=LAYERS,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_attention_heads=4,
        num_experts_per_tok=TOPK,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False,
        num_key_value_heads=4,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=12,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=1,
        rope_parameters=yarn,
    )


def recipe(name: str) -> Any:
    """The config that a recipe makes for a tiny model of its kind."""
    from megatron.bridge import AutoBridge

    sys.meta_path.insert(0, _Only("/nowhere"))
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(major=9, name="NVIDIA H100")
    AutoBridge.from_hf_pretrained = classmethod(
        lambda cls, path, **more: cls.from_hf_config(_tiny(path))
    )
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(f"megatron.bridge.recipes.{module}"), function)()


def scaled(name: str, **sizes: Any) -> tuple[Any, list[Any], Any]:
    """A recipe's config, this rank's model chunks in DDP, and their optimizer.

    Args:
        sizes: options in place of the recipe's: of its process groups, and of its pipeline.
    """
    groups = {key: size for key, size in sizes.items() if key.endswith("parallel_size")}
    start(**groups)
    config = recipe(name)  # from here on the stand-ins are there, which these imports need
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.optimizer import get_megatron_optimizer

    get_mixed_precision_config(config.mixed_precision).setup(
        config.model, config.optimizer, config.ddp
    )
    options = {"moe_router_replay": True, "moe_router_replay_verify_plan": True}
    for key, value in {**LEFT_OUT, **sizes, **options, "seq_length": SEQUENCE}.items():
        setattr(config.model, key, value)
    config.optimizer.use_precision_aware_optimizer = False  # Transformer Engine's Adam
    for kind in ("main_grads", "exp_avg", "exp_avg_sq"):
        setattr(config.optimizer, f"{kind}_dtype", torch.float32)
    config.model.transformer_layer_spec = local_layers
    mtp_spec = gpt_layer_specs.get_gpt_mtp_block_spec
    gpt_layer_specs.get_gpt_mtp_block_spec = lambda model, spec, **more: mtp_spec(
        model, spec, **{**more, "use_transformer_engine": False}
    )
    config.model.finalize()
    chunks = list(
        config.model.provide_distributed_model(
            wrap_with_ddp=True, ddp_config=config.ddp, use_cpu_initialization=True
        )
    )
    for chunk in chunks:
        fill(chunk)
    config.optimizer.finalize()
    optimizer = get_megatron_optimizer(config.optimizer, chunks)
    (chunk,) = chunks
    # as megatron/bridge/training/setup.py does
    chunk.config.no_sync_func, chunk.config.grad_sync_func = chunk.no_sync, chunk.start_grad_sync
    chunk.config.finalize_model_grads_func = finalize_model_grads
    chunk.config.grad_scale_func = optimizer.scale_loss
    return config, chunks, optimizer
