"""The first training of the comparison's policy, as a Megatron script with one option of its own.

    ... -m megatron_r3.cpu proof/comparison/pretrain.py --wrong-labels SHARE <Megatron's arguments>

Problems with their answers, of which a share of the digits is wrong. A policy that learns from
wrong labels is unsure; the same policy a few steps later on right ones is sharp.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from megatron.training import get_args

from megatron_r3.train.launch import train
from megatron_r3.train.pretrain_gpt import forward_step
from proof.comparison.task import problem


class Problems(torch.utils.data.Dataset):
    """Problems with their answers, each in a sequence of its own."""

    def __init__(self, num_samples: int, seq_length: int, wrong_labels: float) -> None:
        self.num_samples, self.seq_length = num_samples, seq_length
        self.wrong_labels = wrong_labels

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """tokens, labels, loss_mask (the answer), position_ids."""
        prompt, answer = problem(index, self.wrong_labels)
        ids = torch.zeros(self.seq_length + 1, dtype=torch.int64)
        ids[: len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        # The label of position i is token i + 1. So the answer's first token is the label of the
        # prompt's last position.
        loss_mask = torch.zeros(self.seq_length)
        loss_mask[len(prompt) - 1 : len(prompt) + len(answer) - 1] = 1.0
        return {
            "tokens": ids[:-1],
            "labels": ids[1:],
            "loss_mask": loss_mask,
            "position_ids": torch.arange(self.seq_length),
        }


def main() -> None:
    """Take the option of this script off the command line, and train."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--wrong-labels", type=float, required=True)
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest

    def datasets(sizes: list[int], vp_stage: int | None = None) -> Any:
        """Training problems; no validation."""
        return Problems(max(sizes[0], 1), get_args().seq_length, own.wrong_labels), None, None

    datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank makes them
    train(datasets, forward_step)


if __name__ == "__main__":
    main()
