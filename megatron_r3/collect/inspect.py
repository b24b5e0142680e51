"""What stores hold, in numbers and as a table: rollouts, and how routes spread over the experts.

Shape suffixes (docs/glossary.md): E, G, K, L, M, N, T, V.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.data.store import RolloutStore
from megatron_r3.data.store.expert_load import count_rows
from megatron_r3.data.values import wrong_logprob
from megatron_r3.replay.words import one_line

CHUNK_ROWS = 1 << 15  # read at a time
BARS, PLAIN_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"  # the second for terminals without UTF-8
MOST_BARS = 64  # characters of a histogram
MOST_CELL = 400  # characters of a cell of the table


def inspect_store(directory: Path) -> dict[str, Any]:
    """All numbers about a store, ready for JSON (docs/rollout-store.md). It reads the whole store.

    Raises:
        StoreError: the store is damaged.
    """
    store = RolloutStore([directory], mixed_policies=True)
    routes = _read_routes(store)
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
        "advantages": _share_of_advantages(store),
        **_responses(store),
        "missing_rows": routes.missing / max(routes.rows, 1),
        "repeated_rows": routes.repeated / max(routes.pairs, 1),
        "layers": [
            _layer(hidden, routes.counts_LE[i], routes.repeated_L[i] / max(routes.pairs, 1))
            for i, hidden in enumerate(store.info.moe_layers)
        ],
        "all_layers": _layer(None, routes.counts_LE.sum(0), routes.repeated / max(routes.pairs, 1)),
    }


def store_warnings(numbers: dict[str, Any]) -> list[str]:
    """What to look at before training on a store; empty if there is nothing.

    Args:
        numbers: from `inspect_store`.
    """
    impossible = numbers["impossible_logprobs"]
    if not impossible:
        return []
    more = f" (and in {len(impossible) - 1} other rollouts)" if impossible[1:] else ""
    return [f"{impossible[0]}{more}; training refuses it"]


def _source(store: RolloutStore) -> dict[str, Any]:
    info = store.info
    versions, counts = np.unique(store.column("policy_version"), return_counts=True)
    infos = [shard.info for shard in store.shards]
    prints = {info.router_fingerprint for info in infos}
    return {
        # `str`, because the header of a shard may have anything in the place of a text
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
    """How many prompts there are, how many rollouts each has, and how many have one reward only."""
    reward_M = store.column("reward")
    _, group_M, counts = np.unique(store.groups(), return_inverse=True, return_counts=True)
    least, most = np.full(len(counts), np.inf), np.full(len(counts), -np.inf)
    # `ufunc.at`, because a group occurs several times in group_M: `least[group_M] = ...` would keep
    # what the last rollout of each group brings.
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
    """By policy version: how many rollouts, means of their rewards and lengths, and the policies.

    A rollout of several versions counts as one of its first version, which is its `policy_version`.
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


def _share_of_advantages(store: RolloutStore) -> float:
    given = [s.extras.advantage(i) is not None for s in store.shards for i in range(s.num_rollouts)]
    return sum(given) / len(given)


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

    `uneven` is the load of the busiest expert in units of the mean load. Example: 4 experts with 5,
    1, 1 and 1 rows have a mean of 2, so `uneven` is 2.5.

    Args:
        hidden: the hidden layer; None for the sum of all layers.
        repeated: the share of rows that are the same as the row before.
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


@dataclass
class _Routes:
    """Counts over all rows of a store.

    Attributes:
        rows: all rows.
        missing: rows that the engine returned no route for.
        pairs: recorded rows that follow a recorded row of the same rollout.
        repeated: pairs whose two rows are the same in all layers.
        repeated_L: pairs whose two rows are the same in each layer.
        counts_LE: rows of each expert.
    """

    repeated_L: np.ndarray
    counts_LE: np.ndarray
    rows: int = 0
    missing: int = 0
    pairs: int = 0
    repeated: int = 0


def _read_routes(store: RolloutStore) -> _Routes:
    layers, experts = len(store.info.moe_layers), store.info.num_experts
    seen = _Routes(np.zeros(layers, np.int64), np.zeros((layers, experts), np.int64))
    for ids_LTK, recorded_T, follows_T in _chunks(store):
        seen.rows += len(recorded_T)
        seen.missing += int((~recorded_T).sum())
        for layer, ids_TK in enumerate(ids_LTK):
            where = f"{store.shards[0].path.parent}: MoE layer {layer}"
            seen.counts_LE[layer] += count_rows(ids_TK, recorded_T, experts, where)
        # Neighbours of one rollout that have the same row in all layers are rare. An engine that
        # returns a stale buffer makes many of them.
        pair_T = recorded_T[1:] & recorded_T[:-1] & follows_T[1:]
        same_LT = (ids_LTK[:, 1:] == ids_LTK[:, :-1]).all(-1) & pair_T
        seen.pairs += int(pair_T.sum())
        seen.repeated_L += same_LT.sum(1)
        seen.repeated += int(same_LT.all(0).sum())
    return seen


def _chunks(store: RolloutStore) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Ids, recorded bits, and whether a row follows the row before it, of some rollouts at a time.

    Example: rollouts of 3 and 2 rows follow as [no, yes, yes, no, yes].
    """
    layers = range(len(store.info.moe_layers))
    batch: list[np.ndarray] = []
    for rollout in range(len(store)):
        batch.append(store.row_ids(rollout))
        if rollout == len(store) - 1 or sum(map(len, batch)) >= CHUNK_ROWS:
            follows_T = np.concatenate([np.arange(len(rows)) > 0 for rows in batch])
            yield (*store.routes(np.concatenate(batch), layers), follows_T)
            batch = []


def table(stores: Sequence[dict[str, Any]]) -> str:
    """Stores side by side as text: a row for each fact, a column for each store.

    Whoever wrote a store chose the names in it, so every cell is made one line without control
    characters.

    Args:
        stores: from `inspect_store`.
    """
    columns = [_column(store) for store in stores]
    names = list(columns[0])
    cells = [names, *([one_line(column[name], MOST_CELL) for name in names] for column in columns)]
    widths = [max(map(len, column)) for column in cells]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*cells, strict=True)
    ]
    return "\n".join([*lines, *(text for store in stores for text in _versions(store))])


def _versions(store: dict[str, Any]) -> list[str]:
    """A line for each policy version that sampled, if there are several."""
    rollouts, tokens = store["by_version"], store["token_versions"]
    versions = sorted({*rollouts, *tokens}, key=int)
    if len(versions) < 2:
        return []
    lines = [f"\npolicy versions, {one_line(store['directory'])}:"]
    lines.append("version  rollouts   reward   length  of all tokens  policy")
    for version in versions:
        row = rollouts.get(version)
        said = (
            f"{row['rollouts']:8} {row['reward']:8.4g} {row['response_length']:8.1f}" if row else ""
        )
        policy = one_line(_few(row["policies"]), 40) if row else "in rollouts of earlier ones"
        lines.append(f"{version:>7}  {said:26}  {tokens.get(version, 0):13.1%}  {policy}")
    return lines


def _few(values: Sequence[str]) -> str:
    """The value that all have, or how many different ones there are."""
    return f"{len(values)} different" if len(values) > 1 else "".join(values) or "none"


def _column(store: dict[str, Any]) -> dict[str, str]:
    reward, length = store["reward"], store["response_length"]
    least, most = store["rollouts_per_prompt"]
    versions = [*store["policy_versions"]]
    policies = store["engine_policies"]
    experts = f"{store['num_experts']} in {len(store['moe_layers'])} layers, top-{store['topk']}"
    all_layers = store["all_layers"]
    return {
        "store": store["directory"],
        "rollouts": f"{store['rollouts']} in {store['shards']} shards",
        "prompts": f"{store['prompts']}, {_range(least, most)} rollouts each",
        "policy version": versions[0] if len(versions) == 1 else f"{len(versions)}, see below",
        "engine": f"{store['engine']} {store['engine_version']}",
        "model": store["model"] or "-",
        "sampling": _sampling(store["sampling"]),
        "kept sets": f"of {store['kept_share']:.1%} of the sampled tokens, mean size "
        f"{store['kept_size']:.1f}"
        if store["kept_share"]
        else "none",
        "advantages": "given"
        if store["advantages"] == 1
        else f"of {store['advantages']:.1%}"
        if store["advantages"]
        else "none",
        "vocabulary": f"{store['vocab_size'] or 'not said'}",
        "router fingerprint": _few([digests[0] for digests in store["router_fingerprints"]]),
        "policy stamp": _few(store["policy_stamps"]),
        "engine's policy": _few(policies) if policies else "not said",
        "experts": experts,
        "reward": f"{reward['mean']:.4g} ± {reward['std']:.4g} "
        f"({_range(reward['min'], reward['max'])})",
        "prompts of one reward": f"{store['prompts_of_one_reward']}",
        "tokens": f"{store['tokens']}, {store['response_tokens']} sampled",
        "response length": f"{length['mean']:.1f} ± {length['std']:.1f} "
        f"({_range(length['min'], length['max'])}, median {length['median']:g})",
        "mean log-prob": f"{store['logprob_mean']:.4f}",
        "impossible log-probs": f"in {len(store['impossible_logprobs'])} rollouts",
        "on disk": f"{_size(store['bytes'])}, {store['bytes_per_token']:.1f} bytes a token",
        "missing rows": f"{store['missing_rows']:.2%}",
        "rows like the one before": f"{store['repeated_rows']:.2%}",
        "busiest expert": f"{_worst(store)}; {all_layers['uneven']:.2f} over all layers",
        "unused experts": str(sum(layer["unused"] for layer in store["layers"])),
        **(_agreement(store) if "agreement" in store else {}),
    }


def _sampling(settings: dict[str, Any]) -> str:
    """Example: temperature 1, top-p 1, at most 64 tokens."""
    names = {"temperature": "temperature", "top_p": "top-p", "top_k": "top-k", "min_p": "min-p"}
    words = [
        f"{text} {settings[name]:g}" if name != "top_k" or settings[name] else "top-k off"
        for name, text in names.items()
        if settings[name] is not None
    ]
    if settings["max_tokens"] is not None:
        words.append(f"at most {settings['max_tokens']} tokens")
    if settings["logprobs_of"] is not None:
        words.append(f"log-probs {settings['logprobs_of']}")
    return ", ".join(words) or "not said"


def _agreement(store: dict[str, Any]) -> dict[str, str]:
    measured, several = store["agreement"], len(store["policy_versions"]) > 1
    return {
        "compared with transformers": f"{measured['rollouts']} rollouts, "
        f"{measured['tokens']} sampled tokens"
        + (f", of policy version {measured['policy_version']}" if several else ""),
        "same routes, by layer": " ".join(f"{share:.3f}" for share in measured["routes"]),
        "k3 KL, mean |dlogp|": f"{measured['k3_kl']:.5f}, {measured['abs_dlogp']:.5f}",
        "ratio outside 1/2..2": f"{measured['extreme']:.3%}",
    }


def _worst(store: dict[str, Any]) -> str:
    worst = max(store["layers"], key=lambda layer: layer["uneven"])
    return f"{worst['uneven']:.2f} times the mean (layer {worst['layer']})"


def _range(least: float, most: float) -> str:
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "bytes" else f"{count} bytes"
        count /= 1000
    return f"{count:.3g} TB"


def histogram(store: dict[str, Any], each_layer: bool, encoding: str) -> str:
    """The rows of each expert as bars: a line for each layer, or one line for the sum of them.

    Args:
        encoding: of the terminal.
    """
    layers = store["layers"] if each_layer else [store["all_layers"]]
    names = [f"layer {layer['layer']}" if each_layer else "all layers" for layer in layers]
    width = max(map(len, names))
    return "\n".join(
        f"{name.ljust(width)}  {_bars(layer['experts'], encoding)}  busiest {layer['busiest']}, "
        f"{layer['uneven']:.2f} times the mean; {layer['unused']} unused; "
        f"{layer['repeated_rows']:.2%} repeated"
        for name, layer in zip(names, layers, strict=True)
    )


def _bars(counts: Sequence[int], encoding: str) -> str:
    """A character for each expert, or for some neighbours together if there are many experts.

    Example: 128 experts make 64 characters of 2 experts each. The highest bar is the busiest; a bar
    that is not blank has at least one row.
    """
    bars = BARS if "utf" in encoding.lower() else PLAIN_BARS
    each = -(-len(counts) // MOST_BARS)  # rounded up, as is the height of a bar below
    sums = [sum(counts[i : i + each]) for i in range(0, len(counts), each)]
    top = max(*sums, 1)
    return "|" + "".join(bars[-(-8 * value // top)] for value in sums) + "|"
