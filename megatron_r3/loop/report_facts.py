"""What a run is, in words for people, from its config and its newest policy.

The config is that of `megatron-r3 rl run`. It is read for a reader's sake, and nothing depends on
it: a field that is missing is not shown.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_r3.data.untrusted import read_json
from megatron_r3.replay.words import one_line, quoted

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Megatron's options of the layout, as people write them short
_LAYOUT = {
    "--tensor-model-parallel-size": "TP",
    "--pipeline-model-parallel-size": "PP",
    "--context-parallel-size": "CP",
    "--expert-model-parallel-size": "EP",
    "--expert-tensor-parallel-size": "ETP",
}
OPTIONS = "training options"  # the name of that fact
_SHOWN = re.compile(r"--(no-)?(moe-router-replay|rollouts)[a-z-]*|--(lr|bf16|fp16)")


def facts_of(directory: Path) -> dict[str, str]:
    """Words for each fact that config.toml and the newest policy of a run tell.

    Returns:
        Of "model", "layout", "sampler", "loop" and "training options" those that are known.

    Raises:
        ValueError: config.toml is not TOML, or a policy's config.json is not JSON.
    """
    file = directory / "config.toml"
    tables: dict[str, Any] = {}
    if file.is_file():
        try:
            tables = tomllib.loads(file.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{file}: not TOML ({one_line(str(error), 200)})") from error
    trainer = _table(tables, "trainer")
    options = _options(_words(trainer.get("arguments")))
    facts = {
        "model": _model(directory),
        "layout": _layout(trainer, options) if trainer else "",
        "sampler": _sampler(_table(tables, "sampler"), _table(tables, "degrade")),
        "loop": _loop(_table(tables, "run"), trainer),
        OPTIONS: " ".join(
            f"{name} {value}".strip() for name, value in options.items() if _SHOWN.fullmatch(name)
        ),
    }
    return {name: text for name, text in facts.items() if text}


def _table(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = tables.get(name)
    return table if isinstance(table, dict) else {}


def _words(texts: Any) -> list[str]:
    """The arguments one by one: a text of the list may hold several, as a shell reads them."""
    if not isinstance(texts, list):
        return []
    words = []
    for text in map(str, texts):
        try:
            words += shlex.split(text)
        except ValueError:  # a quotation mark without its partner, which the loop refuses too
            words.append(text)
    return words


def _options(words: list[str]) -> dict[str, str]:
    """Each option with its values: `["--a", "1", "2", "--b=3"]` is `{"--a": "1 2", "--b": "3"}`."""
    options: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            options[name] = value
        elif name:
            options[name] = f"{options[name]} {word}".strip()
    return options


def _layout(trainer: Mapping[str, Any], options: Mapping[str, str]) -> str:
    sizes = [f"{short}{options[name]}" for name, short in _LAYOUT.items() if name in options]
    if trainer.get("launch"):
        number = "processes of a command of its own"
    else:
        count = trainer.get("processes", 1)
        number = f"{count} {'process' if count == 1 else 'processes'}"
    return ", ".join([number, " ".join(sizes)] if sizes else [number])


def _sampler(sampler: Mapping[str, Any], degrade: Mapping[str, Any]) -> str:
    if not sampler:
        return ""
    engine = str(sampler.get("engine", "embedded"))
    words = [f"{engine} (transformers)" if engine == "embedded" else engine]
    in_place = sampler.get("in_place", True)
    words.append("new weights in place" if in_place else "started anew for new weights")
    worse = [f"{name} {value}" for name, value in degrade.items() if value]
    return ", ".join([*words, f"made worse on purpose: {', '.join(worse)}"] if worse else words)


def _loop(run: Mapping[str, Any], trainer: Mapping[str, Any]) -> str:
    if not run:
        return ""
    steps = trainer.get("steps", 1)
    lag = run.get("lag", 0)
    return f"{steps} {'step' if steps == 1 else 'steps'} on a collection, lag {lag}"


def _model(directory: Path) -> str:
    """The model of the newest policy, from its config.json; empty if no policy is there."""
    configs = sorted(directory.glob("policies/v[0-9]*[0-9]/config.json"))
    if not configs:
        return ""
    config = read_json(configs[-1].read_bytes(), str(configs[-1]))
    if not isinstance(config, dict):
        raise ValueError(f"{configs[-1]}: expected a JSON object, got {quoted(config)}")

    def first(*names: str) -> str:
        values = [config[name] for name in names if config.get(name) is not None]
        return one_line(str(values[0]), 60) if values else "?"

    experts = first("num_experts", "num_local_experts", "n_routed_experts")
    return (
        f"{first('model_type')}, {first('num_hidden_layers')} layers, hidden size "
        f"{first('hidden_size')}, {experts} experts, top-{first('num_experts_per_tok')}"
    )
