"""`megatron-r3 rollouts show`: single rollouts of a store, as text.

Shape suffixes (docs/glossary.md): C, N, T, U.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_r3.replay.words import one_line

if TYPE_CHECKING:
    from megatron_r3.data.rollout import Rollout

MOST_PLACES = 20  # tokens that a line names
MOST_TEXT = 10_000  # characters of a decoded text


def run_show(args: argparse.Namespace) -> int:
    """Print the rollouts that were asked for."""
    from megatron_r3.data.store import RolloutStore

    store = RolloutStore([args.store], mixed_policies=True)
    if wrong := [number for number in args.rollouts if not 0 <= number < len(store)]:
        raise ValueError(
            f"{args.store}: no rollout {wrong[0]}: give a number from 0 to {len(store) - 1}"
        )
    tokenizer = None if args.model is None else _tokenizer(args.model)
    for number in args.rollouts:
        print(one_line(store.name(number)))
        for title, text in _lines(store.rollout(number), tokenizer):
            print(f"  {title + ':':16}{text}")
    return 0


def _tokenizer(model: Path) -> Any:
    if not any(model.glob("tokenizer*")):  # transformers would make an empty tokenizer
        raise ValueError(f"--model {model}: there is no tokenizer: leave --model out")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def _lines(rollout: Rollout, tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Yield the title and text of each line that shows a rollout."""
    import numpy as np

    spans = "" if rollout.versions_C2 is None else f", then {rollout.versions_C2[1:, 1].tolist()}"
    yield "policy version", f"{rollout.policy_version}{spans}"
    yield "group, sample", f"{rollout.group}, {rollout.sample}"
    given = "" if rollout.advantage is None else f", advantage {rollout.advantage:g}"
    yield "reward", f"{rollout.reward:g}{given}"
    end = 0
    for first, last in rollout.spans_U2.tolist():
        if first > end:
            yield from _part("between" if end else "prompt", rollout.tokens_N[end:first], tokenizer)
        yield from _part("response", rollout.tokens_N[first:last], tokenizer)
        end = last
    if end < len(rollout.tokens_N):
        yield from _part("after response", rollout.tokens_N[end:], tokenizer)
    missing = np.flatnonzero(~rollout.routes.recorded_T).tolist()
    which = f"; not for tokens {_few(missing)}" if missing else ""
    rows = rollout.routes.num_rows
    yield "routes", f"recorded for {rows - len(missing)} of {rows} tokens{which}"


def _part(title: str, tokens_N: Any, tokenizer: Any) -> Iterator[tuple[str, str]]:

    yield title, f"{len(tokens_N)} tokens: {' '.join(map(str, tokens_N.tolist()))}"
    if tokenizer is not None:
        yield "as text", one_line(repr(tokenizer.decode(tokens_N.tolist())), MOST_TEXT)


def _few(places: list[Any]) -> str:
    """The first `MOST_PLACES` items, separated by spaces, and how many more there are."""
    more = f" and {len(places) - MOST_PLACES} more" if len(places) > MOST_PLACES else ""
    return " ".join(map(str, places[:MOST_PLACES])) + more
