"""Rollouts as training samples: what a Megatron batch carries, and one field more, the row ids.

Shape suffixes: N tokens of a rollout, S sequence length.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_r3.rl.advantages import group_normalised
from megatron_r3.rows import PADDING
from megatron_r3.store.reader import RolloutStore

__all__ = ["RolloutDataset"]


class RolloutDataset(torch.utils.data.Dataset):
    """Sample i is rollout i modulo their number, in store order.

    A training input is tokens[:-1], so it has N - 1 tokens: exactly those that have routes.

    Args:
        store: the rollouts; none longer than `seq_length + 1` tokens.
        seq_length: S, to which samples are padded on the right.
        num_samples: how many samples training will draw; more than there are rollouts is more
            than one epoch.
    """

    def __init__(
        self, store: RolloutStore, seq_length: int, num_samples: int | None = None
    ) -> None:
        self.store = store
        self.seq_length = seq_length
        self.num_samples = max(num_samples or 0, len(store))
        self.reward = store.column("reward")
        self.advantage = group_normalised(self.reward, store.groups())

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Fields of length S: tokens, labels, position_ids and rows int64; loss_mask,
        sampled_logprobs and advantages float32; and the scalar reward.

        Position t predicts token t + 1, and its loss_mask, log-prob and advantage are
        those of token t + 1.
        """
        rollout = index % len(self.store)
        fields = self.store.fields(rollout)
        response = fields["response"][1:].astype(np.float32)
        return {
            "tokens": self._pad(fields["tokens"][:-1], np.int64),
            "labels": self._pad(fields["tokens"][1:], np.int64),
            "position_ids": torch.arange(self.seq_length),
            "rows": self._pad(self.store.row_ids(rollout), np.int64, PADDING),
            "loss_mask": self._pad(response, np.float32),
            "sampled_logprobs": self._pad(fields["logprobs"][1:], np.float32),
            "advantages": self._pad(response * self.advantage[rollout], np.float32),
            "reward": torch.tensor(self.reward[rollout]),
        }

    def _pad(self, values: np.ndarray, dtype: type, fill: int = 0) -> Tensor:
        padded: np.ndarray = np.full(self.seq_length, fill, dtype)
        padded[: len(values)] = values
        return torch.from_numpy(padded)
