"""Called by patch 4: the options of training, and what is refused before training starts."""

from __future__ import annotations

from typing import Any

from megatron_r3.train.option_table import (
    BY_NAME,
    OPTIONS,
    add_to,
    look,
    refuse_without_rollouts,
)

# fields of MLATransformerConfig and their defaults
LATENT_YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}


def add_args(parser: Any) -> Any:
    """Add the options of a training on rollouts to Megatron's parser; returns the parser."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    add_to(parser, TransformerConfig.__dataclass_fields__)
    return parser


def check_args(args: Any) -> None:
    """End the process for arguments or rollout stores that could not be replayed exactly.

    `validate_args` calls this before any process group exists. A single process opens its store
    here, so that a wrong store is refused early. Several ranks open the store in seams/pretrain.py,
    where one rank can tell the others what it found.

    Args:
        args: Megatron's validated arguments. Without any option of megatron-r3 nothing is checked.
            With MLA the arguments in LATENT_YARN are added.
    """
    _give_yarn_to_latent_attention(args)
    given = (getattr(args, option.name) for option in OPTIONS if not option.field)
    if not args.moe_router_replay and all(one is None for one in given):
        return
    # imported here, because trainings without options of megatron-r3 call this function too
    from megatron_r3.seams.option import all_refusals
    from megatron_r3.train.open_store import open_store
    from megatron_r3.train.options import RolloutOptions
    from megatron_r3.train.refuse import refuse

    if args.moe_router_replay:
        from megatron.core.transformer.transformer_config import TransformerConfig

        if reasons := all_refusals(args, TransformerConfig):
            refuse("--moe-router-replay: " + "; ".join(reasons))
    in_loop = args.rollouts is None and getattr(args, "perform_rl_step", False)
    try:
        BY_NAME["rl_write_rollouts"].refuse(args, look)
        if in_loop and args.moe_router_replay:
            from megatron_r3.seams.rl import refuse_in_loop

            refuse_in_loop(args)
        elif args.rollouts is None:
            refuse_without_rollouts(args)
        else:
            options = RolloutOptions.from_args(args)
            if args.world_size == 1:
                open_store(options)
    except ValueError as error:
        refuse(str(error))


def _give_yarn_to_latent_attention(args: Any) -> None:
    """Have MLA take `--yarn-beta-fast` and so on, which Megatron gives to other attention only.

    Megatron fills each field of an MLATransformerConfig from the argument with the field's name,
    such as `beta_fast`, and has no option that sets this argument.
    """
    if getattr(args, "multi_latent_attention", False):
        for name, default in LATENT_YARN.items():
            given = getattr(args, f"yarn_{name}", None)
            setattr(args, name, default if given is None else given)
