"""A small stand-in for `megatron.training`, which PyPI's packages up to 0.16 lack.

The stand-in takes Megatron's arguments. It makes process groups and a GPTModel for each pipeline
chunk, and runs Megatron's own schedules and gradients. An argument that is not known here is
refused, not ignored. Megatron is imported only inside the functions that ranks run.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
import typing
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megatron_r3.cpu import CPU_CONFIG
from megatron_r3.replay.layers import moe_layer_indices
from megatron_r3.replay.planner import PLANNED_DISPATCHERS
from megatron_r3.train.losses.loss import LossOptions
from megatron_r3.train.losses.policy_loss import Clip
from megatron_r3.train.options import RolloutOptions
from megatron_r3.train.schedule import Schedule, UseOfRollouts

# options that are no config field, or whose name or parsing differs from that of their field
_FLAGS: dict[str, dict[str, Any]] = {
    "--num-experts": {"type": int, "dest": "num_moe_experts"},
    "--group-query-attention": {"action": "store_true"},
    "--swiglu": {"action": "store_true"},
    "--disable-bias-linear": {"action": "store_false", "dest": "add_bias_linear"},
    "--moe-layer-freq": {"type": lambda text: eval(text, {}), "default": 1},
    "--num-virtual-stages-per-pipeline-rank": {"type": int},
    "--position-embedding-type": {},
    "--untie-embeddings-and-output-weights": {"action": "store_true"},
    "--seq-length": {"type": int},
    "--max-position-embeddings": {"type": int},
    "--vocab-size": {"type": int},
    "--make-vocab-size-divisible-by": {"type": int},
    "--micro-batch-size": {"type": int},
    "--global-batch-size": {"type": int},
    "--seed": {"type": int},
    "--load": {},
    "--save": {},
    "--rollouts": {"nargs": "+"},
    "--rollouts-clip-eps": {"type": float},
    "--rollouts-pack": {"action": "store_true"},
    "--moe-router-replay-verify-dispatch": {"action": "store_true"},
    "--moe-router-replay-verify-plan": {"action": "store_true"},
}
# options that change nothing on a CPU without a training loop, and how many values each has
_WITHOUT_MEANING = {
    "--tokenizer-type": 1,
    "--num-workers": 1,
    "--eval-interval": 1,
    "--eval-iters": 1,
    "--ckpt-format": 1,
    "--save-interval": 1,
    "--train-iters": 1,
    "--log-interval": 1,
    "--lr": 1,
    "--min-lr": 1,
    "--finetune": 0,
    "--no-load-optim": 0,
    "--no-load-rng": 0,
    "--exit-on-missing-checkpoint": 0,
    "--distributed-backend=gloo": 0,
    "--transformer-impl=local": 0,
    "--no-gradient-accumulation-fusion": 0,
    "--no-masked-softmax-fusion": 0,
    "--no-bias-gelu-fusion": 0,
    "--no-bias-swiglu-fusion": 0,
    "--no-bias-dropout-fusion": 0,
    "--no-rope-fusion": 0,
    "--no-persist-layer-norm": 0,
}


def is_core_only() -> bool:
    """Whether the Megatron that is importable has no training loop."""
    import importlib.util

    return importlib.util.find_spec("megatron.training") is None


def _parse(argv: list[str]) -> argparse.Namespace:
    from megatron.core.transformer import TransformerConfig

    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag, options in _FLAGS.items():
        parser.add_argument(flag, **options)
    taken = {action.dest for action in parser._actions}
    hints = typing.get_type_hints(TransformerConfig)
    for field in dataclasses.fields(TransformerConfig):
        if field.name not in taken:
            parser.add_argument(
                f"--{field.name.replace('_', '-')}", **_argparse_options(hints[field.name])
            )
    rest = iter(argv)
    known = []
    for word in rest:
        if word in _WITHOUT_MEANING:
            for _ in range(_WITHOUT_MEANING[word]):
                next(rest)
        else:
            known.append(word)
    return parser.parse_args(known)


def _argparse_options(hint: Any) -> dict[str, Any]:
    """The keywords of `add_argument` for a config field of this type."""
    # SUPPRESS keeps an option that is not given out of the namespace: the config's default stays
    options: dict[str, Any] = {"default": argparse.SUPPRESS}
    kinds = typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,)
    if bool in kinds:
        return {**options, "action": "store_true"}
    scalar = next((kind for kind in (int, float) if kind in kinds), str)
    items = [typing.get_args(o)[0] for o in kinds if typing.get_origin(o) is list]
    if not items:
        return {**options, "type": scalar}
    item = next((kind for kind in (int, float) if kind in items), str)
    return {
        **options,
        "nargs": "+",
        "type": item,
        "action": _OneOrMore if item in kinds else "store",
    }


class _OneOrMore(argparse.Action):
    """Keep one value as a value, and several values as a list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values if len(values) > 1 else values[0])


_UNIONS = (typing.Union, types.UnionType)


def initialize(argv: list[str]) -> argparse.Namespace:
    """Make the process groups; return the arguments under the names that Megatron uses."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    args = _parse(argv)
    for name, default in (
        ("tensor_model_parallel_size", 1),
        ("pipeline_model_parallel_size", 1),
        ("context_parallel_size", 1),
        ("expert_model_parallel_size", 1),
        ("expert_tensor_parallel_size", None),
        ("sequence_parallel", False),
        ("calculate_per_token_loss", False),
        ("moe_router_replay", False),
        ("moe_router_replay_dispatch_plan", True),
        ("mtp_num_layers", None),
        ("mtp_loss_scaling_factor", 0.1),
        ("bf16", False),
    ):
        vars(args).setdefault(name, default)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    args.virtual_pipeline_model_parallel_size = args.num_virtual_stages_per_pipeline_rank
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    args.data_parallel_size = parallel_state.get_data_parallel_world_size()
    args.global_batch_size = args.global_batch_size or args.micro_batch_size
    init_num_microbatches_calculator(
        rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    args.num_experts, args.transformer_impl = args.num_moe_experts, "local"
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float32
    return args


def rollout_options(args: argparse.Namespace) -> RolloutOptions:
    """The options of a training on rollouts, read from these arguments."""
    dispatcher = getattr(args, "moe_token_dispatcher_type", "allgather")
    asks_for_plans = dispatcher in PLANNED_DISPATCHERS
    return RolloutOptions(
        directories=tuple(args.rollouts),
        replay=args.moe_router_replay,
        pack=args.rollouts_pack,
        loss=LossOptions(clip=Clip(args.rollouts_clip_eps, args.rollouts_clip_eps)),
        use=UseOfRollouts(args.seq_length, Schedule(args.global_batch_size)),
        use_plan=args.moe_router_replay_dispatch_plan and asks_for_plans,
        verify_dispatch=args.moe_router_replay_verify_dispatch,
        num_layers=args.num_layers,
        moe_layers=moe_layer_indices(args),
        topk=args.moe_router_topk,
        num_experts=args.num_experts,
        micro_batch_size=args.micro_batch_size,
        context_parallel=args.context_parallel_size,
        sequence_parallel=args.sequence_parallel,
        per_token_loss=args.calculate_per_token_loss,
    )


def _config(args: argparse.Namespace) -> Any:
    from megatron.core.transformer import TransformerConfig

    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    values = {name: value for name, value in vars(args).items() if name in names}
    if args.swiglu:
        values |= {"activation_func": F.silu, "gated_linear_unit": True}
    values |= {
        **CPU_CONFIG,
        "pipeline_dtype": args.params_dtype,
        # With virtual stages two ranks send to each other in both directions at once. A batched
        # exchange would mix these messages up, so each message is sent by itself.
        "overlap_p2p_comm": args.virtual_pipeline_model_parallel_size is not None,
        "batch_p2p_comm": args.virtual_pipeline_model_parallel_size is None,
        "deallocate_pipeline_outputs": True,
    }
    return TransformerConfig(**values)


def build_chunks(args: argparse.Namespace) -> list[torch.nn.Module]:
    """This rank's model chunks, loaded from --load where it is given."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    from megatron_r3.train.launch import gpt_specs

    virtual = args.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(virtual or 1):
        stage_of = {"ignore_virtual": False, "vp_stage": stage} if virtual else {}
        config = _config(args)
        decoder, mtp = gpt_specs(config, args, stage if virtual else None)
        model: torch.nn.Module = GPTModel(
            config=config,
            transformer_layer_spec=decoder,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**stage_of),
            post_process=parallel_state.is_pipeline_last_stage(**stage_of),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            mtp_block_spec=mtp,
            vp_stage=stage if virtual else None,
        )
        if args.bf16:
            model = Float16Module(config, model)
        chunks.append(model)
    if args.load:
        state = {str(i): _whole(chunk).sharded_state_dict() for i, chunk in enumerate(chunks)}
        loaded = dist_checkpointing.load(state, args.load)
        for i, chunk in enumerate(chunks):
            _whole(chunk).load_state_dict(loaded[str(i)])
    if args.save:
        Path(args.save).mkdir(parents=True)
        dist_checkpointing.save(_whole(chunks[0]).sharded_state_dict(), args.save)
    return chunks


def _whole(chunk: torch.nn.Module) -> Any:
    return getattr(chunk, "module", chunk)


def wrap(args: argparse.Namespace, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Wrap the chunks for data parallelism, and set the config field that Megatron's loop sets."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    ddp_config = DistributedDataParallelConfig()
    models = [
        DistributedDataParallel(_whole(chunk).config, ddp_config, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]
    for model in models:
        model.config.finalize_model_grads_func = finalize_model_grads
        model.train()
    return models


def forward_backward(
    args: argparse.Namespace, models: list[torch.nn.Module], forward_step: Any, data: Any
) -> list[dict[str, torch.Tensor]]:
    """Run one step of Megatron's schedule; return what the loss functions of this rank reported.

    Args:
        data: a data iterator, or a list with one for each chunk.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for model in models:
        model.zero_grad_buffer()
    reports: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=models if len(models) > 1 else models[0],
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    return reports
