"""What must hold of a shard's tensors: shapes and counts when it is opened, each value later.

Shape suffixes: L MoE layers, R rows, K top-k, M rollouts, U turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from zlib_ng import zlib_ng

from megatron_r3.rollout import sampled_tokens, wrong_logprobs
from megatron_r3.routes import RoutesError, check_ids
from megatron_r3.store.header import BLOCKS, DTYPES, PER_ROLLOUT
from megatron_r3.store.schema import StoreError
from megatron_r3.values import MOST_TOKEN_ID, wrong_count, wrong_name, wrong_reward

if TYPE_CHECKING:
    from megatron_r3.store.shard import Shard


_PIECE = 1 << 24  # bytes of a tensor that is only summed


def check_shapes(shard: Shard) -> None:
    """Refuse tensors whose types or shapes do not fit each other; nothing of them is read yet.

    M rollouts with T tokens have T - M rows, since the last token of each has none: so all shapes
    follow from those of `num_tokens`, `tokens` and `turns`, and from the header.

    Raises:
        StoreError: naming the file and the tensor.
    """
    entries, names = shard.header.entries, shard.header.tensors
    for name in ("num_tokens", "tokens", "turns"):
        if len(entries[name].shape) != 1:
            raise StoreError(
                f"{shard.path}: {name} has {len(entries[name].shape)} dimensions, not 1"
            )
    num_rollouts, num_tokens = entries["num_tokens"].shape[0], entries["tokens"].shape[0]
    if not num_rollouts or num_tokens < 2 * num_rollouts:
        raise StoreError(
            f"{shard.path}: {num_rollouts} rollouts with {num_tokens} tokens: a shard has "
            "rollouts, and each has at least 2 tokens"
        )
    layers, num_rows = len(shard.info.moe_layers), num_tokens - num_rollouts
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys((*PER_ROLLOUT, "prompt_digest"), (num_rollouts,)),
        **dict.fromkeys(BLOCKS, (num_tokens,)),
        "recorded": (num_rows,),
        "turns": (entries["turns"].shape[0] // 2 * 2,),
        "routes": (layers, num_rows, shard.info.topk),
        "block_crc32": (num_rollouts, layers + len(BLOCKS)),
    }
    ids = next(name for name, dtype in DTYPES.items() if dtype == shard.dtype)
    for name, dtype in names.items():
        entry = entries[name]
        if (entry.dtype, entry.shape) != (dtype or ids, shapes[name]):
            one_row = ": one row for every token of a rollout but its last"
            raise StoreError(
                f"{shard.path}: {name} is {entry.dtype} {entry.shape}; {num_rollouts} rollouts "
                f"with {num_tokens} tokens and {shard.info.num_experts} experts need "
                f"{dtype or ids} {shapes[name]}{one_row if name in ('routes', 'recorded') else ''}"
            )


def check_opened(shard: Shard) -> None:
    """Refuse counts, names and rewards that cannot be.

    Raises:
        StoreError: naming the file, and the rollout.
    """
    tensors, entries = shard.tensors, shard.header.entries
    for name, least, total in (
        ("num_tokens", 2, entries["tokens"].shape[0]),
        ("num_turns", 0, entries["turns"].shape[0] // 2),
    ):
        if wrong := wrong_count(tensors[name], least, total):
            raise StoreError(f"{shard.path}: {name}: {wrong}")
    for rollout in np.flatnonzero(~np.isfinite(tensors["reward"]))[:1]:
        reward = float(tensors["reward"][rollout])
        raise StoreError(
            f"{shard.path}: rollout {rollout}: reward {reward}: {wrong_reward(reward)}"
        )
    names = ("policy_version", "group", "sample")
    wrong_M = np.any([tensors[name] < 0 for name in ("policy_version", "sample")], axis=0)
    for rollout in np.flatnonzero(wrong_M)[:1]:
        wrong = wrong_name(*(int(tensors[name][rollout]) for name in names))
        raise StoreError(f"{shard.path}: rollout {rollout}: {wrong}")
    for rollout in np.flatnonzero(tensors["prompt_digest"] < 0)[:1]:
        raise StoreError(f"{shard.path}: rollout {rollout}: prompt_digest must not be negative")


def verify_shard(shard: Shard) -> None:
    """Read everything: checksums, values, the range of every id, that no row repeats one.

    Raises:
        ValueError: naming the file, and for a wrong value or id the rollout, layer and token.
    """
    per_token = {name: shard.tensors[name] for name in BLOCKS}
    whole = {*shard.header.entries} - {*shard.tensors, "routes"}  # tensors of a newer megatron-r3
    whole |= set() if shard.has_blocks else {*BLOCKS}
    for name in sorted(whole):
        if _sum_of(shard, name) != shard.header.crc32[name]:
            raise shard.damaged(f"checksum of {name!r}")
    _check_values(shard, per_token)
    recorded_R = per_token["recorded"].astype(bool)
    crc32, every_row = 0, np.arange(shard.num_rows)
    wrong: list[int] = []
    for layer in range(len(shard.info.moe_layers)):
        ids_LRK = shard.read_routes(every_row, [layer])
        if not shard.has_blocks:
            crc32 = zlib_ng.crc32(ids_LRK.data, crc32)
        try:
            check_ids(ids_LRK, shard.info.num_experts, recorded_R)
        except RoutesError:
            wrong.append(layer)
    if not shard.has_blocks and crc32 != shard.header.crc32["routes"]:
        raise shard.damaged("checksum of 'routes'")
    for layer in wrong:
        _blame(shard, layer, recorded_R)


def _sum_of(shard: Shard, name: str) -> int:
    entry = shard.header.entries[name]
    crc32 = 0
    for begin in range(entry.begin, entry.end, _PIECE):
        piece = np.empty(min(_PIECE, entry.end - begin), np.uint8)
        shard.file.read(piece, begin)
        crc32 = zlib_ng.crc32(piece.data, crc32)
    shard.file.check_unchanged()
    return crc32


def _check_values(shard: Shard, per_token: dict[str, np.ndarray]) -> None:
    for name in ("response", "recorded"):
        if (per_token[name] > 1).any():
            raise StoreError(f"{shard.path}: {name} must be 0 or 1")
    shard.check_tokens(shard.info.vocab_size or MOST_TOKEN_ID + 1)
    response = per_token["response"].astype(bool)
    for rollout in np.flatnonzero(response[shard.token_start_M[:-1]])[:1]:
        raise StoreError(
            f"{shard.path}: rollout {rollout}: its first token cannot be sampled: nothing predicts "
            "it"
        )
    if wrong := wrong_logprobs(per_token["logprobs"], response):
        rollout, token = shard.locate_token(wrong[0])
        raise StoreError(f"{shard.path}: rollout {rollout}: token {token}: {wrong[1]}")
    sampled = _sampled(shard)
    if sampled is None or not np.array_equal(sampled, response):
        raise StoreError(f"{shard.path}: its turns are not the tokens that its response names")


def _sampled(shard: Shard) -> np.ndarray | None:
    """The tokens that the turns name, bool; None if a turn leaves its rollout."""
    num_turns = shard.tensors["num_turns"]
    starts_U = np.repeat(shard.token_start_M[:-1], num_turns)
    ends_U = np.repeat(shard.token_start_M[1:], num_turns)
    turns_U2 = shard.tensors["turns"].reshape(-1, 2) + starts_U[:, None]
    if not (turns_U2[:, 0] >= starts_U).all() or not (turns_U2[:, 1] <= ends_U).all():
        return None
    return sampled_tokens(turns_U2, int(shard.token_start_M[-1]))


def _blame(shard: Shard, layer: int, recorded_R: np.ndarray) -> None:
    """Say the error again, with the rollout and the token inside it."""
    for rollout in range(shard.num_rollouts):
        rows_U = np.arange(shard.row_start_M[rollout], shard.row_start_M[rollout + 1])
        check_ids(
            shard.read_routes(rows_U, [layer]),
            shard.info.num_experts,
            recorded_R[rows_U],
            f"{shard.path}: rollout {rollout}",
            first_layer=layer,
        )
