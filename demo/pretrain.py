"""The demo's first training: problems with their answers, so that the model and its router learn.

This script knows nothing of rollouts. With `--rollouts DIR` a patched `pretrain()` trains on the
rollouts instead of the problems, as it does in every script that calls `pretrain()`.
"""

from __future__ import annotations

import importlib
import os

import torch
from megatron.training import get_args

from megatron_r3.train.launch import train
from megatron_r3.train.pretrain_gpt import forward_step

task = importlib.import_module(os.environ.get("DEMO_TASK", "demo.task"))


class Problems(torch.utils.data.Dataset):
    """Problems with their answers, each in a sequence of its own."""

    def __init__(self, num_samples: int, seq_length: int) -> None:
        self.num_samples, self.seq_length = num_samples, seq_length

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """The tensors of a problem, each `[seq_length]`; the loss is over what the model says."""
        tokens, said = task.example(index)
        ids = torch.zeros(self.seq_length + 1, dtype=torch.int64)
        ids[: len(tokens)] = torch.tensor(tokens)
        # The label of position i is token i + 1.
        loss_mask = torch.zeros(self.seq_length)
        loss_mask[: len(said) - 1] = torch.tensor(said[1:], dtype=torch.float32)
        position_ids = torch.arange(self.seq_length)
        return {
            "tokens": ids[:-1],
            "labels": ids[1:],
            "loss_mask": loss_mask,
            "position_ids": position_ids,
        }


def datasets(sizes, vp_stage=None):
    """The problems to train on, and None for validation and test."""
    return Problems(max(sizes[0], 1), get_args().seq_length), None, None


datasets.is_distributed = True  # every rank makes its own datasets: nothing is broadcast


if __name__ == "__main__":
    train(datasets, forward_step)
