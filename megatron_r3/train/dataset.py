"""Rollouts as training samples: a Megatron batch, and the fields that loss and replay need.

Shape suffixes (docs/glossary.md): N, T.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_r3.data.store.index import Index
from megatron_r3.data.store.reader import RolloutStore
from megatron_r3.data.store.schema import StoreError
from megatron_r3.replay.rows import PADDING
from megatron_r3.train.losses.advantages import ADVANTAGES, group_spread
from megatron_r3.train.schedule import SOURCES, STORED, UseOfRollouts

# the fields with one value for each input token, and their values at padding
_FILL = {
    "tokens": 0,
    "labels": 0,
    "rows": PADDING,
    "loss_mask": 0.0,
    "sampled_logprobs": 0.0,
    "advantages": 0.0,
    "document": 0,
    "source": 0,
    "turn": -1,
    "version": -1,
}
SEQUENCE_FIELDS = (*_FILL, "position_ids")


class RolloutDataset(torch.utils.data.Dataset):
    """The rollouts of a store as samples of a training.

    With one epoch and no seed, sample i is rollout (i - `use.start`) modulo the number of rollouts,
    in store order. With several epochs or a seed, `use.schedule` says which rollout sample i is. A
    training input is tokens[:-1]: exactly these N - 1 tokens have rows in the store.

    Args:
        store: the rollouts; none has more than `seq_length + 1` tokens.
        use: what the training does with the rollouts.
        num_samples: how many samples training will draw. The dataset has at least `use.start`
            samples plus one for each rollout.

    Raises:
        StoreError: the stored advantages are asked for, and a rollout has none.
    """

    def __init__(
        self, store: RolloutStore, use: UseOfRollouts, num_samples: int | None = None
    ) -> None:
        self.store, self.use = store, use
        self.num_samples = max(num_samples or 0, use.start + len(store))
        if use.advantages == STORED:
            store.column("advantage")  # refuses a rollout without an advantage
        self._take(store.index)

    def _take(self, index: Index) -> None:
        """Take rewards and versions of all rollouts from an index, and compute their advantages."""
        columns, groups = index.columns, index.groups()
        self.reward, self.version = columns["reward"], columns["policy_version"]
        self.newest = columns["newest_version"]
        self.uniform = group_spread(self.reward, groups) == 0
        if self.use.advantages == STORED:
            self.advantage = columns["advantage"]
        else:
            self.advantage = ADVANTAGES[self.use.advantages](self.reward, groups)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """The fields of a sample. Position t predicts token t + 1.

        Of length `seq_length`, int64:
        - `tokens`, `labels` (tokens t and t + 1), `position_ids`, `rows`
        - `document`: the number of the rollout in the sample
        - `source`: where the routes of token t come from, an index of `SOURCES`
        - `turn`: to which turn token t + 1 belongs, from 0 on; -1 if token t + 1 was not sampled
        - `version`: which policy version sampled token t + 1; -1 if token t + 1 was not sampled

        Of length `seq_length`, float32, about token t + 1:
        - `loss_mask`, `sampled_logprobs`, `advantages`

        With one entry for each rollout of the sample:
        - `reward`, and `uniform`: whether all rewards of the rollout's group are equal

        A scalar:
        - `collection`: the number of the collection that the sample belongs to

        Example: prompt [5, 6], response [7, 8], `seq_length` 4: tokens [5, 6, 7, 0], labels
        [6, 7, 8, 0], loss_mask [0, 1, 1, 0], rows [0, 1, 2, -1].
        """
        return self.of_store(self.use.schedule.in_store(index - self.use.start))

    def of_store(self, sample: int) -> dict[str, Tensor]:
        """The fields of a sample of the store; after the last sample the first one comes again."""
        return self._sample([sample % len(self.store)], [self.use.seq_length], sample)

    def rollouts_of(self, samples: range) -> list[int]:
        """The indices of these samples' rollouts in the store."""
        return [sample % len(self.store) for sample in samples]

    @property
    def num_in_store(self) -> int:
        """How many samples the store has."""
        return len(self.store)

    def check_collection(self) -> None:
        """Refuse a store that is too small for the mini-steps of one collection.

        Raises:
            StoreError: two mini-steps of a collection would use the same rollouts.
        """
        schedule = self.use.schedule
        wanted = len(schedule.of_collection(0))
        where = " ".join(map(str, self.store.directories))
        if schedule.mini_steps > 1 and wanted > self.num_in_store:
            raise StoreError(
                f"{where}: has {self.num_in_store} samples, and a "
                f"collection of {schedule.mini_steps} mini-steps of {schedule.batch} needs "
                f"{wanted}: lower --global-batch-size or --rollouts-mini-steps; to use "
                "rollouts several times, give --rollouts-epochs"
            )

    def _sample(self, rollouts: list[int], lengths: list[int], sample: int) -> dict[str, Tensor]:
        """The fields of one sample: these rollouts one after the other, padded to `lengths`.

        Args:
            lengths: the length of each rollout with its padding. One more length may follow: the
                length of a last document, which is padding alone.
            sample: the number of the sample in the store.
        """
        documents = [self._document(rollout, sample) for rollout in rollouts]
        fields: dict[str, Tensor] = {}
        for name, fill in _FILL.items():
            values = np.full(self.use.seq_length, fill, documents[0][name].dtype)
            start = 0
            for number, (document, length) in enumerate(zip(documents, lengths, strict=False)):
                value = number if name == "document" else document[name]
                values[start : start + len(document["rows"])] = value
                start += length
            fields[name] = torch.from_numpy(values)
        positions = np.concatenate([np.arange(length) for length in lengths])
        fields["position_ids"] = torch.from_numpy(positions)
        fields["reward"] = torch.from_numpy(self.reward[rollouts])
        fields["uniform"] = torch.from_numpy(self.uniform[rollouts])
        fields["collection"] = torch.tensor(self.use.schedule.collection_of(sample))
        return fields

    def _document(self, rollout: int, sample: int) -> dict[str, np.ndarray]:
        fields = self.store.fields(rollout)
        response = fields["response"][1:].astype(np.float32)
        rows = self.store.row_ids(rollout)
        source = self.use.stale_source if self._is_stale(rollout, sample) else self.use.source
        source_T = np.full(len(rows), SOURCES.index(source), np.int64)
        shard, index = self.store.find(rollout)
        turn_N = np.full(len(rows) + 1, -1, np.int64)
        for turn, (first, end) in enumerate(shard.turns(index).tolist()):
            turn_N[first:end] = turn
        if source == "rollout":  # without a recorded route, the router chooses live
            source_T[~fields["recorded"]] = SOURCES.index("live")
        return {
            "tokens": fields["tokens"][:-1].astype(np.int64),
            "labels": fields["tokens"][1:].astype(np.int64),
            "rows": rows,
            "loss_mask": response,
            "sampled_logprobs": fields["logprobs"][1:],
            "advantages": response * self.advantage[rollout],
            "document": np.zeros(len(rows), np.int64),
            "source": source_T,
            "turn": turn_N[1:],
            "version": self.store.versions(rollout, fields["response"])[1:],
        }

    def _is_stale(self, rollout: int, sample: int) -> bool:
        """Whether a rollout of a sample is too old to replay its own routes.

        The rollout's oldest span is compared with the newest span of any rollout up to the end of
        the sample's collection. Later rollouts are not looked at, so all ranks get the same answer,
        also in a store that grows.
        """
        if self.use.replay_max_lag is None:
            return False
        newest = int(self.newest[: self._end_of_collection(sample)].max())
        return newest - int(self.version[rollout]) > self.use.replay_max_lag

    def _end_of_collection(self, sample: int) -> int:
        """The number of rollouts of the store up to the end of a sample's collection."""
        schedule = self.use.schedule
        return min(schedule.of_collection(schedule.collection_of(sample)).stop, len(self.store))


class FollowedRollouts(RolloutDataset):
    """The samples of a store that grows; methods wait until the rollouts that they need are there.

    A group must lie in one shard: advantages are computed from the rewards of a whole group, and
    the first rollouts of a group may be used before the next shard comes.

    Args:
        num_samples: how many samples training will draw.

    Raises:
        StoreError: a shard has rollouts of a group that began in an earlier shard.
    """

    def __init__(self, store: RolloutStore, use: UseOfRollouts, num_samples: int) -> None:
        self._num_shards = 0
        self._groups: set[tuple[int, int]] = set()
        super().__init__(store, use, num_samples)
        self.num_samples = num_samples
        self._take_new()

    def of_store(self, sample: int) -> dict[str, Tensor]:
        """The fields of a sample of the store, after a wait for its rollout.

        With `replay_max_lag` the wait is for all rollouts of the sample's collection.

        Raises:
            StoreError: a rollout does not come in time, or a new shard cannot be used.
        """
        # Which routes are too old depends on the newest policy of the collection. With a part of
        # the collection, ranks that see different numbers of shards would disagree.
        last, schedule = sample, self.use.schedule
        if self.use.replay_max_lag is not None:
            last = schedule.of_collection(schedule.collection_of(sample)).stop - 1
        self.store.wait_for(last)
        self._take_new()
        return super().of_store(sample)

    def rollouts_of(self, samples: range) -> list[int]:
        """Wait for the rollouts of these samples, and return their indices, the samples' numbers.

        Other ranks use some of these rollouts, so this rank may not have seen their shards yet.

        Raises:
            StoreError: a rollout does not come in time, or a new shard cannot be used.
        """
        self.store.wait_for(samples.stop - 1)
        self._take_new()
        return list(samples)

    def _take_new(self) -> None:
        index = self.store.index  # another thread may replace it
        if len(index) == self._num_shards:
            return
        for shard in index[self._num_shards :]:
            versions, groups = (shard.tensors[name] for name in ("policy_version", "group"))
            keys = {*zip(versions.tolist(), groups.tolist(), strict=True)}
            if again := sorted(keys & self._groups):
                version, group = again[0]
                raise StoreError(
                    f"{shard.path}: group {group} of policy version {version} began in an earlier "
                    "shard: with --rollouts-follow, write each group whole into one shard"
                )
            self._groups |= keys
            self._num_shards += 1
        self._take(index)


class PackedRollouts(RolloutDataset):
    """Packs of rollouts as samples: sample i is pack i where a RolloutDataset has rollout i.

    A pack has the next rollouts in store order, as many as fit into `seq_length`. Each rollout is
    padded on the right to a multiple of `align`. If that leaves room, a last document, which is
    padding alone, fills the pack.

    Args:
        align: 2 * CP, the number of pieces into which context parallelism cuts a document; 1
            without context parallelism. `seq_length` must be a multiple of `align`.
    """

    def __init__(
        self,
        store: RolloutStore,
        use: UseOfRollouts,
        num_samples: int | None = None,
        align: int = 1,
    ) -> None:
        super().__init__(store, use, num_samples)
        seq_length, start = use.seq_length, use.start
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

    def of_store(self, sample: int) -> dict[str, Tensor]:
        """The fields of a RolloutDataset, and `cu_seqlens`: where the documents begin and end.

        `cu_seqlens` is int32, with one entry more than there are documents. Example with
        `seq_length` 64 and inputs of 16 and 24 tokens: `cu_seqlens` is [0, 16, 40, 64], and the
        third document is padding alone.
        """
        rollouts = self.packs[sample % len(self.packs)]
        lengths = self.lengths[rollouts].tolist()
        tail = self.use.seq_length - sum(lengths)
        lengths += [tail] if tail else []
        fields = self._sample(rollouts, lengths, sample)
        fields["cu_seqlens"] = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        return fields

    @property
    def num_in_store(self) -> int:
        """How many packs the store has."""
        return len(self.packs)

    def rollouts_of(self, samples: range) -> list[int]:
        """The indices in the store of the rollouts in these packs."""
        return [rollout for i in samples for rollout in self.packs[i % len(self.packs)]]

    def _end_of_collection(self, sample: int) -> int:
        schedule = self.use.schedule
        samples = schedule.of_collection(schedule.collection_of(sample))
        return self.packs[min(samples.stop, len(self.packs)) - 1][-1] + 1
