"""Write a collection of Megatron's RL loop as a shard of a rollout store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_r3.data.store.schema import SamplingSettings, StoreInfo
from megatron_r3.data.store.writer import write_shard

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_r3.rl.rl_options import LoopOptions
    from megatron_r3.rl.turns import TurnRoutes


def write_collection(options: LoopOptions, turns: TurnRoutes, version: str) -> Path:
    """Append the turns of a collection to the store `options.store`, a rollout for each turn.

    Turns of one rollout are samples of one group, with the reward of the rollout. The policy
    versions are the generation epochs of the loop. The router digests are left out: this process
    no longer has the weights that sampled.

    Args:
        version: the version of Megatron, whose engine sampled.

    Returns:
        The new file.

    Raises:
        ValueError: a store may not hold one of the turns, which the message names; or the store's
            directory cannot be written.
    """
    assert options.store is not None
    info = StoreInfo.of_model(
        options.shape,
        "megatron",
        version,
        vocab_size=options.vocab_size,
        sampling=SamplingSettings(**options.sampling, logprobs_of="raw"),
    )
    rollouts = [turns.rollout(number) for number in range(len(turns.turns))]
    for turn, rollout in zip(turns.turns, rollouts, strict=True):
        rollout.check(turn.name, options.vocab_size)
    return write_shard(options.store, info, rollouts)
