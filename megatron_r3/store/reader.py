"""Read a store: rollouts by index, routes by row id.

A row id counts the rows of all shards in the order of their numbers, so one integer says which
token of which rollout. Shard k is only taken when those before it are, so a row id means the same
in every process and keeps its meaning while a store grows.

Shape suffixes: L MoE layers, T tokens asked for, K top-k, N tokens of a rollout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.rollout import Rollout
from megatron_r3.routes import Routes
from megatron_r3.store.files import SHARD_GLOB, listed_shards, shard_name, shards_in_order
from megatron_r3.store.schema import StoreError, StoreInfo, differences
from megatron_r3.store.shard import Shard

POLL_S = 0.2  # between two looks at a store that is followed


class RolloutStore:
    """Every rollout of one or several store directories.

    Args:
        directories: stores of the same model; their shards follow each other in name order.
        mixed_policies: shards may come from different policies of one model: only `info.policy`
            may differ.
        follow_s: the one directory grows: for so many seconds a rollout that is not there yet is
            waited for. Its policy versions must not go back.
        check: called with every shard that is opened; it refuses one by a ValueError.

    Attributes:
        shards: those that are open.
        info: of the first one; with `mixed_policies` the policy of others is another.

    Raises:
        StoreError: no shard, a damaged one, one that is missing or there twice, a rollout that is
            there twice, or stores that do not belong together.
    """

    def __init__(
        self,
        directories: Sequence[str | Path],
        mixed_policies: bool = False,
        follow_s: float | None = None,
        check: Callable[[Shard], None] | None = None,
    ) -> None:
        self.directories = [Path(d) for d in directories]
        resolved = [d.resolve() for d in self.directories]
        if len({*resolved}) < len(resolved):
            raise StoreError(f"{' '.join(map(str, directories))}: a store is named twice")
        if follow_s is not None and len(resolved) != 1:
            raise StoreError(f"{' '.join(map(str, directories))}: one store can be followed")
        self.mixed_policies, self.follow_s, self.check = mixed_policies, follow_s, check
        self._refreshing = threading.Lock()  # a thread that prepares microbatches looks too
        self.shards: list[Shard] = []
        self._path_of: dict[str, Path] = {}  # by identity
        self._names: dict[Path, set[bytes]] = {d: set() for d in self.directories}
        self._first_rollout, self._first_row = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._wait(lambda: bool(self.shards), "the first shard")
        self.info: StoreInfo = self.shards[0].info

    def __getstate__(self) -> dict[str, Any]:
        """What another process gets: all but the lock, which it makes anew."""
        return {name: value for name, value in vars(self).items() if name != "_refreshing"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take it, in the other process."""
        vars(self).update(state, _refreshing=threading.Lock())

    def refresh(self) -> None:
        """Open the shards that have come since, if the store is followed: another stays as it was.

        Raises:
            StoreError: one of them is damaged, or does not belong to the others.
        """
        if self.shards and self.follow_s is None:
            return
        with self._refreshing:
            if self.follow_s is not None:
                (directory,) = self.directories
                there = listed_shards(directory)
                while (number := len(self.shards)) in there:
                    self._add(Shard(there[number]))
                return
            for directory in self.directories:
                for path in _shards(directory):
                    self._add(Shard(path))

    def wait_for(self, rollout: int) -> None:
        """Return when the store has this rollout, by its index.

        Raises:
            StoreError: it does not come within `follow_s`, or what comes cannot be used.
        """
        if rollout >= len(self):
            self._wait(lambda: rollout < len(self), f"rollout {rollout}")

    def _wait(self, there: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + (self.follow_s or 0.0)
        self.refresh()
        while not there():
            if time.monotonic() >= end:
                raise StoreError(
                    f"{self.directories[0]}: {what} did not come within {self.follow_s or 0:g} s; "
                    f"it has {len(self)} rollouts{self._gap()}: is the sampler still running?"
                )
            time.sleep(POLL_S)
            self.refresh()

    def _gap(self) -> str:
        """The shard that others wait for, if there is one."""
        later = [n for n in listed_shards(self.directories[0]) if n > len(self.shards)]
        if not later:
            return ""
        return f", {shard_name(len(self.shards))} is missing and {shard_name(later[0])} is there"

    def _add(self, shard: Shard) -> None:
        if self.shards:
            self._check_belongs(shard)
        names = self._check_names(shard)
        if self.check is not None:
            try:
                self.check(shard)
            except ValueError as error:
                raise StoreError(str(error)) from error
        self.shards.append(shard)
        self._path_of[shard.identity] = shard.path
        self._names[shard.path.parent] |= names
        self._first_rollout = np.append(self._first_rollout, len(self) + shard.num_rollouts)
        self._first_row = np.append(self._first_row, self._first_row[-1] + shard.num_rows)

    def _check_belongs(self, shard: Shard) -> None:
        """Refuse a shard of another model, engine or policy, a copy, and an older policy."""
        first, last = self.shards[0], self.shards[-1]
        theirs = first.info
        if self.mixed_policies:
            fingerprint, stamp, version = shard.info.policy
            theirs = replace(
                theirs,
                router_fingerprint=fingerprint,
                policy_stamp=stamp,
                engine_policy=version,
            )
        if different := differences(theirs, shard.info):
            raise StoreError(
                f"{shard.path}: does not belong to {first.path}: {'; '.join(different)}: keep them "
                "in stores of their own"
            )
        if shard.identity in self._path_of:
            raise StoreError(
                f"{shard.path}: is the same shard as {self._path_of[shard.identity]}: name only "
                "one of the two stores, or remove the copy"
            )
        newest = int(last.tensors["policy_version"].max())
        oldest = int(shard.tensors["policy_version"].min())
        if self.follow_s is not None and oldest < newest:
            raise StoreError(
                f"{shard.path}: policy version {oldest} after {newest} of {last.path}: a store "
                "that is followed comes in the order of its policies"
            )

    def _check_names(self, shard: Shard) -> set[bytes]:
        """Refuse two rollouts of one (policy_version, group, sample) in one directory.

        Returns:
            The shard's names, 24 bytes each: a set of them takes a third of a set of tuples.
        """
        seen, mine = self._names[shard.path.parent], set[bytes]()
        for rollout, name in enumerate(_names(shard)):
            if name in seen or name in mine:
                other = self._named(name, shard)
                version, group, sample = np.frombuffer(name, np.int64).tolist()
                raise StoreError(
                    f"{shard.path}: rollout {rollout} is sample {sample} of group {group}, policy "
                    f"version {version}: so is {other}; remove one, or number the samples of a "
                    "group"
                )
            mine.add(name)
        return mine

    def _named(self, name: bytes, last: Shard) -> str:
        """The first rollout of this name in the directory of a shard."""
        folder = last.path.parent
        shards = [shard for shard in self.shards if shard.path.parent == folder]
        return next(
            f"{shard.path}: rollout {rollout}"
            for shard in [*shards, last]
            for rollout, other in enumerate(_names(shard))
            if other == name
        )

    def verify(self) -> None:
        """Check every byte and id of all routes; one process of a node is enough.

        Raises:
            ValueError: naming file, rollout, layer and token.
        """
        for shard in self.shards:
            shard.verify()

    def __len__(self) -> int:
        return int(self._first_rollout[-1])

    def shard_of_rollout(self, rollout: int) -> int:
        """The number, in `shards`, of the shard that holds a rollout."""
        assert 0 <= rollout < len(self), f"rollout {rollout} of {len(self)}"
        return int(np.searchsorted(self._first_rollout, rollout, side="right")) - 1

    def _find(self, rollout: int) -> tuple[Shard, int, int]:
        """A rollout's shard, its index there, and the shard's first row id."""
        number = self.shard_of_rollout(rollout)
        shard = self.shards[number]
        return shard, rollout - int(self._first_rollout[number]), int(self._first_row[number])

    def name(self, rollout: int) -> str:
        """What a message calls a rollout: its file and its index there."""
        shard, index, _ = self._find(rollout)
        return f"{shard.path}: rollout {index}"

    def row_ids(self, rollout: int) -> np.ndarray:
        """The row ids of a rollout's tokens but the last, int64 `[N - 1]`."""
        shard, index, first = self._find(rollout)
        return np.arange(shard.row_start_M[index], shard.row_start_M[index + 1]) + first

    def fields(self, rollout: int) -> dict[str, np.ndarray]:
        """tokens int32, response bool, logprobs float32, recorded bool; routes are not read.

        Raises:
            StoreError: the shard is damaged, or was changed since it was opened.
        """
        shard, index, _ = self._find(rollout)
        fields = shard.read_tokens(index)
        return fields | {name: fields[name].astype(bool) for name in ("response", "recorded")}

    def column(self, name: str) -> np.ndarray:
        """A value for each rollout: reward, group, sample, policy_version, num_tokens, ..."""
        return np.concatenate([shard.tensors[name] for shard in self.shards])

    def groups(self) -> np.ndarray:
        """One number for each rollout, the same for rollouts of one prompt: int64 `[M]`.

        Group ids count inside one directory and policy version: two collections may begin at 0.
        """
        folders = [shard.path.parent for shard in self.shards]
        folder = np.repeat(
            [folders.index(f) for f in folders], [s.num_rollouts for s in self.shards]
        )
        keys = np.stack([folder, self.column("policy_version"), self.column("group")], axis=1)
        return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)

    def rollout(self, rollout: int) -> Rollout:
        """One rollout, whole, its routes read and checked."""
        shard, index, _ = self._find(rollout)
        fields = self.fields(rollout)
        rows_U = np.arange(shard.row_start_M[index], shard.row_start_M[index + 1])
        routes = Routes.from_array(
            shard.read_routes(rows_U, range(len(self.info.moe_layers))),
            self.info.num_experts,
            fields["recorded"],
            self.name(rollout),
        )
        return Rollout(
            fields["tokens"],
            fields["response"],
            fields["logprobs"],
            float(shard.tensors["reward"][index]),
            int(shard.tensors["group"][index]),
            int(shard.tensors["policy_version"][index]),
            routes,
            int(shard.tensors["sample"][index]),
            shard.turns(index),
            int(shard.tensors["prompt_digest"][index]),
        )

    def routes(self, rows_T: np.ndarray, layers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Routes by row id, for some trace layers: only these rows and layers are read.

        Args:
            rows_T: int64; -1 (padding) gives zeros and counts as not recorded.
            layers: indices into `info.moe_layers`.

        Returns:
            ids `[len(layers), T, K]` in the stored dtype, and the recorded bits `[T]`.
        """
        num_tokens = len(rows_T)
        ids_LTK = np.zeros((len(layers), num_tokens, self.info.topk), self.shards[0].dtype)
        recorded_T = np.zeros(num_tokens, bool)
        for number in self.shards_of(rows_T):
            shard, first = self.shards[number], int(self._first_row[number])
            mine_T = (rows_T >= first) & (rows_T < first + shard.num_rows)
            rows_U, place_T = np.unique(rows_T[mine_T] - first, return_inverse=True)
            ids_LTK[:, mine_T] = shard.read_routes(rows_U, layers)[:, place_T]
            recorded_T[mine_T] = shard.read_recorded(rows_U)[place_T]
        return ids_LTK, recorded_T

    def shards_of(self, rows: np.ndarray) -> list[int]:
        """The numbers of the shards that hold these row ids; another process may know more of them.

        Args:
            rows: int64 of any shape; -1 (padding) is in none.
        """
        rows = rows[rows >= 0]
        if rows.size and int(rows.max()) >= int(self._first_row[-1]):
            self.refresh()
        return [int(n) for n in np.unique(np.searchsorted(self._first_row, rows, "right") - 1)]

    def locate(self, row: int) -> tuple[int, int]:
        """The rollout of a row id, and the token in it."""
        number = int(np.searchsorted(self._first_row, row, side="right")) - 1
        index, token = self.shards[number].locate_row(row - int(self._first_row[number]))
        return int(self._first_rollout[number]) + index, token


def _names(shard: Shard) -> list[bytes]:
    """policy_version, group and sample of each rollout, 24 bytes together."""
    names = [shard.tensors[name] for name in ("policy_version", "group", "sample")]
    data = np.stack(names, axis=1).tobytes()
    return [data[i : i + 24] for i in range(0, len(data), 24)]


def _shards(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise StoreError(f"{directory}: no such rollout store")
    if not (paths := shards_in_order(directory)):
        raise StoreError(
            f"{directory}: no {SHARD_GLOB} in it: not a rollout store, or an empty one"
        )
    return paths
