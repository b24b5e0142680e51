"""What stores hold, in numbers and as a table: rollouts, and how routes spread over the experts.

Shape suffixes (docs/glossary.md): E, G, K, L, M, N, T, V.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.data.store import RolloutStore
from megatron_r3.data.store.expert_load import count_recorded
from megatron_r3.data.values import wrong_logprob
from megatron_r3.replay.words import one_line

CHUNK_ROWS = 1 << 15  # rows that are read at a time
MOST_CELL = 400  # characters of a cell of the table
MOST_VALUES = 8  # a cell shows only the length of a list with more values
# Keys that are shown in other tables, as warnings, or (`experts`) by --json alone.
NOT_IN_TABLE = {
    "by_version", "experts", "impossible_logprobs", "layer", "layers", "policy_versions",
    "token_versions", "truth",
}  # fmt: skip


def inspect_store(directory: Path) -> dict[str, Any]:
    """The numbers about a store that `rollouts inspect --json` prints without --model.

    The whole store is read. docs/rollout-store.md explains the numbers.

    Raises:
        StoreError: the store is damaged.
    """
    store = RolloutStore([directory], mixed_policies=True)
    size = sum(shard.path.stat().st_size for shard in store.shards)
    num_tokens = int(store.column("num_tokens").sum())
    return {
        "directory": str(directory),
        "shards": len(store.shards),
        "rollouts": len(store),
        "tokens": num_tokens,
        "bytes": size,
        "bytes_per_token": size / num_tokens,
        **_source(store),
        **_prompts(store),
        "reward": _spread(store.column("reward").astype(float)),
        # the share of rollouts with an advantage: NaN stands for none
        "advantages": float((~np.isnan(store.index.columns["advantage"])).mean()),
        **_responses(store),
        **_routes(store),
    }


def store_warnings(numbers: dict[str, Any]) -> list[str]:
    """A warning about rollouts with impossible log-probs, which training refuses; else empty.

    Args:
        numbers: from `inspect_store`.
    """
    impossible = numbers["impossible_logprobs"]
    if not impossible:
        return []
    more = f" (and in {len(impossible) - 1} other rollouts)" if impossible[1:] else ""
    return [f"{impossible[0]}{more}; training refuses such a log-prob"]


def _source(store: RolloutStore) -> dict[str, Any]:
    info = store.info
    versions, counts = np.unique(store.column("policy_version"), return_counts=True)
    infos = [shard.info for shard in store.shards]
    prints = {info.router_fingerprint for info in infos}
    return {
        # `str`, because a shard's header may hold values that are no texts
        "engine": str(info.engine),
        "engine_version": str(info.engine_version),
        "model": str(info.model),
        "sampling": vars(info.sampling).copy(),
        "vocab_size": info.vocab_size,
        "policy_stamps": sorted({str(info.policy_stamp) for info in infos} - {""}),
        "engine_policies": sorted({str(info.engine_policy) for info in infos} - {""}),
        "num_experts": info.num_experts,
        "topk": info.topk,
        "moe_layers": list(info.moe_layers),
        "router_fingerprints": sorted(list(digests) for digests in prints if digests),
        "policy_versions": {str(v): int(c) for v, c in zip(versions, counts, strict=True)},
    }


def _prompts(store: RolloutStore) -> dict[str, Any]:
    """How many prompts there are, the fewest and the most rollouts of a prompt, and the number of
    prompts for which all rewards are equal.

    A prompt counts once for each policy version that sampled responses to it.
    """
    reward_M = store.column("reward")
    _, group_M, counts = np.unique(store.groups(), return_inverse=True, return_counts=True)
    least, most = np.full(len(counts), np.inf), np.full(len(counts), -np.inf)
    # `ufunc.at`, because a group occurs several times in group_M: `least[group_M] = ...` would keep
    # only the value of each group's last rollout.
    np.minimum.at(least, group_M, reward_M)
    np.maximum.at(most, group_M, reward_M)
    return {
        "prompts": len(counts),
        "rollouts_per_prompt": [int(counts.min()), int(counts.max())],
        "prompts_of_one_reward": int((least == most).sum()),
    }


def _responses(store: RolloutStore) -> dict[str, Any]:
    lengths, total, impossible = [], 0.0, []
    kept_tokens, kept_ids, of_version = 0, 0, Counter[int]()
    for rollout in range(len(store)):
        fields = store.fields(rollout)
        logprobs_G = fields["logprobs"][fields["response"]]
        lengths.append(len(logprobs_G))
        total += float(logprobs_G.sum(dtype=np.float64))
        versions_N = store.versions(rollout)
        of_version.update(versions_N[versions_N >= 0].tolist())
        if (kept := store.kept(rollout)) is not None:
            kept_tokens, kept_ids = kept_tokens + len(logprobs_G), kept_ids + len(kept.ids_V)
        if wrong := wrong_logprob(logprobs_G):
            token = int(np.flatnonzero(fields["response"])[wrong[0]])
            impossible.append(f"{store.name(rollout)}: the log-prob of token {token} {wrong[1]}")
    return {
        "impossible_logprobs": impossible,
        "by_version": _by_version(store, np.array(lengths)),
        "response_tokens": sum(lengths),
        "token_versions": {
            str(version): count / max(sum(lengths), 1)
            for version, count in sorted(of_version.items())
        },
        "kept_share": kept_tokens / max(sum(lengths), 1),
        "kept_size": kept_ids / max(kept_tokens, 1),
        "response_length": _spread(np.array(lengths, float)),
        "logprob_mean": total / max(sum(lengths), 1),
    }


def _by_version(store: RolloutStore, length_M: np.ndarray) -> dict[str, dict[str, Any]]:
    """For each policy version the number, mean reward and mean response length of its rollouts, and
    the digests of its weights: a shard's stamp or, if it has none, the digest of its first router.

    A rollout that several versions sampled counts for the first one, its `policy_version`.
    """
    version_M, reward_M = store.column("policy_version"), store.column("reward")
    policies: dict[int, set[str]] = {}
    for shard in store.shards:
        policy = shard.info.policy_stamp or "".join(shard.info.router_fingerprint[:1])
        for version in np.unique(shard.tensors["policy_version"]).tolist():
            policies.setdefault(version, set()).update({str(policy)} - {""})
    return {
        str(version): {
            "rollouts": int(here_M.sum()),
            "reward": float(reward_M[here_M].mean(dtype=np.float64)),
            "response_length": float(length_M[here_M].mean()),
            "policies": sorted(policies[version]),
        }
        for version, here_M in ((v, version_M == v) for v in sorted(policies))
    }


def _spread(values: np.ndarray) -> dict[str, float]:
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": float(values.min()),
        "median": float(np.median(values)),
        "max": float(values.max()),
    }


def _layer(hidden: int | None, counts_E: np.ndarray, repeated: float) -> dict[str, Any]:
    """How a layer's rows spread over its experts.

    `uneven` is the largest load of an expert divided by the mean load. Example: 4 experts with 5,
    1, 1 and 1 rows have a mean of 2, so `uneven` is 2.5.

    Args:
        hidden: the number of the hidden layer; None for the sum of all layers.
        counts_E: how many rows chose each expert.
        repeated: the `repeated_rows` of `_routes`.
    """
    mean = counts_E.mean()
    return {
        "layer": hidden,
        "experts": counts_E.tolist(),
        "uneven": float(counts_E.max() / mean) if mean else 0.0,
        "busiest": int(counts_E.argmax()),
        "unused": int((counts_E == 0).sum()),
        "repeated_rows": repeated,
    }


def _routes(store: RolloutStore) -> dict[str, Any]:
    """The share of missing rows, and how the recorded rows spread over the experts.

    `repeated_rows` is the share of rows that have the same ids as the row before. Only pairs of
    recorded rows are counted. A layer has the share of rows that repeat in this layer. The store
    has the share of rows that repeat in all layers at once, which is near 0 unless an engine
    returns an old buffer again.
    """
    shape = len(store.info.moe_layers), store.info.num_experts
    counts_LE, repeated_L = np.zeros(shape, np.int64), np.zeros(shape[0], np.int64)
    rows = missing = pairs = repeated = 0
    for ids_LTK, recorded_T, follows_T in _chunks(store):
        rows += len(recorded_T)
        missing += int((~recorded_T).sum())
        counts_LE += count_recorded(ids_LTK, recorded_T, shape[1], str(store.directories[0]))
        pair_T = recorded_T[1:] & recorded_T[:-1] & follows_T[1:]
        same_LT = (ids_LTK[:, 1:] == ids_LTK[:, :-1]).all(-1) & pair_T
        pairs += int(pair_T.sum())
        repeated_L += same_LT.sum(1)
        repeated += int(same_LT.all(0).sum())
    of_all = repeated / max(pairs, 1)
    return {
        "missing_rows": missing / max(rows, 1),
        "repeated_rows": of_all,
        "layers": [
            _layer(hidden, counts_LE[i], repeated_L[i] / max(pairs, 1))
            for i, hidden in enumerate(store.info.moe_layers)
        ],
        "all_layers": _layer(None, counts_LE.sum(0), of_all),
    }


def _chunks(store: RolloutStore) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the rows of some rollouts at a time: ids `[L, T, K]`, recorded bits `[T]`, and bits
    `[T]` that are False for the first row of each rollout.

    Example: the last bits for rollouts of 3 and 2 rows are [False, True, True, False, True].
    """
    layers = range(len(store.info.moe_layers))
    batch: list[np.ndarray] = []
    for rollout in range(len(store)):
        batch.append(store.row_ids(rollout))
        if rollout == len(store) - 1 or sum(map(len, batch)) >= CHUNK_ROWS:
            follows_T = np.concatenate([np.arange(len(rows)) > 0 for rows in batch])
            yield (*store.routes(np.concatenate(batch), layers), follows_T)
            batch = []


def text_of(stores: Sequence[dict[str, Any]]) -> str:
    """A table of the stores side by side, then for each store a table of its policy versions.

    Args:
        stores: from `inspect_store`.
    """
    versions = (
        f"policy versions, {one_line(store['directory'])}:\n{_versions(store)}" for store in stores
    )
    columns = [dict(_facts(store)) for store in stores]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = ([name, *(column.get(name, "-") for column in columns)] for name in names)
    return "\n\n".join([_grid(rows), *versions])


def _versions(store: dict[str, Any]) -> str:
    """A table with a row for each policy version that sampled tokens of the store."""
    rollouts, tokens = store["by_version"], store["token_versions"]
    rows = [["version", "rollouts", "reward", "response length", "share of tokens", "policy"]]
    for version in sorted({*rollouts, *tokens}, key=int):
        # no entry if the version only continued rollouts of earlier versions
        row = rollouts.get(version, {})
        of_row = [row.get(name) for name in ("rollouts", "reward", "response_length")]
        policies = row.get("policies", ["in rollouts of earlier versions"])
        rows.append([*map(_cell, [version, *of_row, tokens.get(version, 0.0), policies])])
    return _grid(rows)


def _facts(numbers: Mapping[str, Any], of: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and text of each number, for example "reward mean" and "0.25"."""
    for key, value in numbers.items():
        name = f"{of} {key}".replace("_", " ").strip()
        if key in NOT_IN_TABLE:
            continue
        if isinstance(value, Mapping):
            yield from _facts(value, name)
        else:
            yield name, _cell(value)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        if len(value) > MOST_VALUES:
            return f"{len(value)} values, see --json"
        return " ".join(map(_cell, value)) or "-"
    return "-" if value in (None, "") else str(value)


def _grid(rows: Iterable[Sequence[str]]) -> str:
    """The rows as lines of text, in columns.

    Names in a store may hold anything, so every cell is made one line without control characters.
    """
    lines = [[one_line(cell, MOST_CELL) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
