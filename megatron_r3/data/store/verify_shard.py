"""Whether the values of a shard can be trained on: all of them, or those that were just read.

Shape suffixes (docs/glossary.md): C, K, L, M, N, T, U, V.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from zlib_ng import zlib_ng

from megatron_r3.data.rollout import sampled_tokens, wrong_logprobs, wrong_versions
from megatron_r3.data.store.header import (
    IN_MEMORY,
    PER_TOKEN,
    ROUTE_SUMS,
    TOKEN_SUMS,
)
from megatron_r3.data.store.schema import StoreError
from megatron_r3.data.store.shard import Shard
from megatron_r3.data.values import MOST_TOKEN_ID, wrong_token
from megatron_r3.replay.routes import Origin, RoutesError, check_ids

_READ_BYTES = 1 << 22  # of routes that a verification reads at once, but at least one layer


@dataclass(frozen=True)
class ReadChecks:
    """Checks of values as they are read from a shard that was not verified before.

    Checksums tell that the bytes are those that were written. These checks tell that the values can
    be trained on, as `verify_shard` does for a whole shard.

    Attributes:
        vocab_size: of the trainer; 0 where it is not known.
        refuses_missing: whether a row without routes is refused.
    """

    vocab_size: int = 0
    refuses_missing: bool = False

    def check_tokens(self, shard: Shard, rollout: int, per_token: Mapping[str, np.ndarray]) -> None:
        """Refuse a rollout with values that no rollout has, or that the trainer cannot take.

        Args:
            per_token: its tensors PER_TOKEN.

        Raises:
            StoreError: naming the file, the rollout and the token.
        """
        rollouts = range(rollout, rollout + 1)
        check_values(shard, rollouts, per_token)
        if self.vocab_size and not 0 < shard.info.vocab_size <= self.vocab_size:
            check_tokens(shard, self.vocab_size, rollouts, per_token["tokens"])
        if self.refuses_missing:
            refuse_missing(shard, rollouts, per_token["recorded"])

    def check_routes(
        self,
        shard: Shard,
        rows_T: np.ndarray,
        layers: Sequence[int],
        ids_LTK: np.ndarray,
        recorded_T: np.ndarray,
    ) -> None:
        """Refuse rows whose ids are not distinct experts of the model.

        Args:
            rows_T: which rows of the shard were read.
            layers: which layers.

        Raises:
            StoreError: naming the file, the rollout, the layer and the token.
        """
        num_experts = shard.info.num_experts
        try:
            check_ids(ids_LTK, num_experts, recorded_T)
            return
        except RoutesError:
            places = [(row, layer) for row in range(len(rows_T)) for layer in range(len(layers))]
        for row, layer in places:  # once more, row by row, to name the rollout, and the token in it
            rollout, token = shard.locate_row(int(rows_T[row]))
            ids, recorded = ids_LTK[layer, row][None, None], recorded_T[row][None]
            where, origin = f"{shard.path}: rollout {rollout}", Origin(layers[layer], token)
            try:
                check_ids(ids, num_experts, recorded, where, origin)
            except RoutesError as error:  # training expects StoreError alone
                raise StoreError(str(error)) from error


def verify_shard(shard: Shard, thorough: bool = True) -> None:
    """Read everything; check all sums and values, and that each row has distinct ids in range.

    Args:
        thorough: whether to compare also the sums of parts of rollouts, as training does when it
            reads; that costs more than the checksum of a whole tensor.

    Raises:
        ValueError: naming the file, and for a wrong value or id the rollout, layer and token.
    """
    for name in IN_MEMORY:  # this process has not read them if another one sent the shard
        shard.read_tensor(name)
    per_token = {name: shard.read_tensor(name) for name in PER_TOKEN}
    token_sums = shard.read_tensor(TOKEN_SUMS)
    for name, tensor in per_token.items() if thorough else ():
        shard.sums.compare_whole(name, tensor[None], token_sums)
    check_values(shard, range(shard.num_rollouts), per_token)  # compares kept sets, too
    recorded = int(per_token["recorded"].sum())
    if recorded != shard.recorded_rows:
        raise StoreError(
            f"{shard.path}: recorded_rows is {shard.recorded_rows}; {recorded} rows have "
            "routes: write the shard again"
        )
    _verify_routes(shard, per_token["recorded"].astype(bool), thorough)


def check_tokens(
    shard: Shard,
    vocab_size: int,
    rollouts: range | None = None,
    tokens: np.ndarray | None = None,
) -> None:
    """Refuse token ids outside a vocabulary.

    Args:
        rollouts: which to look at; None for all of the shard.
        tokens: all tokens of these rollouts; None to read the shard's.

    Raises:
        StoreError: naming the file, the rollout and the token.
    """
    rollouts = range(shard.num_rollouts) if rollouts is None else rollouts
    tokens = shard.read_tensor("tokens") if tokens is None else tokens
    if wrong := wrong_token(tokens, vocab_size):
        first = int(shard.token_start_M[rollouts.start])
        rollout, token = shard.locate_token(first + wrong[0])
        raise StoreError(f"{shard.path}: rollout {rollout}: token {token} {wrong[1]}")
    for rollout in rollouts if shard.kept_start_M[-1] else ():
        if (kept := shard.kept(rollout)) is None:
            continue
        place = int(kept.ids_V.argmax())
        if kept.ids_V[place] >= vocab_size:
            token = int(np.searchsorted(kept.offsets, place, side="right")) - 1
            raise StoreError(
                f"{shard.path}: rollout {rollout}: token {token}: its kept set has id "
                f"{kept.ids_V[place]}; the vocabulary has ids 0 to {vocab_size - 1}"
            )


def refuse_missing(shard: Shard, rollouts: range, recorded: np.ndarray) -> None:
    """Refuse a row without routes.

    Args:
        rollouts: which to look at.
        recorded: of all of their rows.

    Raises:
        StoreError: naming the file, the rollout and the token.
    """
    for row in np.flatnonzero(recorded == 0)[:1].tolist():
        rollout, token = shard.locate_row(int(shard.row_start_M[rollouts.start]) + row)
        raise StoreError(
            f"{shard.path}: rollout {rollout}, token {token} has no recorded routes, and "
            "--moe-router-replay-missing is error; sample it again, or choose live"
        )


def _verify_routes(shard: Shard, recorded_T: np.ndarray, thorough: bool) -> None:
    crc32, route_sums, wrong_layers = 0, shard.read_tensor(ROUTE_SUMS), None
    at_once = max(1, _READ_BYTES // (shard.num_rows * shard.info.topk * shard.dtype.itemsize))
    layers = range(len(shard.info.moe_layers))
    some = [layers[first : first + at_once] for first in layers[::at_once]]
    for these in some:
        ids_LTK = shard.read_layers(these)
        crc32 = zlib_ng.crc32(ids_LTK.data, crc32)
        if thorough:
            shard.sums.compare_whole("routes", ids_LTK, route_sums, these.start)
        try:
            check_ids(ids_LTK, shard.info.num_experts, recorded_T)
        except RoutesError:
            wrong_layers = wrong_layers or these
    # damaged bytes make wrong ids too: an id is blamed only when all bytes are as stored
    if crc32 != shard.header.crc32["routes"]:
        for these in some:  # the sums of parts tell where the damage is
            shard.sums.compare_whole("routes", shard.read_layers(these), route_sums, these.start)
        raise shard.file.damaged("checksum of 'routes'")
    for layer in wrong_layers or ():
        ids_LTK = shard.read_layers(range(layer, layer + 1))
        for rollout, (begin, end) in enumerate(pairwise(shard.row_start_M.tolist())):
            check_ids(  # raises the same error again, naming the rollout and its token
                ids_LTK[:, begin:end],
                shard.info.num_experts,
                recorded_T[begin:end],
                f"{shard.path}: rollout {rollout}",
                Origin(layer=layer),
            )


def check_values(shard: Shard, rollouts: range, per_token: Mapping[str, np.ndarray]) -> None:
    """Refuse values that no rollout has.

    Args:
        rollouts: which to look at.
        per_token: their tensors PER_TOKEN.

    Raises:
        StoreError: naming the file, the rollout and the token.
    """
    _check_flags(shard, rollouts, per_token)
    vocab_size = shard.info.vocab_size
    check_tokens(shard, vocab_size or MOST_TOKEN_ID + 1, rollouts, per_token["tokens"])
    response = per_token["response"].astype(bool)
    start_M = shard.token_start_M[rollouts.start : rollouts.stop + 1]
    wrong_M = response[start_M[:-1] - start_M[0]]
    if wrong_M.any():
        raise StoreError(
            f"{shard.path}: rollout {rollouts[int(wrong_M.argmax())]}: its first token cannot be "
            "sampled: nothing predicts it"
        )
    if wrong := wrong_logprobs(per_token["logprobs"], response):
        rollout, token = shard.locate_token(int(start_M[0]) + wrong[0])
        raise StoreError(f"{shard.path}: rollout {rollout}: token {token}: {wrong[1]}")
    if not _turns_fit(shard, rollouts, response):
        wrong_rollout = next(
            rollouts[number]
            for number, (begin, end) in enumerate(pairwise((start_M - start_M[0]).tolist()))
            if not _turns_fit(shard, rollouts[number : number + 1], response[begin:end])
        )
        raise StoreError(
            f"{shard.path}: rollout {wrong_rollout}: its `turns` and its `response` mark different "
            "tokens as sampled"
        )
    _check_extras(shard, rollouts, per_token)


def _check_flags(shard: Shard, rollouts: range, per_token: Mapping[str, np.ndarray]) -> None:
    """Refuse a `response` or `recorded` that is neither 0 nor 1."""
    for name, locate, start_M in (
        ("response", shard.locate_token, shard.token_start_M),
        ("recorded", shard.locate_row, shard.row_start_M),
    ):
        for place in np.flatnonzero(per_token[name] > 1)[:1].tolist():
            rollout, _ = locate(int(start_M[rollouts.start]) + place)
            raise StoreError(f"{shard.path}: rollout {rollout}: {name} must be 0 or 1")


def _check_extras(shard: Shard, rollouts: range, per_token: Mapping[str, np.ndarray]) -> None:
    """Refuse kept sets and version spans that no rollout can have."""
    if not shard.kept_start_M[-1] and not len(shard.tensors["versions"]):
        return
    begin = int(shard.token_start_M[rollouts.start])
    for rollout in rollouts:
        first, end = (shard.token_start_M[rollout : rollout + 2] - begin).tolist()
        tokens_N, response_N, logprobs_N = (
            per_token[name][first:end] for name in ("tokens", "response", "logprobs")
        )
        sampled_N = response_N.astype(bool)
        wrong, versions_C2, kept = None, shard.versions_C2(rollout), shard.kept(rollout)
        if versions_C2 is not None:
            version = int(shard.tensors["policy_version"][rollout])
            wrong = wrong_versions(versions_C2, sampled_N, version)
        if wrong is None and kept is not None:
            wrong = kept.wrong(tokens_N, sampled_N, logprobs_N, shard.info.vocab_size)
        if wrong is not None:
            raise StoreError(f"{shard.path}: rollout {rollout}: {wrong}")


def _turns_fit(shard: Shard, rollouts: range, response: np.ndarray) -> bool:
    """Whether rollouts' turns lie inside them and cover exactly the tokens of `response`, bool."""
    start_M = shard.token_start_M[rollouts.start : rollouts.stop + 1]
    start_M = start_M - start_M[0]
    num_turns = shard.tensors["num_turns"][rollouts.start : rollouts.stop]
    first, last = shard.pair_start_M["turns"][[rollouts.start, rollouts.stop]].tolist()
    starts_U = np.repeat(start_M[:-1], num_turns)
    ends_U = np.repeat(start_M[1:], num_turns)
    turns_U2 = shard.tensors["turns"][2 * first : 2 * last].reshape(-1, 2) + starts_U[:, None]
    if (turns_U2[:, 0] < starts_U).any() or (turns_U2[:, 1] > ends_U).any():
        return False
    sampled = sampled_tokens(turns_U2, int(start_M[-1]))
    return sampled is not None and np.array_equal(sampled, response)
