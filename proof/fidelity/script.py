"""Stands for a user's training script: the data sets and the forward step that `pretrain()` gets.

A training on rollouts uses these data sets for evaluation only; a training without our options
trains on them. Megatron is imported at the top, so only ranks may import this module.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.training import get_args

from megatron_r3.train.pretrain_gpt import forward_step
from proof.fidelity.models import VOCAB_SIZE

__all__ = ["datasets", "forward_step"]


class MadeUpText(torch.utils.data.Dataset):
    """Sequences of random tokens; an index gives the same sequence on every rank."""

    def __init__(self, num_samples: int, seq_length: int) -> None:
        self.num_samples, self.seq_length = num_samples, seq_length

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """A sample with `tokens`, `labels`, `loss_mask` and `position_ids`."""
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(1, VOCAB_SIZE, (self.seq_length + 1,), generator=generator)
        return {
            "tokens": ids[:-1],
            "labels": ids[1:],
            "loss_mask": torch.ones(self.seq_length),
            "position_ids": torch.arange(self.seq_length),
        }


def datasets(sizes: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Training, validation and test data, each with as many samples as Megatron asks for."""
    length = get_args().seq_length
    train, valid, test = (MadeUpText(max(size or 0, 1), length) for size in sizes)
    return train, valid, test


datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank builds its own
