"""Checks whether values can be trained on: all values of a shard, or values that were just read.

Shape suffixes (docs/glossary.md): C, K, L, M, T.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from zlib_ng import zlib_ng

from megatron_r3.data.rollout import wrong_values
from megatron_r3.data.store.header import (
    IN_MEMORY,
    PER_TOKEN,
    ROUTE_SUMS,
    TOKEN_SUMS,
)
from megatron_r3.data.store.schema import StoreError
from megatron_r3.data.store.shard import Shard
from megatron_r3.replay.routes import Origin, RoutesError, check_ids, repeated_rows

_READ_BYTES = 1 << 22  # of routes that a verification reads at once, but at least one layer


@dataclass(frozen=True)
class ReadChecks:
    """Checks of values that are read from a shard.

    Checksums show that bytes were not changed since they were written. These checks show that the
    values can be trained on. `verify_shard` makes them for a whole shard.

    Attributes:
        vocab_size: how many token ids the trainer has; 0 if that is not known.
        refuses_missing: whether a row without routes is refused.
    """

    vocab_size: int = 0
    refuses_missing: bool = False

    def check_values(
        self, shard: Shard, rollouts: range, per_token: Mapping[str, np.ndarray]
    ) -> None:
        """Refuse rollouts with values that no rollout has, or that the trainer cannot take.

        Args:
            rollouts: consecutive rollouts of the shard.
            per_token: the tensors PER_TOKEN of these rollouts, joined.

        Raises:
            StoreError: naming the file and the rollout.
        """
        start_M = shard.token_start_M - shard.token_start_M[rollouts.start]
        row_start_M = shard.row_start_M - shard.row_start_M[rollouts.start]
        for rollout in rollouts:
            tokens = slice(*start_M[rollout : rollout + 2])
            rows = slice(*row_start_M[rollout : rollout + 2])
            own = {
                name: tensor[rows if name == "recorded" else tokens]
                for name, tensor in per_token.items()
            }
            if wrong := self._wrong(shard, rollout, own):
                raise StoreError(f"{shard.path}: rollout {rollout}: {wrong}")

    def _wrong(self, shard: Shard, rollout: int, own: Mapping[str, np.ndarray]) -> str | None:
        """Why a rollout is refused; None if it is not.

        Args:
            own: the part of each PER_TOKEN tensor that belongs to the rollout.
        """
        for name in ("response", "recorded"):
            if (own[name] > 1).any():
                return f"{name} must be 0 or 1"
        known = [size for size in (shard.info.vocab_size, self.vocab_size) if size]
        wrong = wrong_values(
            own["tokens"],
            own["response"].astype(bool),
            own["logprobs"],
            shard.turns(rollout),
            int(shard.tensors["policy_version"][rollout]),
            shard.versions_C2(rollout),
            shard.kept(rollout),
            min(known, default=0),
        )
        if wrong is None and self.refuses_missing and not own["recorded"].all():
            wrong = (
                f"token {int(own['recorded'].argmin())} has no recorded routes, which "
                "--moe-router-replay-missing error refuses: sample the rollout again, or give "
                "--moe-router-replay-missing live"
            )
        return wrong

    def check_routes(
        self,
        shard: Shard,
        rows_T: Sequence[int] | np.ndarray,
        layers: Sequence[int],
        ids_LTK: np.ndarray,
        recorded_T: np.ndarray,
    ) -> None:
        """Refuse rows with ids that are not distinct experts of the model.

        Args:
            rows_T: which rows of the shard were read.
            layers: which layers were read, as indices into `info.moe_layers`.
            ids_LTK: the ids that were read.
            recorded_T: bool; a row that is False is not checked.

        Raises:
            StoreError: naming the file, the rollout, the layer and the token.
        """
        num_experts = shard.info.num_experts
        try:
            check_ids(ids_LTK, num_experts, recorded_T)
        except RoutesError:  # which does not know the rollout, nor the token in it
            wrong_LT = repeated_rows(ids_LTK) | (ids_LTK >= num_experts).any(-1)
            row, layer = np.argwhere((wrong_LT & recorded_T).T)[0].tolist()
            rollout, token = shard.locate_row(int(rows_T[row]))
            where, origin = f"{shard.path}: rollout {rollout}", Origin(layers[layer], token)
            try:
                check_ids(ids_LTK[layer, row][None, None], num_experts, None, where, origin)
            except RoutesError as error:  # training expects StoreError alone
                raise StoreError(str(error)) from error


def verify_shard(
    shard: Shard,
    checks: ReadChecks = ReadChecks(),
    thorough: bool = True,
) -> None:
    """Read all of a shard; check checksums and values, and the ids of each recorded row.

    Args:
        checks: what the trainer cannot take.
        thorough: whether to compare the sums of parts too, as training does when it reads. That
            takes longer than to compare the checksums of whole tensors.

    Raises:
        StoreError: naming the file, and the rollout if a value or an id is wrong.
    """
    for name in IN_MEMORY:  # this process has not read them if another one sent the shard
        shard.read_tensor(name)
    per_token = {name: shard.read_tensor(name) for name in PER_TOKEN}
    token_sums = shard.read_tensor(TOKEN_SUMS)
    for name, tensor in per_token.items() if thorough else ():
        shard.sums.compare_whole(name, tensor[None], token_sums)
    # reads kept sets, too, and compares them with their sums
    checks.check_values(shard, range(shard.num_rollouts), per_token)
    recorded = int(per_token["recorded"].sum())
    if recorded != shard.recorded_rows:
        raise StoreError(
            f"{shard.path}: recorded_rows is {shard.recorded_rows}; {recorded} rows have "
            "routes: write the shard again"
        )
    _verify_routes(shard, checks, per_token["recorded"].astype(bool), thorough)


def _verify_routes(
    shard: Shard, checks: ReadChecks, recorded_T: np.ndarray, thorough: bool
) -> None:
    crc32, route_sums, wrong_id = 0, shard.read_tensor(ROUTE_SUMS), None
    at_once = max(1, _READ_BYTES // (shard.num_rows * shard.info.topk * shard.dtype.itemsize))
    layers = range(len(shard.info.moe_layers))
    some = [layers[first : first + at_once] for first in layers[::at_once]]
    for these in some:
        ids_LTK = shard.read_layers(these)
        crc32 = zlib_ng.crc32(ids_LTK.data, crc32)
        if thorough:
            shard.sums.compare_whole("routes", ids_LTK, route_sums, these.start)
        try:
            checks.check_routes(shard, range(shard.num_rows), these, ids_LTK, recorded_T)
        except StoreError as error:
            wrong_id = wrong_id or error
    # damaged bytes make wrong ids too, so an error about an id is raised only if the checksum fits
    if crc32 != shard.header.crc32["routes"]:
        for these in some:  # the sums of parts tell where the damage is
            shard.sums.compare_whole("routes", shard.read_layers(these), route_sums, these.start)
        raise shard.file.damaged("checksum of 'routes'")
    if wrong_id is not None:
        raise wrong_id
