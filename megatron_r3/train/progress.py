"""How far a training is, and what its checkpoint remembers of the rollouts that it has used.

Megatron counts `curr_iteration` and `consumed_train_samples` in its arguments while it trains, and
saves its arguments in every checkpoint. The entries of the ledger are put into these arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

Entries = list[dict[str, Any]]  # what `megatron_r3.train.ledger` writes


class MegatronProgress:
    """How far a training of `megatron.training` is.

    Args:
        args: Megatron's arguments, which it updates while it trains.
    """

    def __init__(self, args: Any) -> None:
        self._args = args

    @property
    def iteration(self) -> int:
        """The iteration that runs, from 0."""
        return int(self._args.curr_iteration)

    @property
    def last_iteration(self) -> int:
        """How many iterations the whole training has.

        With --train-samples it is 0 until Megatron has built the model and computed the number.
        """
        return int(self._args.train_iters or 0)

    @property
    def consumed_samples(self) -> int:
        """How many samples the finished iterations have used."""
        return int(self._args.consumed_train_samples)

    def remember(self, entries: Entries) -> None:
        """Put the entries into Megatron's arguments, which are saved in every checkpoint."""
        self._args.rollouts_used = entries

    def remembered(self) -> Entries:
        """The entries of the loaded checkpoint, the same on all ranks; empty if it has none.

        The first rank reads the saved arguments again, because Megatron's `load_checkpoint` does
        not return them, and broadcasts the entries.
        """
        entries: list[Any] = [None]
        if torch.distributed.get_rank() == 0:
            saved = next(_saved_arguments(self._args), None)
            entries = [getattr(saved, "rollouts_used", None)]
        torch.distributed.broadcast_object_list(entries, src=0)
        return list(entries[0] or [])


def checkpoint_directories(args: Any, base: str | None) -> tuple[str, ...]:
    """The directories in which checkpoints may lie, by Megatron's arguments.

    Args:
        base: --save or --load; None if the option was not given.
    """
    named = [base, getattr(args, "non_persistent_global_ckpt_dir", None)]
    if base is not None:
        named.append(str(Path(base) / "non_persistent"))
    return tuple(name for name in named if name is not None)


def _saved_arguments(args: Any) -> Iterator[Any]:
    """The arguments inside the checkpoint that was loaded, in either of Megatron's formats.

    A distributed checkpoint has the arguments in its common part. In the older format each rank's
    file has them beside the weights; the file is mapped into memory, so no weight is read.
    """
    from megatron.core import dist_checkpointing

    for folder in checkpoint_directories(args, args.load):
        saved = Path(folder) / f"iter_{args.iteration:07d}"
        if (saved / "metadata.json").exists():
            yield dist_checkpointing.load_common_state_dict(str(saved)).get("args")
        for file in sorted(saved.glob("mp_rank_00*/model_optim_rng.pt")):
            yield torch.load(file, map_location="cpu", mmap=True, weights_only=False).get("args")
