"""Tries on config.json: other numbers, other types, noise, and numbers that would fill the memory.

`meant` is a second reader of config.json, written from docs/engines.md for three families of
models. Each try compares the result of megatron_r3's reader with that of `meant`.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

from megatron_r3.collect.prompt_plan import read_model
from megatron_r3.data.engines.shape import ModelShape
from proof.fuzz.damage import TEXTS, damage, noise, odd
from proof.fuzz.driver import Kind
from proof.fuzz.outcome import judged, note

_STEP = {
    "model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 512,
}  # fmt: skip
_FIRST = {
    "model_type": "deepseek_v3", "num_hidden_layers": 4, "n_routed_experts": 64,
    "num_experts_per_tok": 8, "first_k_dense_replace": 1, "moe_layer_freq": 1, "vocab_size": 512,
}  # fmt: skip
_EVERY = {
    "model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 100,
}  # fmt: skip
_FAMILIES: list[dict[str, Any]] = [_STEP, _FIRST, _EVERY]
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
Meaning = tuple[int, tuple[int, ...], int, int, int | None]


def attempt(rng: random.Random, folder: Path, state: None) -> str:
    """Write a config, changed in most tries, and read the model's shape from it."""
    config = {"architectures": ["A"], "hidden_size": 64, **copy.deepcopy(rng.choice(_FAMILIES))}
    kind = rng.choice(("nothing", "possible", *["damage"] * 4, "noise", "text"))
    said = kind
    if kind == "possible":
        said = _possible(config, rng)
    if kind == "damage":
        said = " and ".join(_change(config, rng) for _ in range(rng.choice((1, 1, 2))))
    data = json.dumps(config).encode()
    if kind == "text":
        data = rng.choice(TEXTS).encode()
    if kind == "noise":
        data, said = noise(data, rng)
    note(folder, f"{said}: {data[:200]!a}")
    path = folder / "config.json"
    path.write_bytes(data)
    given = rng.choice((path, folder))
    expected = meant(data)

    def difference(got: Meaning) -> str | None:
        if expected is None:
            return f"accepted as {str(got)[:200]!a}, but no model has this config: {data[:300]!a}"
        return None if got == expected else f"{got}, not {expected}"

    return judged(lambda: _read(given), difference, [str(path)], must=kind == "nothing")


def _read(path: Path) -> Meaning:
    model = read_model(path)
    assert model.shape == ModelShape.from_hf_config(path)
    assert not model.router_fingerprint
    shape = model.shape
    return (
        shape.num_hidden_layers,
        shape.moe_layers,
        shape.num_experts,
        shape.topk,
        model.vocab_size,
    )


def meant(data: bytes) -> Meaning | None:
    """What a config means: layers, MoE layers, experts, top-k and vocabulary size.

    None means that no model can have the config. The vocabulary is None if the config has none.
    """
    try:
        config = json.loads(data.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    layers = _whole(config.get("num_hidden_layers"), 1, 10_000)
    topk = _whole(config.get("num_experts_per_tok"), 1, 32_768)
    experts = {str(config[name]): config[name] for name in _EXPERTS if config.get(name) is not None}
    vocabulary = config.get("vocab_size")
    known = vocabulary is None or _whole(vocabulary, 1, 2**31) is not None
    if layers is None or topk is None or len(experts) != 1 or not known:
        return None
    count = _whole(next(iter(experts.values())), 1, 32_768)
    moe = _moe(config, layers)
    if count is None or topk > count or not moe:
        return None
    return layers, moe, count, topk, vocabulary


def _whole(value: Any, least: int, most: int) -> int | None:
    return value if type(value) is int and least <= value <= most else None


def _moe(config: dict[str, Any], layers: int) -> tuple[int, ...] | None:
    # a list of all layers overrules all other fields; with ["dense", "sparse"] layer 1 has experts
    names = config.get("mlp_layer_types")
    if names is not None:
        if not isinstance(names, list) or len(names) != layers:
            return None
        if any(name not in ("dense", "sparse") for name in names):
            return None
        return tuple(i for i in range(layers) if names[i] == "sparse")
    kind = config.get("model_type")
    if kind == "qwen3_moe":
        step = config.get("decoder_sparse_step")
        step = 1 if step is None else _whole(step, 1, 10_000)
        dense = config.get("mlp_only_layers")
        dense = [] if dense is None else dense
        listed = isinstance(dense, list) and all(
            type(layer) is int and layer >= 0 for layer in dense
        )
        if step is None or not listed:
            return None
        # with a step of 2 the MoE layers are 1, 3, 5 ...
        return tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    if kind == "deepseek_v3":
        first = _whole(config.get("first_k_dense_replace"), 0, 10_000)
        frequency = config.get("moe_layer_freq")
        if isinstance(frequency, list):
            if first is None or len(frequency) != layers:
                return None
            if any(not isinstance(flag, int) or flag not in (0, 1) for flag in frequency):
                return None
            return tuple(i for i in range(first, layers) if frequency[i])
        step = 1 if frequency is None else _whole(frequency, 1, 10_000)
        if first is None or step is None:
            return None
        # with a step of 2 and a dense layer 0 the MoE layers are 2, 4, 6 ...
        return tuple(i for i in range(first, layers) if i % step == 0)
    return tuple(range(layers)) if kind == "mixtral" else None


def _possible(config: dict[str, Any], rng: random.Random) -> str:
    """Set other values, of which most are possible; return the name of the changed number."""
    name = rng.choice([key for key, value in config.items() if type(value) is int])
    config[name] = rng.choice((1, 2, 3, 5, 8, 61, 256, 20_000, 4_000_000_000))
    layers = config["num_hidden_layers"]
    if config["model_type"] == "qwen3_moe" and rng.randrange(3) == 0:
        config["mlp_only_layers"] = [rng.randrange(5) for _ in range(2)]
    if layers < 100 and rng.randrange(5) == 0:
        types = [rng.choice(("dense", "sparse")) for _ in range(layers)]
        config["mlp_layer_types"] = types
    return f"another number: {name}"


def _change(config: dict[str, Any], rng: random.Random) -> str:
    name = rng.choice(("", "", "", "mlp_layer_types", "num_experts", "moe_layer_freq"))
    if not name:
        return damage(config, rng)
    config[name] = odd(rng)
    return f"typed {name}"


KIND = Kind("configs", attempt)
