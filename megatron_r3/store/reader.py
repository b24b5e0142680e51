"""Read a store: rollouts by index, routes by row id.

A row id counts the rows of all shards in order, so one integer says which token of which rollout.

Shape suffixes: L MoE layers, T tokens asked for, K top-k, N tokens of a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_r3.routes import Routes
from megatron_r3.store.schema import Rollout, StoreError, StoreInfo
from megatron_r3.store.shard import Shard
from megatron_r3.store.writer import SHARD_GLOB

__all__ = ["RolloutStore"]


class RolloutStore:
    """Every rollout of one or several store directories.

    Args:
        directories: stores of the same model; their shards follow each other in name order.
        mixed_policies: shards may come from different policies of one model.

    Raises:
        StoreError: no shard, a damaged one, or stores that do not belong together.
    """

    def __init__(self, directories: Sequence[str | Path], mixed_policies: bool = False) -> None:
        resolved = [Path(d).resolve() for d in directories]
        if len({*resolved}) < len(resolved):
            raise StoreError(f"{' '.join(map(str, directories))}: a store is named twice")
        self.shards = [Shard(path) for d in directories for path in _shards(Path(d))]
        self.info: StoreInfo = self.shards[0].info
        for shard in self.shards[1:]:
            stamp = self.info.router_fingerprint if mixed_policies else None
            theirs = shard.info if stamp is None else replace(shard.info, router_fingerprint=stamp)
            if theirs != self.info:
                raise StoreError(
                    f"{shard.path}: {shard.info} is not the model or engine of "
                    f"{self.shards[0].path}: {self.info}"
                )
        self._first_rollout = np.cumsum([0, *(s.num_rollouts for s in self.shards)])
        self._first_row = np.cumsum([0, *(s.row_start_M[-1] for s in self.shards)])

    def verify(self) -> None:
        """Check every byte and id of all routes; one process of a node is enough.

        Raises:
            ValueError: naming file, rollout, layer and token.
        """
        for shard in self.shards:
            shard.verify()

    def __len__(self) -> int:
        return int(self._first_rollout[-1])

    def _find(self, rollout: int) -> tuple[Shard, int, int]:
        """A rollout's shard, its index there, and the shard's first row id."""
        number = int(np.searchsorted(self._first_rollout, rollout, side="right")) - 1
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
        """tokens int32, response bool, logprobs float32, recorded bool: views, routes untouched."""
        shard, index, _ = self._find(rollout)
        tokens = slice(shard.token_start_M[index], shard.token_start_M[index + 1])
        rows = slice(shard.row_start_M[index], shard.row_start_M[index + 1])
        return {
            "tokens": shard.tensors["tokens"][tokens],
            "response": shard.tensors["response"][tokens].astype(bool),
            "logprobs": shard.tensors["logprobs"][tokens],
            "recorded": shard.tensors["recorded"][rows].astype(bool),
        }

    def column(self, name: str) -> np.ndarray:
        """One value for each rollout: reward, group, sample, policy_version or num_tokens."""
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
        rows = slice(shard.row_start_M[index], shard.row_start_M[index + 1])
        routes = Routes.from_array(
            np.array(shard.routes_LRK[:, rows]),
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
        ids_LTK = np.zeros(
            (len(layers), num_tokens, self.info.topk), self.shards[0].routes_LRK.dtype
        )
        recorded_T = np.zeros(num_tokens, bool)
        shard_T = np.searchsorted(self._first_row, rows_T, side="right") - 1
        for number in np.unique(shard_T[rows_T >= 0]):
            shard = self.shards[number]
            mine_T = (shard_T == number) & (rows_T >= 0)
            local = rows_T[mine_T] - self._first_row[number]
            for index, layer in enumerate(layers):
                ids_LTK[index, mine_T] = shard.routes_LRK[layer][local]
            recorded_T[mine_T] = shard.tensors["recorded"][local].astype(bool)
        return ids_LTK, recorded_T

    def locate(self, row: int) -> tuple[int, int]:
        """The rollout of a row id, and the token in it."""
        number = int(np.searchsorted(self._first_row, row, side="right")) - 1
        index, token = self.shards[number].locate_row(row - int(self._first_row[number]))
        return int(self._first_rollout[number]) + index, token


def _shards(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise StoreError(f"{directory}: no such rollout store")
    paths = sorted(directory.glob(SHARD_GLOB))
    if not paths:
        raise StoreError(
            f"{directory}: no {SHARD_GLOB} in it: not a rollout store, or an empty one"
        )
    return paths
