"""Which requests the server refuses, because upstream's engine would end with them."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_r3.loop.serve import why_refused

RIGHT: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 4, "logprobs": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
NAN = float("nan")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        # each was sent to the engine of 0.19.2, which ended, but for those that say so
        ({"stop": ["7"]}, "stop: a stop word ends the engine"),
        ({"stop": "7"}, "stop: a stop word ends the engine"),
        ({"logprobs": None}, "logprobs: requests with and without"),  # ends it only when it evicts
        ({"logprobs": 65}, "65 log-probs for each token: there are 64 token ids"),
        ({"max_tokens": 0}, "max_tokens 0: ask for at least 1"),
        ({"max_tokens": NAN}, "max_tokens nan"),  # not sent
        ({"top_k": 3}, "top_k 3 and top_p 1: one of them must be 0"),
        ({"top_k": 64, "top_p": 0}, "top_k 64, top_p 0: give a top_k below 64"),
        ({"top_p": 1.5}, "top_k 0, top_p 1.5: give a top_k below 64, a top_p of 0 to 1"),
        ({"top_p": NAN}, "top_p nan"),  # not sent
        ({"temperature": -1}, "temperature -1"),  # samples the least likely tokens
        ({"temperature": NAN}, "temperature nan"),  # not sent
        ({"temperature": 1e-40}, "temperature 1e-40"),  # not sent
        ({"prompt": [5, 64]}, "prompt: token id 64; expected 0 to 63"),
        ({"prompt": [[5], [-2]]}, "prompt: token id -2; expected 0 to 63"),
        ({"prompt": [[]]}, "prompt: it is empty"),
        ({"prompt": "  "}, "prompt: it is empty"),
    ],
)
def test_a_request_that_would_end_the_engine_is_refused(change: dict[str, Any], what: str) -> None:
    why = why_refused({**RIGHT, **change}, 64)
    assert why is not None
    assert what in why


@pytest.mark.parametrize(
    "body",
    [
        RIGHT,
        CHAT,
        {**CHAT, "top_logprobs": 2, "max_completion_tokens": 3, "stop": None},
        {**RIGHT, "top_k": 3, "top_p": 0},
        {**RIGHT, "top_k": 3, "temperature": 0},
        {**RIGHT, "prompt": [[5], [63]]},
        {**RIGHT, "prompt": ["a", "b"], "stop": []},
        {**RIGHT, "temperature": "warm"},  # upstream answers these two by itself
        {**RIGHT, "prompt": None},
    ],
)
def test_a_request_that_the_engine_survives_passes(body: dict[str, Any]) -> None:
    assert why_refused(body, 64) is None
