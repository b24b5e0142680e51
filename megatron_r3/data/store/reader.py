"""Reads a store: rollouts by index, routes by row id.

A row id counts the rows of all shards, in the order of the shards. So one integer names a rollout
and a token in it. Example: shard 0 has rollouts of 5 and 9 tokens, so it has 4 + 8 rows, with the
row ids 0 to 11. Row id 5 is row 1 of rollout 1. The first row of shard 1 has the row id 12.

Shape suffixes (docs/glossary.md): C, K, L, M, N, P, T, U.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron_r3.data.kept import KeptSets
from megatron_r3.data.rollout import Rollout, versions_of
from megatron_r3.data.store.files import SHARD_GLOB, shard_name, shards_in_order
from megatron_r3.data.store.header import PART_TOKENS
from megatron_r3.data.store.index import Index
from megatron_r3.data.store.kinship import Kinship, refuse_namesakes, without_collector
from megatron_r3.data.store.part_sums import locate
from megatron_r3.data.store.schema import StoreError, StoreInfo
from megatron_r3.data.store.shard import Shard
from megatron_r3.data.store.verify_shard import ReadChecks, verify_shard
from megatron_r3.replay.routes import Routes, id_dtype


class RolloutStore:
    """Every rollout of one or several store directories, as they are when this object is made.

    A shard that is written later is not seen; `follow.py` has a store that grows.

    Args:
        directories: stores of the same model. Their rollouts follow each other in this order.
        mixed_policies: whether shards may come from different policies of one model. Then the
            fields of `StoreInfo.policy` may differ between shards, but no other field.

    Attributes:
        index: all shards, in a form that can be sent to other processes.

    Raises:
        StoreError: a directory has no shard; a shard is damaged, missing or there twice; two
            rollouts of a directory have one name; or the stores do not belong together.
    """

    index: Index
    _checks: ReadChecks | None = None

    def __init__(self, directories: Sequence[str | Path], mixed_policies: bool = False) -> None:
        self.directories = [Path(directory) for directory in directories]
        several = len(directories) > 1
        if several and len({folder.resolve() for folder in self.directories}) < len(directories):
            raise StoreError(
                f"{' '.join(map(str, directories))}: one store is named twice: name it once"
            )
        opened: list[Shard] = []
        kinship = Kinship(mixed_policies)
        for directory in self.directories:
            numbers = shards_in_order(directory)
            if not numbers and not directory.is_dir():
                raise StoreError(f"{directory}: no such rollout store")
            if not numbers:
                raise StoreError(
                    f"{directory}: no {SHARD_GLOB} in it: not a rollout store, or an empty one"
                )
            with without_collector():
                for number in numbers:
                    shard = Shard.look(directory / shard_name(number))
                    kinship.check(shard, opened)
                    kinship.add(shard)
                    opened.append(shard)
        self.index = Index.of(self.directories, opened)
        if self.index.has_namesakes():
            refuse_namesakes(opened)

    @classmethod
    def told(cls, index: Index) -> RolloutStore:
        """The store of an index that this or another process made.

        A shard is opened when something in its file is first read.
        """
        store = cls.__new__(cls)
        store.directories = [Path(directory) for directory in index.directories]
        store.index = index
        return store

    def trained_on(self, checks: ReadChecks | None) -> None:
        """Make these checks from now on in `fields` and `routes`.

        Args:
            checks: None for no checks, if the store was verified before.
        """
        self._checks = checks

    @property
    def shards(self) -> Sequence[Shard]:
        """The shards, in the order of their rollouts."""
        return self.index

    @property
    def info(self) -> StoreInfo:
        """The info of the first shard; other shards may have another policy."""
        return self.index.infos[0]

    def refresh(self) -> None:
        """Do nothing; a store that grows looks for new shards here (`FollowedStore`)."""

    def wait_for(self, rollout: int) -> None:
        """Refuse a rollout that the store does not have; only a store that grows waits for it.

        Raises:
            StoreError: there is no rollout of this index.
        """
        if rollout >= len(self):
            raise StoreError(
                f"{self.directories[0]}: has no rollout {rollout}: it has "
                f"{len(self)}, numbered from 0"
            )

    def verify(self) -> None:
        """Check every byte, value and expert id of all shards.

        Raises:
            StoreError: as `verify_shard`.
        """
        for shard in self.shards:
            verify_shard(shard)

    def __len__(self) -> int:
        return int(self.index.first_rollout[-1])

    def shard_of_rollout(self, rollout: int) -> int:
        """The number, in `shards`, of the shard that holds a rollout."""
        assert 0 <= rollout < len(self), f"rollout {rollout} of {len(self)}"
        return int(np.searchsorted(self.index.first_rollout, rollout, side="right")) - 1

    def find(self, rollout: int) -> tuple[Shard, int]:
        """The shard that holds a rollout, and the rollout's index in this shard."""
        number = self.shard_of_rollout(rollout)
        return self.index[number], rollout - int(self.index.first_rollout[number])

    def name(self, rollout: int) -> str:
        """The name of a rollout in messages: the shard's path, and the rollout's index in it."""
        shard, index = self.find(rollout)
        return f"{shard.path}: rollout {index}"

    def row_ids(self, rollout: int) -> np.ndarray:
        """The row ids of all of a rollout's tokens but the last, int64 `[N - 1]`."""
        shard, index = self.find(rollout)
        first = self.index.first_row[self.shard_of_rollout(rollout)]
        return np.arange(shard.row_start_M[index], shard.row_start_M[index + 1]) + first

    def fields(self, rollout: int) -> dict[str, np.ndarray]:
        """A rollout's `tokens` int32, `response` bool, `logprobs` float32 and `recorded` bool.

        Raises:
            StoreError: the shard is damaged, was changed since it was opened, or has a value that
                the checks of `trained_on` refuse.
        """
        shard, index = self.find(rollout)
        fields = shard.read_tokens(index)
        if self._checks is not None:
            self._checks.check_values(shard, range(index, index + 1), fields)
        return fields | {name: fields[name].astype(bool) for name in ("response", "recorded")}

    def column(self, name: str) -> np.ndarray:
        """One tensor with a value for each rollout: reward, group, sample, policy_version, ...

        Raises:
            StoreError: the name is `advantage`, and a rollout has none; the message names the
                rollout.
        """
        if name == "advantage":
            for rollout in np.flatnonzero(np.isnan(self.index.columns[name]))[:1].tolist():
                self.find(rollout)[0].advantages_M()  # raises
        return self.index.columns[name]

    def newest_versions(self) -> np.ndarray:
        """The newest policy version that sampled tokens of each rollout, int64 `[M]`."""
        return self.index.columns["newest_version"]

    def recorded_share(self) -> float:
        """How many of all rows have routes, as a share from 0 to 1."""
        return float(self.index.table["recorded_rows"].sum() / self.index.first_row[-1])

    def groups(self) -> np.ndarray:
        """A number for each rollout, int64 `[M]`; rollouts of one group have the same number."""
        return self.index.groups()

    def rollout(self, rollout: int) -> Rollout:
        """One whole rollout; its routes are read and checked.

        Raises:
            StoreError: as `fields`, or the kept sets are damaged.
            RoutesError: a recorded row has wrong expert ids.
        """
        shard, index = self.find(rollout)
        fields = self.fields(rollout)
        routes = Routes.from_array(
            shard.read_rollout(index),
            self.info.num_experts,
            fields["recorded"],
            self.name(rollout),
        )
        return Rollout(
            tokens_N=fields["tokens"],
            response_N=fields["response"],
            logprobs_N=fields["logprobs"],
            reward=float(shard.tensors["reward"][index]),
            group=int(shard.tensors["group"][index]),
            policy_version=int(shard.tensors["policy_version"][index]),
            routes=routes,
            sample=int(shard.tensors["sample"][index]),
            turns_U2=shard.turns(index),
            prompt_digest=int(shard.tensors["prompt_digest"][index]),
            kept=shard.kept(index),
            versions_C2=shard.versions_C2(index),
            advantage=shard.advantage(index),
        )

    def versions(self, rollout: int, response_N: np.ndarray | None = None) -> np.ndarray:
        """The policy version that sampled each token, int64 `[N]`; -1 for tokens not sampled.

        Args:
            response_N: the rollout's `response`; None if the caller has not read it yet.

        Raises:
            StoreError: the shard is damaged, or was changed since it was opened.
        """
        shard, index = self.find(rollout)
        if response_N is None:
            response_N = shard.read_tokens(index)["response"].astype(bool)
        version = int(shard.tensors["policy_version"][index])
        return versions_of(shard.versions_C2(index), response_N, version)

    def kept(self, rollout: int) -> KeptSets | None:
        """The kept sets of a rollout's tokens; None if it has none.

        Raises:
            StoreError: the shard is damaged, or was changed since it was opened.
        """
        shard, index = self.find(rollout)
        return shard.kept(index)

    def kept_of_next(self, rows_T: np.ndarray) -> KeptSets:
        """For each row id, the kept set of the next token, which the row's logits predict.

        Example: a rollout has the tokens 5 9 7 3, and the last two were sampled. The rows belong to
        the tokens 5, 9 and 7. The row of 5 gets an empty set, since 9 was not sampled. The row of 9
        gets the kept set of 7, and the row of 7 gets the kept set of 3.

        Args:
            rows_T: int64, in any order. -1 (padding) gives an empty set. So does a row if its next
                token was not sampled, or if its rollout has no kept sets.

        Returns:
            T sets, in the order of the rows.

        Raises:
            StoreError: a shard is damaged, or was changed since it was opened.
        """
        parts, base = [KeptSets.none(0)], 0
        # the place of each row's set in the joined `parts`
        place_T = np.full(len(rows_T), -1, np.int64)
        for _, shard, here, rows in self._in_shards(rows_T):
            rollouts = np.searchsorted(shard.row_start_M, rows, side="right") - 1
            for rollout in np.unique(rollouts).tolist():
                kept = shard.kept(rollout)
                if kept is None:
                    continue
                of_it = rollouts == rollout
                # row r of a rollout is about token r, and predicts token r + 1
                place_T[here[of_it]] = base + rows[of_it] - shard.row_start_M[rollout] + 1
                parts.append(kept)
                base += len(kept.sizes_N)
        return KeptSets.joined(parts).take(place_T)

    def routes(
        self, rows_T: np.ndarray, layers: Sequence[int], into_LTK: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Routes by row id, for some MoE layers.

        Of each layer only the parts of 64 tokens that have these rows are read.

        Args:
            rows_T: int64; -1 (padding) gives zeros and counts as not recorded.
            layers: indices into `info.moe_layers`.
            into_LTK: where the ids are written; None for a new array.

        Returns:
            The ids `[len(layers), T, K]` in the stored dtype, and the recorded bits `[T]`.

        Raises:
            StoreError: a shard is damaged, was changed since it was opened, or has an id that the
                checks of `trained_on` refuse.
        """
        # All parts are read into one array, which begins with one part of zeros. Then one call
        # takes each row from its place in this array, and padding from the place 0.
        place_T, end = np.zeros(len(rows_T), np.int64), PART_TOKENS
        found = []
        for _, shard, here_T, wanted_T in self._in_shards(rows_T):
            parts_P, of_row_T = shard.parts_of(wanted_T)
            begin, end = end, end + PART_TOKENS * len(parts_P)
            place_T[here_T] = begin + of_row_T
            found.append((shard, here_T, wanted_T, parts_P, slice(begin, end)))
        read_LTK = np.empty((len(layers), end, self.info.topk), id_dtype(self.info.num_experts))
        read_T = np.empty(end, np.uint8)
        read_LTK[:, :PART_TOKENS], read_T[:PART_TOKENS] = 0, 0
        for shard, _, _, parts_P, at in found:
            shard.read_parts(parts_P, layers, read_LTK[:, at], read_T[at])
        # no place lies outside; with mode="raise" numpy would copy `into_LTK` there and back
        ids_LTK = read_LTK.take(place_T, 1, into_LTK, mode="clip")
        recorded_T = read_T.astype(bool).take(place_T)
        if self._checks is not None:
            for shard, here_T, wanted_T, _, _ in found:
                ids, recorded = ids_LTK.take(here_T, 1), recorded_T[here_T]
                self._checks.check_routes(shard, wanted_T, layers, ids, recorded)
        return ids_LTK, recorded_T

    def shards_of(self, rows: np.ndarray) -> list[int]:
        """The numbers, in `shards`, of the shards that hold these row ids.

        Args:
            rows: int64 of any shape; -1 (padding) is in no shard.
        """
        numbers = self.index.first_row.searchsorted(rows[rows >= 0], side="right") - 1
        return np.flatnonzero(np.bincount(numbers)).tolist()

    def rollouts_of(self, rows: np.ndarray) -> list[int]:
        """The rollouts, ascending, that these row ids belong to.

        Args:
            rows: int64 of any shape; -1 (padding) is in no rollout.
        """
        found: list[int] = []
        for number, shard, _, inside in self._in_shards(rows.reshape(-1)):
            rollouts = np.searchsorted(shard.row_start_M, inside, side="right") - 1
            found += (np.unique(rollouts) + self.index.first_rollout[number]).tolist()
        return found

    def _in_shards(self, rows_T: np.ndarray) -> Iterator[tuple[int, Shard, np.ndarray, np.ndarray]]:
        """The shards that hold these row ids.

        For each shard: its number in `shards`; the shard; the places in `rows_T` of the row ids
        that it holds; and these rows, counted in the shard.
        """
        for number in self.shards_of(rows_T):
            first, end = self.index.first_row[number : number + 2].tolist()
            here = np.flatnonzero((rows_T >= first) & (rows_T < end))
            yield number, self.index[number], here, rows_T[here] - first

    def locate(self, row: int) -> tuple[int, int]:
        """The rollout that a row id belongs to, and the token of the row in this rollout."""
        number, row_of_shard = locate(self.index.first_row, row)
        index, token = self.index[number].locate_row(row_of_shard)
        return int(self.index.first_rollout[number]) + index, token
