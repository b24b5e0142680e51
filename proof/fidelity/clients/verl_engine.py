"""Build verl's own Megatron engine on CPU tensors, and the batches that verl's trainer gives it.

`MegatronEngineWithLMHead.forward_backward_batch` and all that it calls are verl's. The engine is
built without its `__init__`, which would load a Hugging Face checkpoint and start an optimizer. So
the caller first does what `__init__` does for replay: `apply_router_replay_patch()` before the
model is built, and verl's flag on the finished config (`ask_for_replay`). verl and Megatron are
imported only inside the functions.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def put_on_cpu(impl: Any) -> None:
    """Make verl use the CPU as its device.

    Args:
        impl: verl's module `verl.workers.engine.megatron.transformer_impl`.
    """
    from verl.utils.megatron import router_replay_utils

    impl.get_device_id = lambda: "cpu"
    router_replay_utils.device_name = "cpu"


def ask_for_replay(config: Any) -> None:
    """Set verl's replay flag on a finished config, as verl's `_build_tf_config` does."""
    import verl

    if verl.__version__.startswith("0.8"):
        config.enable_routing_replay = True
    else:
        config.moe_enable_routing_replay = True


def bare_engine(
    impl: Any, chunks: list[Any], mode: str, context_parallel: int = 1, replays: bool = True
) -> Any:
    """Build the engine of this rank, without its `__init__`.

    Args:
        impl: verl's module `verl.workers.engine.megatron.transformer_impl`.
        chunks: the model chunks of this rank.
        mode: verl's `router_replay.mode`: R2, R3 or disabled.
        context_parallel: the size of the context-parallel group.
        replays: verl's `enable_routing_replay`.
    """
    engine = object.__new__(impl.MegatronEngineWithLMHead)
    engine.engine_config = SimpleNamespace(
        router_replay=SimpleNamespace(mode=mode),
        use_fused_kernels=False,
        context_parallel_size=context_parallel,
        dynamic_context_parallel=False,
        pad_bshd_to_minibatch_max=False,
        use_remove_padding=True,
        pad_to_length=False,
        pad_to_length_bucket=512,
        entropy_from_logits_with_chunking=False,
        virtual_pipeline_model_parallel_size=len(chunks) if len(chunks) > 1 else None,
    )
    engine.model_config = SimpleNamespace(
        mtp=SimpleNamespace(enable=False, enable_train=False),
        hf_config=SimpleNamespace(architectures=["Qwen3MoeForCausalLM"]),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    engine.tf_config, engine.module = chunks[0].config, chunks
    engine.enable_routing_replay, engine.mini_layer_topk_idx_list = replays, []
    return engine


def jagged(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A nested tensor that holds tensors of different lengths, without padding."""
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def trainer_batch(
    tokens: list[torch.Tensor],
    response_lengths: list[int],
    routes: list[torch.Tensor] | None,
    samples_per_microbatch: int,
    replays: bool = True,
) -> Any:
    """A TensorDict like those that verl's trainer hands to the engine.

    Args:
        tokens: prompt and response of each sample.
        response_lengths: how many of a sample's tokens are its response.
        routes: the expert ids of each sample, `[tokens, layers, topk]`. verl 0.9 has no row for the
            last token, verl 0.8 has one. None: the batch has no routes.
        samples_per_microbatch: how many samples are packed into a micro-batch.
        replays: whether this call of the engine replays.
    """
    from verl.utils import tensordict_utils as tu

    response_mask = torch.zeros(len(tokens), max(response_lengths))
    loss_mask = []
    for index, (ids, length) in enumerate(zip(tokens, response_lengths, strict=True)):
        response_mask[index, :length] = 1
        before = torch.zeros(len(ids) - length - 1)
        loss_mask.append(torch.cat([before, torch.ones(length), torch.zeros(1)]))
    data = tu.get_tensordict(
        {
            "input_ids": jagged(tokens),
            "loss_mask": jagged(loss_mask),
            "response_mask": response_mask,
            "temperature": torch.ones(len(tokens)),
        },
        non_tensor_dict={
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": samples_per_microbatch,
            "enable_routing_replay": replays,
        },
    )
    if routes is not None:
        data["routed_experts"] = jagged(routes)
    return data
