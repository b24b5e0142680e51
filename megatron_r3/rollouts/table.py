"""Stores side by side as text, and how their routes are spread over the experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_r3.untrusted import one_line

__all__ = ["histogram", "table"]

BARS, PLAIN_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
WIDTH = 64  # characters of a histogram
CELL = 400  # of a cell, at most


def table(stores: Sequence[dict[str, Any]]) -> str:
    """A row for each fact, a column for each store (`inspect_store`).

    Whoever wrote a store chose the names in it: a cell is one line that a terminal shows as it is.
    """
    columns = [_column(store) for store in stores]
    names = list(columns[0])
    cells = [names, *([one_line(column[name], CELL) for name in names] for column in columns)]
    widths = [max(map(len, column)) for column in cells]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*cells, strict=True)
    ]
    return "\n".join(lines)


def _column(store: dict[str, Any]) -> dict[str, str]:
    reward, length = store["reward"], store["response_length"]
    least, most = store["rollouts_per_prompt"]
    versions = (f"{v} ({count})" for v, count in store["policy_versions"].items())
    prints = store["router_fingerprints"]
    stamps, policies = store["policy_stamps"], store["engine_policies"]
    experts = f"{store['num_experts']} in {len(store['moe_layers'])} layers, top-{store['topk']}"
    all_layers = store["all_layers"]
    return {
        "store": store["directory"],
        "rollouts": f"{store['rollouts']} in {store['shards']} shards",
        "prompts": f"{store['prompts']}, {_range(least, most)} rollouts each",
        "policy version": ", ".join(versions),
        "engine": f"{store['engine']} {store['engine_version']}",
        "model": store["model"] or "-",
        "sampling": _sampling(store["sampling"]),
        "vocabulary": f"{store['vocab_size'] or 'not said'}",
        "router fingerprint": " ".join(one[0] for one in prints) if prints else "none",
        "policy stamp": " ".join(stamps) if stamps else "none",
        "engine's policy": ", ".join(policies) if policies else "not said",
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
        **(_agreement(store["agreement"]) if "agreement" in store else {}),
    }


def _sampling(settings: dict[str, Any]) -> str:
    """Example: temperature 1, top-p 1, at most 64 tokens."""
    names = {"temperature": "temperature", "top_p": "top-p", "top_k": "top-k", "min_p": "min-p"}
    said = [
        f"{text} {settings[name]:g}" if name != "top_k" or settings[name] else "top-k off"
        for name, text in names.items()
        if settings[name] is not None
    ]
    if settings["max_tokens"] is not None:
        said.append(f"at most {settings['max_tokens']} tokens")
    return ", ".join(said) or "not said"


def _agreement(measured: dict[str, Any]) -> dict[str, str]:
    return {
        "compared with transformers": f"{measured['rollouts']} rollouts, "
        f"{measured['tokens']} sampled tokens",
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
    """Rows of each expert: a line for each layer, or one for all of them."""
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
    """A character for each expert, or for some neighbours together."""
    bars = BARS if "utf" in encoding.lower() else PLAIN_BARS
    each = -(-len(counts) // WIDTH)
    sums = [sum(counts[i : i + each]) for i in range(0, len(counts), each)]
    top = max(*sums, 1)
    return "|" + "".join(bars[-(-8 * value // top)] for value in sums) + "|"
