"""Put the weights of --rollouts-reference into the models of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_r3.train.refuse import refuse
from megatron_r3.weights.bridge import VARIABLE, choice_of_environment, chosen_family
from megatron_r3.weights.checkpoint import load_whole
from megatron_r3.weights.directory import CONFIG
from megatron_r3.weights.write_policy import read_policy

# Arguments as `load_checkpoint` expects them, those of a training that has not begun. Megatron does
# not load the state of its rerun machine if data-parallel sizes differ; no checkpoint has 0.
_AS_NEW = {
    "ckpt_step": None,
    "pretrained_checkpoint": None,
    "non_persistent_ckpt_type": None,
    "consumed_train_samples": 0,
    "skipped_train_samples": 0,
    "consumed_valid_samples": 0,
    "data_parallel_size": 0,
}


def load_reference(args: Any, models: list[torch.nn.Module]) -> None:
    """Load a transformers directory, or the newest weights of a Megatron checkpoint.

    All ranks must call this function. An error ends the training.

    Args:
        args: Megatron's arguments; they are unchanged after the call.
        models: this rank's model chunks.
    """
    from megatron.core.num_microbatches_calculator import update_num_microbatches

    directory, before = Path(args.rollouts_reference), dict(vars(args))
    try:
        if (directory / CONFIG).is_file():
            family = chosen_family(choice_of_environment(), directory, models, VARIABLE)
            read_policy(models, directory, family)
            return
        vars(args).update(_AS_NEW, load=str(directory))
        load_whole(models, args, "--rollouts-reference")
    except ValueError as error:
        refuse(str(error), repeats=False)
    vars(args).clear()
    vars(args).update(before)
    update_num_microbatches(args.consumed_train_samples, consistency_check=False)
