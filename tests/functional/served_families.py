"""Random transformers models of each family, of sizes that the kernels of vLLM's CPU backend take.

These kernels want sizes of experts that are multiples of 32, heads of 32 or 64, and for latent
attention keys of 512 and 64 numbers. The weights have such scales that every tensor matters, and
that rounding to bfloat16 is not blown up from layer to layer, as in a trained model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from family_models import call_kimi

_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_QWEN = {"moe_intermediate_size": 64, "num_experts": 16}
_SIGMOID = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
_DEEPSEEK = {
    **_SIGMOID,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_group": 4,
    "topk_group": 2,
}
_ONE_GROUP = {**_DEEPSEEK, "n_group": 1, "topk_group": 1}
_YARN = {"rope_theta": 10000, "rope_type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1}
_YARN |= {"original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
# vLLM's own rotary kernel for a CPU turns DeepSeek's pairs wrongly; torch's operations do not
PLAIN_OPERATIONS = ("--compilation-config", '{"custom_ops":["none"]}')


@dataclass(frozen=True)
class Served:
    """A family's model, and how vLLM serves it.

    Attributes:
        fields: of its config, beside those that all have.
        options: of the server.
    """

    fields: dict[str, Any]
    options: tuple[str, ...] = ()


# the first word of a name is the model type
SERVED = {
    "qwen3_moe": Served({**_QWEN, "head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen2_moe": Served({**_QWEN, "shared_expert_intermediate_size": 128}),
    "mixtral": Served({"intermediate_size": 64, "num_local_experts": 16, "head_dim": 32}),
    "deepseek_v3": Served(_DEEPSEEK, PLAIN_OPERATIONS),
    "deepseek_v3 yarn": Served({**_DEEPSEEK, "rope_parameters": _YARN}, PLAIN_OPERATIONS),
    "deepseek_v2": Served({**_ONE_GROUP, "rope_parameters": _YARN}, PLAIN_OPERATIONS),
    "kimi_k2": Served(
        {**_ONE_GROUP, "rope_parameters": {**_YARN, "factor": 32, "beta_fast": 1}},
        PLAIN_OPERATIONS,
    ),
    "glm4_moe_lite": Served(
        {**_DEEPSEEK, "mlp_layer_types": ["dense"] + ["sparse"] * 3}, PLAIN_OPERATIONS
    ),
    "glm4_moe": Served(
        {
            **_SIGMOID,
            "head_dim": 64,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
            "attention_bias": True,
        }
    ),
    "gpt_oss": Served(
        {"intermediate_size": 64, "num_local_experts": 16, "head_dim": 64, "sliding_window": 16}
    ),
}


def make(name: str, folder: Path) -> None:
    """Write a model of which no weight is trivial, in float32."""
    fields = {**_SIZES, **SERVED[name].fields}
    model_type = name.split()[0].replace("kimi_k2", "deepseek_v3")
    config = transformers.AutoConfig.for_model(model_type, **fields)
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():  # buffers too: the correction bias is one
            tensor.copy_(_weight(key, tensor))
    model.save_pretrained(folder)
    if name == "kimi_k2":
        call_kimi(folder)


def _weight(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Random values with which activations of size 1 give activations of size 1, or somewhat more.

    Experts, biases and sinks weigh more than that, so that a wrong one is seen above the rounding.
    """
    values = torch.randn_like(tensor)
    if "sinks" in key:
        return 2 + 1.5 * values
    if "norm" in key:
        return 1 + 0.4 * values
    if "e_score_correction_bias" in key:
        return 0.3 * values
    if "embed_tokens" in key or tensor.dim() == 1 or key.endswith("_proj_bias"):
        return values
    more = 3 if "down_proj" in key else 1
    return more * tensor.shape[-1] ** -0.5 * values


def kinds_of(model: Any) -> dict[str, list[torch.Tensor]]:
    """The tensors of a model by the end of their name, which they have in every layer."""
    kinds: dict[str, list[torch.Tensor]] = {}
    for key, tensor in model.state_dict().items():
        kinds.setdefault(re.sub(r"^model\.layers\.\d+\.", "", key), []).append(tensor)
    return kinds


@contextmanager
def flipped(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Turn tensors around while the block runs: for example, the first expert becomes the last."""
    kept = [tensor.clone() for tensor in tensors]
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(tensor.flip(*range(tensor.dim())))
        try:
            yield
        finally:
            for tensor, before in zip(tensors, kept, strict=True):
                tensor.copy_(before)


def swap_experts(model: Any) -> None:
    """Have experts 0 and 1 of the first MoE layer change places; the router stays as it was."""
    layers = (layer.mlp for layer in model.model.layers)
    experts = next(mlp.experts for mlp in layers if hasattr(mlp, "experts"))
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter[[0, 1]] = parameter[[1, 0]]
