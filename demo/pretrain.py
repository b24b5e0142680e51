"""A Megatron training script, for a tree that has no pretrain_gpt.py (PyPI's).

It knows nothing of rollouts: with `--rollouts DIR` a patched `pretrain()` swaps them in. `train`
calls it as the release wants it.
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.training import get_args

from demo.task import problem
from megatron_r3.launch import train


class Problems(torch.utils.data.Dataset):
    """Problems with their answers, each in a sequence of its own."""

    def __init__(self, num_samples: int, seq_length: int) -> None:
        self.num_samples, self.seq_length = num_samples, seq_length

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """tokens, labels, loss_mask (the answer), position_ids."""
        prompt, answer = problem(index)
        ids = torch.zeros(self.seq_length + 1, dtype=torch.int64)
        ids[: len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        loss_mask = torch.zeros(self.seq_length)
        loss_mask[len(prompt) - 1 : len(prompt) + len(answer) - 1] = 1.0
        position_ids = torch.arange(self.seq_length)
        return {
            "tokens": ids[:-1],
            "labels": ids[1:],
            "loss_mask": loss_mask,
            "position_ids": position_ids,
        }


def datasets(sizes, vp_stage=None):
    """Training problems; no validation."""
    return Problems(max(sizes[0], 1), get_args().seq_length), None, None


datasets.is_distributed = True  # every rank builds them: nothing is broadcast


def loss_func(loss_mask, output):
    """Sum over the answer's tokens."""
    loss, num_tokens = (output.float() * loss_mask).sum(), loss_mask.sum()
    return loss, num_tokens.int(), {"lm loss": torch.stack([loss.detach(), num_tokens])}


def forward_step(data_iterator, model):
    """One microbatch of problems."""
    batch = {k: v.cuda(non_blocking=True) for k, v in next(data_iterator).items()}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


if __name__ == "__main__":
    train(datasets, forward_step)
