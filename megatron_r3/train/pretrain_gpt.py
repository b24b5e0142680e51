"""A training script on rollouts, for a tree that has no pretrain_gpt.py (megatron-core from PyPI).

    torchrun ... -m megatron_r3.train.pretrain_gpt <your arguments> --eval-iters 0 --rollouts DIR

The tree must be patched: its `pretrain()` then takes data and loss from the rollouts. This script
has no data of its own: without --rollouts, or with --eval-iters other than 0, it ends with one line
that says so. `forward_step` and `loss_func` compute plain language modelling. A script that brings
its own data can import them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_r3.train.launch import train


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The sum of the losses of the tokens that count.

    Args:
        loss_mask: [B, S], 1 for a token that counts and 0 for others.
        losses: [B, S], the model's output: the cross entropy of each token.

    Returns:
        The sum, the number of tokens that count, and both as `lm loss` for Megatron's log, as
        Megatron's --calculate-per-token-loss expects.
    """
    total, num_tokens = (losses.float() * loss_mask).sum(), loss_mask.sum()
    return total, num_tokens.int(), {"lm loss": torch.stack([total.detach(), num_tokens])}


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """Run the forward pass of one micro-batch of language modelling.

    Args:
        data_iterator: yields `tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float32),
            each [B, S].
        model: a GPTModel.

    Returns:
        The model's output, and a function from the output to what `loss_func` returns.
    """
    batch = {name: value.cuda(non_blocking=True) for name, value in next(data_iterator).items()}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def no_datasets(sizes: list[int], vp_stage: int | None = None) -> Any:
    """End the training when Megatron asks for the script's own data, because there is none.

    Raises:
        SystemExit: always, after one line that says what to do.
    """
    from megatron.training import get_args

    # Imported here: `proof/fidelity/off.py` imports `forward_step` from this file in a process in
    # which `refuse`, like most modules of megatron_r3, cannot be imported.
    from megatron_r3.train.refuse import refuse

    if getattr(get_args(), "rollouts", None) is None:
        refuse("this script has no data of its own: give --rollouts DIR, a rollout store")
    # With --rollouts Megatron asks a script for validation data alone. Returning None would not
    # help: Megatron 0.19 would still evaluate, with None as the iterator.
    refuse("this script has no data for validation: give --eval-iters 0")


# Have Megatron call `no_datasets` on every rank: otherwise ranks would wait for one that has ended.
no_datasets.is_distributed = True  # type: ignore[attr-defined]


if __name__ == "__main__":
    train(no_datasets, forward_step)
