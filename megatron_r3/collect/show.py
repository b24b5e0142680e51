"""`megatron-r3 rollouts show`: single rollouts of a store, as text.

Shape suffixes (docs/glossary.md): C, K, L, N, T, U.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_r3.data.rollout import Rollout
    from megatron_r3.data.truth import Compared

MOST_PLACES = 20  # tokens, or (token, layer) pairs, that a line names
MOST_TEXT = 10_000  # characters of a decoded text


def add_show(commands: Any) -> None:
    """Register `rollouts show`."""
    summary = "show rollouts: prompt, response, reward, policy version, and where routes differ"
    parser = commands.add_parser("show", help=summary, description=summary)
    parser.add_argument("store", type=Path, metavar="DIR", help="the rollout store")
    parser.add_argument(
        "rollouts", nargs="*", default=["0"], metavar="ROLLOUT",
        help="number of a rollout in the store, or SHARD:NUMBER for its number in a shard; shards "
        "and rollouts count from 0 (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--model", type=Path, metavar="HF_DIR",
        help="show the text, by this model's tokenizer; if the folder has weights, run the "
        "rollouts through transformers, and show which routes differ",
    )  # fmt: skip
    parser.set_defaults(run=run_show)


def run_show(args: argparse.Namespace) -> int:
    """Print the rollouts that were asked for."""
    from megatron_r3.data.store import RolloutStore
    from megatron_r3.replay.words import one_line

    store = RolloutStore([args.store], mixed_policies=True)
    numbers = [_number(store, text) for text in args.rollouts]
    rollouts = {store.name(number): store.rollout(number) for number in numbers}
    tokenizer, compared = None, {}
    if args.model is not None:
        if not args.model.is_dir():
            raise ValueError(f"--model {args.model}: no such folder: give a transformers directory")
        tokenizer = _tokenizer(args.model)
        if any(args.model.glob("*.safetensors")):
            from megatron_r3.collect.engine_agreement import compare_rollouts

            made = compare_rollouts(rollouts, store.info, args.model, where=str(args.store))
            compared = {one.name: one for one in made.compared}
    for name, rollout in rollouts.items():
        print(one_line(name))
        for title, text in _lines(rollout, tokenizer):
            print(f"  {title + ':':16}{text}")
        if name in compared:
            differing = _differing(compared[name], store.info.moe_layers)
            print(f"  {'unlike --model:':16}{differing}")
    return 0


def _number(store: Any, text: str) -> int:
    """The number in the store of the rollout `12`, or of `1:3`, which is rollout 3 of shard 1."""
    shard, colon, number = text.rpartition(":")
    sizes = [one.num_rollouts for one in store.shards] if colon else [len(store)]
    if re.fullmatch("([0-9]{1,9}:)?[0-9]{1,9}", text):
        index = int(shard or 0)
        if index < len(sizes) and int(number) < sizes[index]:
            return sum(sizes[:index]) + int(number)
    raise ValueError(
        f"{store.directories[0]}: no rollout {text!r}: it has {len(store)} rollouts in "
        f"{len(store.shards)} shards; give a number from 0 to {len(store) - 1}, or SHARD:NUMBER"
    )


def _tokenizer(model: Path) -> Any:
    """The tokenizer of a folder; None if the folder has none that transformers can load."""
    if not any(model.glob("tokenizer*")):  # transformers would make an empty tokenizer
        return None
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model)
    except Exception:  # files that are no tokenizer raise errors of any kind
        return None


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
    from megatron_r3.replay.words import one_line

    yield title, f"{len(tokens_N)} tokens: {' '.join(map(str, tokens_N.tolist()))}"
    if tokenizer is not None:
        yield "as text", one_line(repr(tokenizer.decode(tokens_N.tolist())), MOST_TEXT)


def _differing(one: Compared, moe_layers: tuple[int, ...]) -> str:
    """How many recorded routes differ from the model's own, and at which (token, layer) pairs."""
    import numpy as np

    routes = one.rollout.routes
    stored_LTK, live_LTK = np.sort(routes.ids_LTK, axis=-1), np.sort(one.live_LTK, axis=-1)
    differs_LT = (stored_LTK != live_LTK).any(-1) & routes.recorded_T
    places = [f"{token}/{moe_layers[layer]}" for token, layer in np.argwhere(differs_LT.T).tolist()]
    pairs = int(routes.recorded_T.sum()) * len(moe_layers)
    return f"{len(places)} of {pairs} routes" + (
        f", at token/layer {_few(places)}" if places else ""
    )


def _few(places: list[Any]) -> str:
    """The first `MOST_PLACES` items, separated by spaces, and how many more there are."""
    more = f" and {len(places) - MOST_PLACES} more" if len(places) > MOST_PLACES else ""
    return " ".join(map(str, places[:MOST_PLACES])) + more
