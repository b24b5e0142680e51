"""The options of replay in Megatron's RL loop, and Megatron's options that are refused with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_r3.replay.layers import moe_layer_indices
from megatron_r3.replay.routes import MoEShape
from megatron_r3.train.option_table import OPTIONS, flag

_NOT_PATCHED = (
    "this tree lacks the patches of the group rl, which there are for core_r0.19.0 and main (make "
    "status shows the groups of a tree); collect rollouts, and train on them with --rollouts DIR"
)
_SCHEDULE = "inference_dynamic_batching_async_sched_mode"
_FSDP = "replay was not tested on modules that FSDP shards; leave FSDP out"
# options of Megatron, with the reason why each is refused
_REFUSED = {
    "rl_training_cuda_graphs": "--rl-training-cuda-graphs captures the router, and a graph would "
    "repeat the routes of its first micro-batch; leave it out",
    "virtual_pipeline_model_parallel_size": "the RL loop runs only the first model chunk of a "
    "rank; leave out virtual pipeline stages",
    "context_parallel_size": "the RL loop splits no sequences on 0.19.0, and on main replay was "
    "not tested with split sequences; set --context-parallel-size 1",
    _SCHEDULE: "an engine that schedules ahead (--inference-dynamic-batching-async-sched-mode "
    "async) records no routes; set it to legacy",
    "rl_durable_rollout_bank": "--rl-durable-rollout-bank writes rollouts without their routes, "
    "so rollouts from the bank could not be replayed; leave it out",
    "mtp_num_layers": "replay in the RL loop was not tested with --mtp-num-layers; leave it out",
    "moe_router_replay_guest_slots": "guests of hot experts were not tested in the RL loop; leave "
    "out --moe-router-replay-guest-slots",
    "overlap_moe_expert_parallel_comm": "with --overlap-moe-expert-parallel-comm layers run after "
    "the forward step, and replay in the RL loop was not tested with that; leave it out",
    "use_megatron_fsdp": _FSDP,
    "use_torch_fsdp2": _FSDP,
}


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """The options of replay in Megatron's RL loop, and facts about the loop and its model.

    Attributes:
        shape: the model's MoE layers, experts and top-k.
        num_layers: decoder layers of the whole model.
        seq_length: the length to which samples that are not packed are padded.
        group_size, num_groups: rollouts of a group, groups of a collection.
        refuse_missing: whether a turn without routes is refused.
        verify_dispatch: whether what reached each expert is compared with what the engine sent.
        mismatch_interval: live and recorded choices are compared every so many iterations, if the
            iteration logs too; 0 for never.
        log_interval: Megatron logs a line every so many iterations.
        store: the rollout store to which each collection is written; None writes nothing.
        sampling: temperature, top_p and top_k as the loop's requests have them; max_tokens, which
            bounds prompt and response together.
        vocab_size: rows of the output layer.
    """

    shape: MoEShape
    num_layers: int
    seq_length: int
    group_size: int
    num_groups: int
    refuse_missing: bool = False
    verify_dispatch: bool = False
    mismatch_interval: int = 1
    log_interval: int = 1
    store: Path | None = None
    sampling: dict[str, Any]
    vocab_size: int

    @classmethod
    def from_args(cls, args: Any) -> LoopOptions:
        """Read Megatron's validated arguments."""
        interval = args.moe_router_replay_log_mismatch_interval
        return cls(
            shape=MoEShape(args.num_experts, args.moe_router_topk, moe_layer_indices(args)),
            num_layers=args.num_layers,
            seq_length=args.seq_length,
            group_size=args.grpo_group_size,
            num_groups=args.grpo_prompts_per_step,
            refuse_missing=args.moe_router_replay_missing == "error",
            verify_dispatch=args.moe_router_replay_verify_dispatch,
            mismatch_interval=args.log_interval if interval is None else interval,
            log_interval=args.log_interval,
            store=None if args.rl_write_rollouts is None else Path(args.rl_write_rollouts),
            sampling={
                # As megatron/rl/inference/megatron.py asks: a temperature of 0 is sent as 1, a
                # top-p of 0 cuts nothing off, and a top-k is not sent.
                "temperature": args.rl_default_temperature or 1.0,
                "top_p": args.rl_default_top_p or 1.0,
                "top_k": 0,
                "max_tokens": args.inference_max_seq_length,
            },
            vocab_size=args.padded_vocab_size,
        )

    def measures(self, iteration: int) -> bool:
        """Whether live and recorded choices are compared in this iteration (counted from 0)."""
        return all(
            n and (iteration + 1) % n == 0 for n in (self.mismatch_interval, self.log_interval)
        )


def refuse_in_loop(args: Any) -> None:
    """Refuse options with which replay in Megatron's RL loop fails or was not tested.

    If nothing is refused, `args` is changed so that the loop's engine records its routes.

    Args:
        args: Megatron's arguments, with --perform-rl-step and --moe-router-replay.

    Raises:
        ValueError: all reasons in one message.
    """
    refused = {name: getattr(args, name, None) for name in _REFUSED}
    refused["context_parallel_size"] = (refused["context_parallel_size"] or 1) > 1
    refused[_SCHEDULE] = refused[_SCHEDULE] == "async"
    reasons = [] if _is_patched() else [_NOT_PATCHED]
    # `fromkeys`: two options may be refused for one reason, which the error has once
    reasons += dict.fromkeys(_REFUSED[name] for name, is_refused in refused.items() if is_refused)
    reasons += [
        f"{flag(option.name)} is for the rollouts of a store (--rollouts); leave it out"
        for option in OPTIONS
        if option.is_of_store and getattr(args, option.name, None) is not None
    ]
    if reasons:
        raise ValueError("--perform-rl-step with --moe-router-replay: " + "; ".join(reasons))
    args.moe_enable_routing_replay = True


def _is_patched() -> bool:
    """Whether this tree's RL loop hands its turns to megatron_r3; the file is not imported."""
    import megatron.core

    loop = Path(megatron.core.__file__).parents[1] / "rl" / "rl_utils.py"
    return loop.is_file() and "megatron_r3.seams.rl" in loop.read_text()
