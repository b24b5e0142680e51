"""A tiny GPT MoE in the ranks of a worker. Megatron is imported only inside the functions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from megatron_r3.cpu import CPU_CONFIG

VOCABULARY, SEQUENCE, BATCH = 64, 16, 2
LAYERS, EXPERTS, TOPK = 4, 8, 2
LossAndGradients = tuple[torch.Tensor, dict[str, torch.Tensor]]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def start(**sizes: int) -> None:
    """Process groups and random streams, deterministic."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.use_deterministic_algorithms(True)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**{"expert_tensor_parallel_size": 1, **sizes})
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)


# a GPT MoE that trains on the CPU, on any tree
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 64,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": TOPK,
    "moe_ffn_hidden_size": 16,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    **CPU_CONFIG,
}


def config(**options: Any) -> Any:
    """Four layers, eight experts, top-2, replay on. With replay off any tree takes it."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = {"moe_router_replay": True, **options}
    if not options["moe_router_replay"]:  # off is the default, and an unpatched tree has no field
        del options["moe_router_replay"]
    return TransformerConfig(
        **{
            **SHAPE,
            "num_layers": LAYERS,
            "kv_channels": 8,
            "qk_layernorm": True,
            "moe_router_load_balancing_type": "none",
            "activation_func": torch.nn.functional.silu,
            **options,
        }
    )


def model(config: Any, layers: Any = None, **options: Any) -> Any:
    """A whole GPTModel with Megatron's local layers; the same weights for the same shape.

    Args:
        layers: the spec of the layers; None: that of the config.
        options: more arguments of GPTModel.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    torch.manual_seed(3)
    given = {
        "vocab_size": VOCABULARY,
        "max_sequence_length": SEQUENCE,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
    }
    layers = layers or get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(config, layers, **{**given, **options})


def hybrid(pattern: str, **options: Any) -> Any:
    """A HybridModel of `hybrid_spec`, which is found as `--spec` finds it.

    Args:
        pattern: a letter for each layer: attention (*), MLP (-) or MoE (E).
        options: fields of the config.
    """
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.spec_utils import import_module

    torch.manual_seed(4)
    return HybridModel(
        config(num_layers=len(pattern), is_hybrid_model=True, **options),
        import_module(("proof.fidelity.hybrid_spec", "spec")),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        hybrid_layer_pattern=pattern,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def make_chunks(
    sizes: dict[str, int], prepare: Callable[[Any], None] = lambda made: None, **options: Any
) -> list[Any]:
    """This rank's model chunks, with weights that are the same in every layout.

    Args:
        sizes: the sizes of Megatron's process groups, which are made here.
        prepare: what a framework does to the config before it builds the model.
        options: fields of the config.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt import gpt_layer_specs as specs

    start(**sizes)
    options = {
        "moe_router_replay": False,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": "tensor_model_parallel_size" in sizes,
        "pipeline_dtype": torch.float32,
        **sizes,
        **options,
    }
    num_chunks = sizes.get("virtual_pipeline_model_parallel_size", 1)
    if num_chunks > 1:  # with two stages any other way mixes up messages; upstream refuses it
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    made = config(**options)
    prepare(made)
    chunks = []
    for number in range(num_chunks):
        stage = number if num_chunks > 1 else None
        where = {"ignore_virtual": False, "vp_stage": stage}
        layers = specs.get_gpt_decoder_block_spec(
            made, use_transformer_engine=False, vp_stage=stage
        )
        mtp = specs.get_gpt_mtp_block_spec(made, layers, False) if made.mtp_num_layers else None
        chunk = model(
            made,
            layers,
            pre_process=mpu.is_pipeline_first_stage(**where),
            post_process=mpu.is_pipeline_last_stage(**where),
            mtp_block_spec=mtp,
            vp_stage=stage,
        )
        fill(chunk)
        chunks.append(chunk)
    return chunks


def fill(chunk: Any) -> None:
    """Draw each weight by its name in the whole model, and keep this rank's part of it."""
    from megatron.core import parallel_state as mpu
    from megatron.core.transformer.transformer_layer import TransformerLayer

    tp_size, tp_rank = (
        mpu.get_tensor_model_parallel_world_size(),
        mpu.get_tensor_model_parallel_rank(),
    )
    num_local = EXPERTS // mpu.get_expert_model_parallel_world_size()
    layers = {
        f"{name}.": f"layer {module.layer_number} "
        for name, module in chunk.named_modules()
        if isinstance(module, TransformerLayer)
    }
    for name, parameter in chunk.named_parameters():
        prefix = next((prefix for prefix in layers if name.startswith(prefix)), "")
        whole_name = layers.get(prefix, "") + name[len(prefix) :]
        is_split = getattr(parameter, "tensor_model_parallel", False) and tp_size > 1
        if "local_experts." in whole_name:
            before, _, after = whole_name.partition("local_experts.")
            number, _, rest = after.partition(".")
            expert = int(number) + mpu.get_expert_model_parallel_rank() * num_local
            whole_name, is_split = f"{before}expert {expert} {rest}", False
        shape = list(parameter.shape)
        if is_split:
            shape[parameter.partition_dim] *= tp_size
        seed = int(hashlib.sha1(whole_name.encode()).hexdigest()[:8], 16)
        generator = torch.Generator().manual_seed(seed)
        value = torch.randn(shape, generator=generator) * 0.3
        value = value + 1 if parameter.dim() == 1 else value  # the weights of norms
        value = value * 3 if "router" in whole_name else value
        if is_split:
            value = value.chunk(tp_size, parameter.partition_dim)[tp_rank]
        with torch.no_grad():
            parameter.copy_(value)


def batch(seed: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens, position ids, labels `[B, S]`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    return ids[:, :-1], torch.arange(SEQUENCE).expand(BATCH, -1), ids[:, 1:]


def loss_and_gradients(gpt: Any, context: Any, seed: int = 5) -> LossAndGradients:
    """One forward pass inside `context` and its backward pass outside, as a schedule does it."""
    gpt.zero_grad(set_to_none=True)
    tokens, positions, labels = batch(seed)
    with context:
        loss = gpt(tokens, positions, None, labels=labels).sum()
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in gpt.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def same(one: LossAndGradients, other: LossAndGradients) -> bool:
    """Whether loss and every gradient are bitwise equal."""
    return (
        torch.equal(one[0], other[0])
        and one[1].keys() == other[1].keys()
        and all(torch.equal(gradient, other[1][name]) for name, gradient in one[1].items())
    )
