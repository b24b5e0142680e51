"""One row for each option of a training on rollouts: argparse and refusals come from the row.

The tables of docs/train.md must say the same; a test compares them with the rows.

A new option is one row, and `value(args, name)` gives its value. A row with `field=True` is a field
of Megatron's TransformerConfig, so Megatron makes the flag; the rest of such a row works as in any
other row.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Collection
from typing import Any

from megatron_r3.train.losses.advantages import ADVANTAGES
from megatron_r3.train.losses.aggregation import AGGREGATIONS
from megatron_r3.train.losses.correction import CORRECTIONS, LEVELS
from megatron_r3.train.losses.penalty import KL_ESTIMATORS, PLACES
from megatron_r3.train.option_kind import Option, Rule, flag
from megatron_r3.train.schedule import SOURCES, STORED

_REPLAY = Rule("moe_router_replay")
_NO_ROUTE = Rule(
    "moe_router_replay_source", ("live",), "no route is replayed; leave one of the two out"
)
_SINGLE = ("single", None)  # Megatron takes None as single
_BATCHES = tuple(
    Rule(name, (), "all global batches must have one size")
    for name in ("rampup_batch_size", "decrease_batch_size_if_needed")
)
_OF_A_COLLECTION: dict[str, Any] = {
    "default": 1,
    "metavar": "N",
    "kind": int,
    "least": 1,
    "nothing": (1,),
    "needs": (
        Rule("dataloader_type", _SINGLE, "a collection is a run of rollouts in store order"),
    ),
    "not_with": _BATCHES,
}
_OF_PUBLISHING: dict[str, Any] = {"needs": (Rule("rollouts_publish"),)}
_CORRECTS: dict[str, Any] = {"needs": (Rule("rollouts_correction", ("tis", "icepop", "mask")),)}
_FIELD: dict[str, Any] = {"field": True, "needs": (_REPLAY,), "not_with": (_NO_ROUTE,)}
_LOADS = ("replayed", "live")

# Options of Megatron that do not go with --rollouts, and why each is refused
NOT_WITH_ROLLOUTS = {
    "sft": "it brings its own batches",
    "perform_rl_step": "it samples and trains in a loop of its own",
    "skip_train": "no rollout would be trained on; leave --rollouts out",
    "hybrid_context_parallel": "it moves whole samples between ranks",
    "logits_load_dir": "it brings its own loss",
    "use_legacy_models": "legacy models have routers of their own",  # an option up to 0.17
    "use_megatron_fsdp": "replay was not tested on sharded modules",
    "use_torch_fsdp2": "replay was not tested on sharded modules",
    "iterations_to_skip": "the step that skips reads the script's own batches; leave the "
    "rollouts that you do not want out of the store",
    "phase_transition_iterations": "each phase would begin at the first rollout again",
    "override_ckpt_iteration": "the checkpoint's own iteration says which rollouts it has used",
}

# fmt: off
OPTIONS = (
    Option("rollouts", "train on these stores; all of them must come from models of one shape",
        metavar="DIR", nargs="+", not_with=(
            *(Rule(name, (), why) for name, why in NOT_WITH_ROLLOUTS.items()),
            Rule("non_persistent_ckpt_type", ("local",), "which rollouts such a checkpoint was "
                "trained on could not be read when training is resumed; use global"),
            Rule("dataloader_type", ("external",), "rollouts bring their own order"),
        )),
    Option("rollouts_loss", "`grpo`, `gspo`, `cispo`, or a loss of `--rollouts-loss-module`",
        default="grpo", metavar="NAME"),
    Option("rollouts_loss_module", "a Python module that registers losses",
        metavar="MODULE"),
    Option("rollouts_clip_eps",
        "the ratio r is clipped at 1 - EPS and 1 + EPS; with 1 there is no lower bound",
        usual="0.2; gspo 0.0003; cispo 1", metavar="EPS", kind=float),
    Option("rollouts_clip_eps_high", "the ratio is clipped to at most 1 + EPS",
        usual="`--rollouts-clip-eps` if given; else 0.2; gspo 0.0004", metavar="EPS",
        kind=float),
    Option("rollouts_dual_clip", "a token with a negative advantage A loses at most C |A|",
        usual="off", metavar="C", kind=float,
        not_with=(
            Rule("rollouts_loss", ("cispo",), "its weight is bounded for both signs already"),
        )),
    Option("rollouts_aggregation", "how the loss of tokens becomes one number",
        usual="token-mean; gspo sequence-mean", choices=tuple(AGGREGATIONS)),
    Option("rollouts_fixed_length",
        "what `fixed-length` divides by; needed with `--rollouts-pack`", usual="`--seq-length`",
        metavar="TOKENS", kind=int, least=1, of="tokens",
        needs=(Rule("rollouts_aggregation", ("fixed-length",)),)),
    Option("rollouts_advantages",
        "how rewards become advantages; `stored`: the rollouts bring advantages",
        default="group-normalised", choices=(*ADVANTAGES, STORED)),
    Option("rollouts_old_policy", "the policy from which an update starts", default="sampler",
        choices=("sampler", "trainer")),
    Option("rollouts_mini_steps", "a collection is N global batches of rollouts",
        **_OF_A_COLLECTION),
    Option("rollouts_epochs", "how often the updates go over a collection", **_OF_A_COLLECTION),
    Option("rollouts_shuffle",
        "mix the rollouts of each global batch, so that rollouts of a prompt do not [load the "
        "same ranks](balance.md#order); needs `--calculate-per-token-loss`, or one rollout "
        "in a micro-batch", usual="store order", metavar="SEED", kind=int, least=0,
        needs=(
            Rule("dataloader_type", _SINGLE, "a global batch is a run of rollouts in order"),
        ), not_with=_BATCHES),
    Option("rollouts_correction", "weigh tokens by w = old / sampler", default="none",
        choices=tuple(CORRECTIONS), nothing=("none",),
        needs=(
            Rule("rollouts_old_policy", ("trainer",),
                "with the sampler as the old policy there is no difference to correct"),
        )),
    Option("rollouts_correction_level",
        "`token`: each token has its own w; `sequence`: the product over its rollout",
        default="token", choices=tuple(LEVELS), **_CORRECTS),
    Option("rollouts_correction_bounds",
        "the bounds of w: the upper one for tis, lower and upper for the others",
        usual="tis 2; icepop 0.5 5; mask 0.5 2", metavar="BOUND", kind=float, nargs="+",
        **_CORRECTS),
    Option("rollouts_reference",
        "the reference policy of the KL term: a checkpoint or a transformers directory",
        metavar="DIR", needs=(Rule("rollouts_kl_coeff"),), not_with=(
            *(Rule(name, (), "the reference's weights could not change places with the trainer's "
                "bit by bit") for name in ("fp8_param_gather", "fp4_param_gather")),
            Rule("moe_input_jitter_eps", (), "its noise would be in the reference's log-probs too"),
            *(Rule(name, (), "the attention logits of the reference's pass would count as the "
                "trainer's") for name in ("qk_clip", "log_max_attention_logit")),
        )),
    Option("rollouts_kl_coeff",
        "add C times the KL from the trainer to the reference; with 0 it is only measured",
        usual="off", metavar="C", kind=float, least=0, needs=(Rule("rollouts_reference"),)),
    Option("rollouts_kl", "the estimator of the KL of a token", default="k3",
        choices=tuple(KL_ESTIMATORS), needs=(Rule("rollouts_kl_coeff"),)),
    Option("rollouts_kl_in",
        "`loss`: the loss grows by the KL; `advantage`: the token's advantage falls by the KL of "
        "the old policy", default="loss", choices=PLACES, needs=(Rule("rollouts_kl_coeff"),)),
    Option("rollouts_entropy_coeff", "the loss of a token falls by C times its entropy",
        usual="off", metavar="C", kind=float, least=0),
    Option("rollouts_log", "append a JSON line with all values of each step", metavar="FILE"),
    Option("rollouts_publish",
        "write policies into DIR for a sampler: [transformers "
        "directories](online.md#published-policies)", metavar="DIR",
        not_with=(
            Rule("async_save", (),
                "a sampler could use a policy before its checkpoint is saved, and a training that "
                "resumes from an older checkpoint may not make the same policy again"),
            Rule("moe_input_jitter_eps", (),
                "its noise is in every forward pass, so that no sampler could be compared with "
                "the trainer"),
            Rule("spec", (), "custom layers may route past the recorded experts; leave it out"),
        )),
    Option("rollouts_publish_interval", "optimizer steps from one policy to the next",
        usual="those on a collection", metavar="STEPS", kind=int, **_OF_PUBLISHING),
    Option("rollouts_publish_like",
        "gives policies their config and tokenizer; needed with `--rollouts-publish`",
        metavar="HF_DIR", **_OF_PUBLISHING),
    Option("rollouts_publish_keep", "remove all but the newest N policies", usual="0, all",
        metavar="N", kind=int, **_OF_PUBLISHING),
    Option("rollouts_policy",
        "`same`: refuse rollouts that other router weights than the trainer's sampled",
        default="same", choices=("same", "any")),
    Option("rollouts_sampling",
        "`plain`: refuse rollouts if the trainer cannot compute the distribution that they were "
        "drawn from", default="plain",
        choices=("plain", "any")),
    Option("rollouts_max_lag",
        "refuse rollouts more than N policy versions older than the newest of the store",
        metavar="N", kind=int, least=0, of="policy versions"),
    Option("rollouts_follow", "the store grows: wait up to SECONDS (3600) for the next rollout",
        usual="off", metavar="SECONDS", kind=float, nargs="?", const=3600.0, least=0,
        of="seconds",
        needs=(Rule("dataloader_type", _SINGLE, "rollouts are used in the order of the store"),),
        not_with=(
            Rule("rollouts_pack", (),
                "which rollouts fit into a pack is known only when the next rollout is "
                "there"),
        )),
    Option("rollouts_check",
        "`store`: check the whole store before training, each rank its share; `reads`: each rank "
        "checks [only what it reads](scale.md#what-is-checked-when)",
        default="store", choices=("store", "reads")),
    Option("rollouts_pack", "pack rollouts into sequences of `--seq-length` (THD)", default=False,
        needs=(
            Rule("micro_batch_size", (1,), "a pack is a micro-batch; raise --seq-length instead"),
        )),
    Option("moe_router_replay_source", "which routes are replayed; `live`: none",
        default=SOURCES[0], choices=tuple(SOURCES), needs=(_REPLAY,)),
    Option("moe_router_replay_max_lag",
        "rollouts more than N versions behind the newest take the routes of "
        "`--moe-router-replay-stale-source`", metavar="N", kind=int, least=0, of="versions",
        needs=(
            _REPLAY,
            Rule("moe_router_replay_source", ("rollout",),
                "with other sources no recorded route is replayed, so none can be too old"),
        )),
    Option("moe_router_replay_stale_source",
        "which routes rollouts beyond `--moe-router-replay-max-lag` take", default="live",
        choices=tuple(SOURCES[1:]), needs=(_REPLAY, Rule("moe_router_replay_max_lag"))),
    Option("rl_write_rollouts",
        "write each collection of [Megatron's own RL loop](rl-loop.md) as a shard", metavar="DIR",
        needs=(
            Rule("perform_rl_step", (), "it writes what Megatron's RL loop samples"),
            _REPLAY,
        ), not_with=(Rule("rollouts", (), "the loop samples its own rollouts"),)),
    Option("moe_router_replay", "MoE layers take the experts that are recorded in the rollouts",
        default=False, field=True),
    Option("moe_router_replay_missing",
        "route tokens without a recorded route live, or refuse them", default="live",
        choices=("live", "error"), field=True,
        needs=(
            _REPLAY,
            Rule("moe_router_replay_source", ("rollout",),
                "with other sources no recorded route is replayed"),
        )),
    Option("moe_router_replay_aux_loss", "which load the auxiliary losses see",
        default="replayed", choices=_LOADS, **_FIELD),
    Option("moe_router_replay_expert_bias", "which load updates the expert bias",
        default="replayed", choices=_LOADS, **_FIELD),
    Option("moe_router_replay_fused_gate",
        "compute the gate of replayed layers without the fused kernel",
        usual="fused with `--moe-router-fusion`", **_FIELD),
    Option("moe_router_replay_dispatch_plan",
        "let every layer learn its dispatch sizes on the device", usual="plan is on",
        default=True, **_FIELD),
    Option("moe_router_replay_guest_slots",
        "up to N copies of hot experts of other ranks on each rank "
        "([balance](balance.md#guests-in-training))", default=0, metavar="N", kind=int,
        group="guests", **_FIELD),
    Option("moe_router_replay_guest_domain", "copies stay among N neighbouring ranks",
        usual="all ranks that share experts", metavar="N", kind=int, field=True,
        needs=(_REPLAY, Rule("moe_router_replay_guest_slots")), not_with=(_NO_ROUTE,),
        group="guests"),
    Option("moe_router_replay_guest_tokens", "no copy for fewer than N tokens", default=1024,
        metavar="N", kind=int, field=True, needs=(_REPLAY, Rule("moe_router_replay_guest_slots")),
        not_with=(_NO_ROUTE,), group="guests"),
    Option("moe_router_replay_verify_plan",
        "compare each dispatch plan with what the device counts", default=False, field=True,
        needs=(_REPLAY, Rule("moe_router_replay_dispatch_plan", (True,))), not_with=(_NO_ROUTE,)),
    Option("moe_router_replay_log_mismatch_interval",
        "measure the mismatch every N iterations; 0: never", usual="`--log-interval`", metavar="N",
        kind=int, least=0, of="iterations (0: never)", field=True),
    Option("moe_router_replay_verify_dispatch",
        "compare what reached each expert with the recorded routes", default=False, field=True,
        not_with=(
            Rule("moe_router_replay_log_mismatch_interval", (0,), "nothing is compared"),
        )),
)
# fmt: on
BY_NAME = {option.name: option for option in OPTIONS}


def look(args: Any, name: str) -> tuple[Any, bool]:
    """The value of an option, and whether the option is set.

    An option of this table is set if its value is not the default, and any other option of Megatron
    is set if its value is true.
    """
    given = getattr(args, name, None)
    if name not in BY_NAME:  # Megatron's
        return given, bool(given)
    default = BY_NAME[name].default
    return default if given is None else given, given not in (None, default)


def value(args: Any, name: str) -> Any:
    """The value of an option, or its default where it is not given."""
    return look(args, name)[0]


def add_to(parser: Any, fields: Collection[str]) -> None:
    """Add to Megatron's parser the options that Megatron does not make; each is None unless given.

    Megatron makes the option of a row that is a field of its TransformerConfig. If this tree lacks
    the field, the option is added here, and ends the program when it is given: the error names the
    missing group of patches.

    Args:
        fields: the fields that this tree's TransformerConfig has.
    """
    group = parser.add_argument_group(title="rollouts")
    for option in OPTIONS:
        how: dict[str, Any] = {"action": "store_true"}
        if option.name in fields:
            continue
        if option.field:
            how = {"type": _absent(option), "nargs": "?", "const": ""}
        elif option.default is not False:
            how = {"type": option.kind, "choices": option.choices or None, "nargs": option.nargs}
            how |= {"metavar": option.metavar} if option.metavar else {}
            how |= {"const": option.const} if option.nargs == "?" else {}
        group.add_argument(flag(option.name), default=None, help=option.help, **how)


def _absent(option: Option) -> Callable[[str], Any]:
    def refuse(_: str) -> Any:
        raise ArgumentTypeError(
            f"this tree has no patches of the group {option.group}, which the option needs (make "
            "status shows the groups that are in the tree)"
        )

    return refuse


def refuse_options(args: Any) -> None:
    """Refuse impossible values, and options that do not go together, by the rules of the table.

    Raises:
        ValueError: as `Option.refuse`, for the first option that is refused.
    """
    for option in OPTIONS:
        option.refuse(args, look)


# The fields `moe_router_replay_...` that nothing reads without --rollouts.
_READ_WITH_ROLLOUTS = ("missing", "log_mismatch_interval", "verify_dispatch")


def refuse_without_rollouts(args: Any) -> None:
    """Refuse options that do nothing without --rollouts.

    Args:
        args: Megatron's arguments, with `rollouts` None.

    Raises:
        ValueError: such an option is given; the message names it.
    """
    of_rollouts = {f"moe_router_replay_{name}" for name in _READ_WITH_ROLLOUTS}
    for option in OPTIONS:
        given = getattr(args, option.name, None)
        idle = option.is_of_store and given is not None
        if option.name in of_rollouts:
            idle = given != option.default
        if idle:
            raise ValueError(
                f"{flag(option.name)} does nothing without --rollouts: give --rollouts DIR, or "
                "leave it out"
            )
