"""How the tokens of a response were drawn: from which kept sets, and by which weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_r3.data.engines.shape import EngineError
from megatron_r3.data.kept import KeptSets
from megatron_r3.replay.words import quoted

_WHOLE = re.compile("[0-9]{1,18}")


def kept_sets(lists: Any, name: str, prompt_length: int, num_sampled: int) -> KeptSets | None:
    """The kept sets of a response's tokens, from a list of ids for each sampled token.

    Args:
        lists: the lists in the response; None gives None.
        name: the field that has the lists, for errors.
        prompt_length: how many tokens the prompt has; they get empty sets.
        num_sampled: how many lists are expected.

    Raises:
        EngineError: another number of lists, or something in them that is no token id.
    """
    if lists is None:
        return None
    if not isinstance(lists, list) or not all(isinstance(one, list) for one in lists):
        raise EngineError(f"{name}: expected a list of ids for each response token")
    if len(lists) != num_sampled:
        raise EngineError(f"{name}: {len(lists)} lists for {num_sampled} response tokens")
    # The types are checked first, because numpy would turn True into 1.
    for index, one in enumerate(lists):
        if not all(type(entry) is int for entry in one):
            token = prompt_length + index
            raise EngineError(f"{name}: the list of token {token} has an entry that is no id")
    try:
        return KeptSets.from_lists([*([[]] * prompt_length), *lists])
    except (ValueError, OverflowError) as error:
        raise EngineError(f"{name}: {error}") from error


def version_spans(spans: Any, num_sampled: int) -> np.ndarray | None:
    """The version of the weights that sampled each token: an int64 for each sampled token.

    Example: `[{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]` is
    3 3 4.

    Args:
        spans: `weight_versions` of vLLM (0.32) and SGLang (0.5.23); start and end count sampled
            tokens. None gives None, as do versions that are no whole numbers, e.g. "default".
        num_sampled: how many tokens were sampled.

    Raises:
        EngineError: `spans` is no list, or has several spans that do not follow each other from the
            first token to the last.
    """
    parts = read_spans(spans)
    if not parts:
        return None
    if len(parts) == 1:
        parts[0][1:] = [0, num_sampled]
    end = 0
    for version, start, stop in parts:
        if type(start) is not int or type(stop) is not int or start != end or stop < start:
            raise EngineError(
                f"weight_versions: the span {quoted([version, start, stop])} must begin at token "
                f"{end} of the response, and must not end before it begins"
            )
        end = stop
    if end != num_sampled:
        raise EngineError(
            f"weight_versions end at token {end} of the response, which has {num_sampled} tokens"
        )
    numbers = [str(version) for version, _, _ in parts]
    if not all(map(_WHOLE.fullmatch, numbers)):
        return None
    lengths = [stop - start for _, start, stop in parts]
    return np.repeat(np.array([*map(int, numbers)], np.int64), lengths)


def read_spans(spans: Any) -> list[list[Any]]:
    """Version, start and end of each span of `weight_versions`, JSON or vLLM's Python objects.

    Raises:
        EngineError: `spans` is no list.
    """
    if not isinstance(spans or [], (list, tuple)):
        raise EngineError(f"weight_versions must be a list of spans; got {quoted(spans)}")
    return [
        [
            span.get(name) if isinstance(span, Mapping) else getattr(span, name, None)
            for name in ("version", "start", "end")
        ]
        for span in spans or []
    ]
