"""What a training on rollouts is asked to do: Megatron's arguments, read in one place.

`RolloutOptions.from_args` and the modules that it calls (`option_table.py`, `update_options.py`,
`publish_options.py`) read `args`; `progress.py` reads what changes while training runs. The code
that trains takes `RolloutOptions`, which a test or another trainer can make without a Megatron
command line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_r3.replay.layers import hybrid_pattern, moe_layer_indices
from megatron_r3.replay.planner import PLANNED_DISPATCHERS
from megatron_r3.replay.routes import MoEShape
from megatron_r3.train.losses.loss import LossOptions
from megatron_r3.train.option_table import flag, refuse_options, value
from megatron_r3.train.progress import checkpoint_directories
from megatron_r3.train.publish_options import PublishOptions
from megatron_r3.train.schedule import UseOfRollouts
from megatron_r3.train.update_options import read_loss, read_use, reference_name, refuse_update

# Options of Megatron that do not go with a pass of the old policy, and why each is refused.
_NOT_WITH_OLD_PASS = {
    "reuse_grad_buf_for_mxfp8_param_ag": "the pass comes before Megatron copies the weights into "
    "that buffer, and would run on gradients",
    "moe_input_jitter_eps": "its noise would be in the log-probs of the old policy too",
}


def document_multiple(context_parallel: int) -> int:
    """Padding rounds the length of each rollout of a pack up to a multiple of this number.

    Context parallelism cuts each document into 2 * CP pieces of one length: CP 4 pads 13 input
    tokens to 16.
    """
    return 2 * context_parallel if context_parallel > 1 else 1


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """What a training on rollouts is asked to do, and what it has to know of the trainer.

    Attributes:
        directories: the rollout stores (--rollouts).
        replay: whether the MoE layers take the recorded experts (--moe-router-replay).
        any_policy: whether rollouts of another policy than the trainer's are taken.
        any_sampling: whether rollouts with sampling settings that the loss cannot follow are taken.
        follow_s: seconds to wait for a rollout of a store that grows; None for a fixed store.
        checks_as_read: whether each rank checks what it reads, as it reads it, instead of a check
            of the whole store before training.
        max_lag: how many versions a rollout's policy may be behind the newest version; None for
            any number.
        pack: whether a sample is a pack of rollouts (THD).
        loss: the policy loss.
        trainer_is_old: whether the trainer at the start of a collection is the old policy; else
            the sampler is the old policy.
        use: in which order the rollouts are used, their advantages, the source of their routes.
        save_directory, load_directory: --save and --load; None if the option is not given.
        checkpoint_directories: all directories in which a checkpoint of this training may lie.
        publish: what is published for a sampler; None for nothing.
        log_file: the file to which each step appends a JSON line; None for none.
        refuse_missing: whether a token without a recorded route is refused.
        use_plan: whether replay makes dispatch plans for the model's token dispatchers.
        verify_dispatch: whether what reached each expert is compared with the record.
        mismatch_interval: iterations from one comparison of live and recorded choices to the next;
            0 for none.
        num_layers: decoder layers of the whole model.
        moe_layers: the 0-based numbers of the MoE layers.
        topk, num_experts: of a MoE layer; num_experts is 0 for a dense model.
        vocab_size: the trainer's token ids are below this number; None if it is not known yet.
        padded_vocab_size: rows of the trainer's output layer; None if not known yet.
        micro_batch_size: samples of a micro-batch.
        context_parallel: the size of the context-parallel group.
        sequence_parallel: whether tensor parallelism splits the sequence outside of attention.
        per_token_loss: --calculate-per-token-loss.
        validate_loss: whether Megatron's rerun machine looks at the loss.
        scaled_loss: whether the loss is scaled (fp16), so that Megatron itself skips steps with
            gradients that are not finite.
        sample_order: what decides which rollouts a sample of the training has, as text.
        reference: the folder of the reference policy, and its iteration; empty without one.
        reads_a_dataset: whether --data-path or --mock-data is given.
    """

    directories: tuple[str, ...]
    replay: bool
    any_policy: bool = False
    any_sampling: bool = False
    follow_s: float | None = None
    checks_as_read: bool = False
    max_lag: int | None = None
    pack: bool = False
    loss: LossOptions = field(default_factory=LossOptions)
    trainer_is_old: bool = False
    use: UseOfRollouts
    save_directory: str | None = None
    load_directory: str | None = None
    checkpoint_directories: tuple[str, ...] = ()
    publish: PublishOptions | None = None
    log_file: str | None = None
    refuse_missing: bool = False
    use_plan: bool = False
    verify_dispatch: bool = False
    mismatch_interval: int = 1
    num_layers: int
    moe_layers: tuple[int, ...]
    topk: int
    num_experts: int
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    micro_batch_size: int
    context_parallel: int = 1
    sequence_parallel: bool = False
    per_token_loss: bool = False
    validate_loss: bool = True
    scaled_loss: bool = False
    sample_order: str = "single"
    reference: str = ""
    reads_a_dataset: bool = False

    @property
    def where(self) -> str:
        """The stores as the user named them, for an error."""
        return f"--rollouts {' '.join(self.directories)}"

    @property
    def seq_length(self) -> int:
        """The length to which samples are padded."""
        return self.use.seq_length

    @property
    def replays_routes(self) -> bool:
        """Whether any token may replay a route; else all tokens route live."""
        return self.replay and self.use.source != "live"

    @property
    def replays_rollouts(self) -> bool:
        """Whether any token may replay the route that its rollout recorded."""
        return self.replay and self.use.source == "rollout"

    @property
    def takes_old_routes(self) -> bool:
        """Whether any token may replay the routes of the old policy."""
        sources = {self.use.source}
        if self.use.replay_max_lag is not None:
            sources.add(self.use.stale_source)
        return self.replays_routes and "old-policy" in sources

    @property
    def needs_old_pass(self) -> bool:
        """Whether a pass of the old policy runs over each collection before the first update on it.

        With one update on a collection no pass is needed: the update itself runs with the weights
        of the old policy, so the update's own log-probs and live routes are the old policy's.
        """
        return self.use.schedule.steps > 1 and (self.trainer_is_old or self.takes_old_routes)

    @property
    def document_multiple(self) -> int:
        """`document_multiple` for the context-parallel size of this training."""
        return document_multiple(self.context_parallel)

    def shape_differences(self, sampler: MoEShape) -> list[str]:
        """What differs between the sampler's model and the trainer's; empty if the routes fit."""
        pairs = {
            "MoE layers (0-based)": (list(sampler.moe_layers), list(self.moe_layers)),
            "topk": (sampler.topk, self.topk),
            "experts": (sampler.num_experts, self.num_experts or None),
        }
        return [f"{name} {a} there, {b} here" for name, (a, b) in pairs.items() if a != b]

    @classmethod
    def from_args(cls, args: Any) -> RolloutOptions:
        """Read Megatron's validated arguments.

        Raises:
            ValueError: an impossible value, or options that do not go together. The message names
                the options and says why.
        """
        _refuse_combinations(args)
        interval = args.moe_router_replay_log_mismatch_interval
        asks_for_plans = args.moe_token_dispatcher_type in PLANNED_DISPATCHERS
        plan = args.moe_router_replay and args.moe_router_replay_dispatch_plan and asks_for_plans
        # With the rerun machine disabled, validate_result would end the step with a traceback. So
        # only the guard, which can name the rollout, looks at the loss.
        validates = getattr(args, "rerun_mode", "validate_results") != "disabled"
        options = cls(
            directories=tuple(args.rollouts),
            replay=bool(args.moe_router_replay),
            any_policy=value(args, "rollouts_policy") == "any",
            any_sampling=value(args, "rollouts_sampling") == "any",
            follow_s=args.rollouts_follow,
            checks_as_read=value(args, "rollouts_check") == "reads",
            max_lag=args.rollouts_max_lag,
            pack=value(args, "rollouts_pack"),
            loss=read_loss(args),
            trainer_is_old=value(args, "rollouts_old_policy") == "trainer",
            use=read_use(args),
            save_directory=args.save,
            load_directory=args.load,
            checkpoint_directories=checkpoint_directories(args, args.save),
            publish=PublishOptions.from_args(args),
            log_file=args.rollouts_log,
            refuse_missing=args.moe_router_replay_missing == "error",
            use_plan=bool(plan),
            verify_dispatch=args.moe_router_replay_verify_dispatch,
            mismatch_interval=args.log_interval if interval is None else interval,
            num_layers=args.num_layers,
            moe_layers=moe_layer_indices(args),
            topk=args.moe_router_topk,
            num_experts=args.num_experts or 0,
            vocab_size=args.padded_vocab_size or args.vocab_size,
            padded_vocab_size=args.padded_vocab_size,
            micro_batch_size=args.micro_batch_size,
            context_parallel=args.context_parallel_size,
            sequence_parallel=args.sequence_parallel,
            per_token_loss=args.calculate_per_token_loss,
            validate_loss=bool(validates and args.check_for_nan_in_loss_and_grad),
            scaled_loss=bool(getattr(args, "fp16", False)),
            sample_order=_sample_order(args),
            reference=reference_name(args.rollouts_reference),
            reads_a_dataset=bool(
                getattr(args, "data_path", None) or getattr(args, "mock_data", False)
            ),
        )
        for name, why in _NOT_WITH_OLD_PASS.items():
            if options.needs_old_pass and getattr(args, name, None):
                raise ValueError(
                    f"{flag(name)}: not together with a pass of the old policy (several updates on "
                    "a collection, and --rollouts-old-policy trainer or "
                    f"--moe-router-replay-source old-policy): {why}; leave the option out"
                )
        return options


def _refuse_combinations(args: Any) -> None:
    """Refuse option values, and options beside --rollouts, that would not do what they say."""
    refuse_options(args)
    refuse_update(args)
    pattern = hybrid_pattern(args)
    if args.rollouts_pack and {*pattern} & {*"MG"}:  # M is Mamba, G is a gated delta net
        raise ValueError(
            f"--rollouts-pack with the hybrid pattern {pattern}: the state of its recurrent layers "
            "would run on from one rollout into the next; leave one of the two out"
        )
    # Only if it was typed: `store` is also the default, which has no effect with --rollouts-follow.
    if args.rollouts_follow is not None and args.rollouts_check == "store":
        raise ValueError(
            "--rollouts-follow: not together with --rollouts-check store: in a store that grows "
            "each rank checks what it reads, as it reads it; leave --rollouts-check out"
        )


def _sample_order(args: Any) -> str:
    """What decides which rollouts a sample has, as a text that a resume compares.

    A pack depends on how its rollouts are padded for context parallelism. A shuffled order
    (cyclic) depends on how many samples are drawn, and on how the ranks share them out.
    """
    order = args.dataloader_type or "single"
    if order != "single":
        samples = args.train_samples or (args.train_iters or 0) * args.global_batch_size
        order += (
            f" over {samples} samples, "
            f"{args.data_parallel_size} data-parallel ranks, micro-batches of "
            f"{args.micro_batch_size}, data sharding {getattr(args, 'data_sharding', None)}"
        )
    if args.rollouts_pack:
        multiple = document_multiple(args.context_parallel_size)
        order += f", packs of {args.seq_length} aligned to {multiple}"
    mini_steps, epochs = value(args, "rollouts_mini_steps"), value(args, "rollouts_epochs")
    if mini_steps * epochs > 1:
        order += f", {epochs} times {mini_steps} steps of {args.global_batch_size} on a collection"
    if args.rollouts_shuffle is not None:
        order += f", batches of {args.global_batch_size} mixed by seed {args.rollouts_shuffle}"
    return str(order)
