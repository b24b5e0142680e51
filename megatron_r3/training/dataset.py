"""Rollouts as training samples: what a Megatron batch carries, and one field more, the row ids."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_r3.rows import PADDING
from megatron_r3.store.reader import RolloutStore
from megatron_r3.store.schema import StoreError
from megatron_r3.training.losses import group_normalised

# what a rollout has for each input token, and what padding holds
_FILL = {
    "tokens": 0,
    "labels": 0,
    "rows": PADDING,
    "loss_mask": 0.0,
    "sampled_logprobs": 0.0,
    "advantages": 0.0,
}
SEQUENCE_FIELDS = (*_FILL, "position_ids")


class RolloutDataset(torch.utils.data.Dataset):
    """Sample i is rollout i - start modulo their number, in store order.

    A training input is tokens[:-1], so it has N - 1 tokens: exactly those that have routes.

    Args:
        store: the rollouts; none longer than `seq_length + 1` tokens.
        seq_length: S, to which samples are padded on the right.
        num_samples: how many samples training will draw; more than there are rollouts is more
            than one epoch.
        start: the sample of the training that is the first rollout of the store. In a training that
            was resumed with a new store, the samples before it came from another store.
    """

    def __init__(
        self, store: RolloutStore, seq_length: int, num_samples: int | None = None, start: int = 0
    ) -> None:
        self.store = store
        self.seq_length = seq_length
        self.start = start
        self.num_samples = max(num_samples or 0, start + len(store))
        self.reward = store.column("reward")
        self.advantage = group_normalised(self.reward, store.groups())

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Fields of length S: tokens, labels, position_ids and rows int64; loss_mask,
        sampled_logprobs and advantages float32; and the rewards.

        Position t predicts token t + 1, and its loss_mask, log-prob and advantage are those of
        token t + 1. Example: prompt [5, 6], response [7, 8], S = 4:
        tokens [5, 6, 7, 0], labels [6, 7, 8, 0], loss_mask [0, 1, 1, 0], rows [0, 1, 2, -1].
        """
        return self._sample([(index - self.start) % len(self.store)], [self.seq_length])

    def _sample(self, rollouts: list[int], lengths: list[int]) -> dict[str, Tensor]:
        """These rollouts one after the other, each padded to its length."""
        documents = [self._document(rollout) for rollout in rollouts]
        fields: dict[str, Tensor] = {}
        for name, fill in _FILL.items():
            values = np.full(self.seq_length, fill, documents[0][name].dtype)
            start = 0
            for document, length in zip(documents, lengths, strict=False):
                values[start : start + len(document[name])] = document[name]
                start += length
            fields[name] = torch.from_numpy(values)
        positions = np.concatenate([np.arange(length) for length in lengths])
        fields["position_ids"] = torch.from_numpy(positions)
        fields["reward"] = torch.from_numpy(self.reward[rollouts])
        return fields

    def _document(self, rollout: int) -> dict[str, np.ndarray]:
        fields = self.store.fields(rollout)
        response = fields["response"][1:].astype(np.float32)
        return {
            "tokens": fields["tokens"][:-1].astype(np.int64),
            "labels": fields["tokens"][1:].astype(np.int64),
            "rows": self.store.row_ids(rollout),
            "loss_mask": response,
            "sampled_logprobs": fields["logprobs"][1:],
            "advantages": response * self.advantage[rollout],
        }


class FollowedRollouts(RolloutDataset):
    """Sample i is rollout i - start of a store that grows: one that is not there is waited for.

    Advantages are normalised over a whole group, so a group lies in one shard: a group whose second
    half came with the next shard would have been normalised without that half.

    Args:
        num_samples: how many samples training will draw.
    """

    def __init__(
        self, store: RolloutStore, seq_length: int, num_samples: int, start: int = 0
    ) -> None:
        super().__init__(store, seq_length, num_samples, start)
        self.num_samples = num_samples
        self.reward = self.advantage = np.zeros(0, np.float32)
        self._num_shards = 0
        self._groups: set[tuple[int, int]] = set()
        self._take_new()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """The fields that RolloutDataset gives.

        Raises:
            StoreError: the rollout does not come in time, or what comes cannot be used.
        """
        self.store.wait_for(index - self.start)
        self._take_new()
        return self._sample([index - self.start], [self.seq_length])

    def _take_new(self) -> None:
        for shard in self.store.shards[self._num_shards :]:
            versions, groups = shard.tensors["policy_version"], shard.tensors["group"]
            keys = {*zip(versions.tolist(), groups.tolist(), strict=True)}
            if again := sorted(keys & self._groups):
                version, group = again[0]
                raise StoreError(
                    f"{shard.path}: group {group} of policy version {version} began in an earlier "
                    "shard: in a store that is followed, a group must lie in one shard"
                )
            reward = shard.tensors["reward"]
            # a group counts inside a policy version: number the pairs 0, 1, ...
            number = np.unique(np.stack([versions, groups], 1), axis=0, return_inverse=True)[1]
            self.reward = np.append(self.reward, reward)
            advantage = group_normalised(reward, number.reshape(-1))
            self.advantage = np.append(self.advantage, advantage)
            self._groups |= keys
            self._num_shards += 1


class PackedRollouts(RolloutDataset):
    """Sample i is pack i - start modulo their number: rollouts in store order, as many as fit.

    Every rollout is padded on the right to a multiple of `align`, and a pack to S by a document of
    padding alone.

    Args:
        align: what context parallelism splits a document into, 2 * CP, else 1; divides S.
    """

    def __init__(
        self,
        store: RolloutStore,
        seq_length: int,
        num_samples: int | None = None,
        align: int = 1,
        start: int = 0,
    ) -> None:
        super().__init__(store, seq_length, num_samples, start)
        assert seq_length % align == 0, f"{seq_length} is no multiple of {align}"
        inputs = store.column("num_tokens") - 1
        self.lengths = -(-inputs // align) * align  # rounded up: 13 becomes 16 with align 8
        self.packs: list[list[int]] = []
        room = 0
        for rollout, length in enumerate(self.lengths.tolist()):
            if length > room:
                self.packs.append([])
                room = seq_length
            self.packs[-1].append(rollout)
            room -= length
        self.num_samples = max(num_samples or 0, start + len(self.packs))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """A RolloutDataset's fields, and cu_seqlens, int32 `[D + 1]`: where the documents begin.

        Example with S = 64 and rollouts of 16 and 24 tokens: cu_seqlens is [0, 16, 40, 64], and the
        third document is padding alone.
        """
        rollouts = self.packs[(index - self.start) % len(self.packs)]
        lengths = self.lengths[rollouts].tolist()
        tail = self.seq_length - sum(lengths)
        lengths += [tail] if tail else []
        sample = self._sample(rollouts, lengths)
        sample["cu_seqlens"] = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        return sample
