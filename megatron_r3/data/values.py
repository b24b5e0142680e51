"""Which log-probs, rewards, token ids, counts and names a rollout can have.

Collecting, converting, storing, verifying and training all call these functions. Each function
returns in a few words what is wrong, or None if nothing is. The caller, who knows the file, the
rollout or the request, raises the error.

Shape suffixes (docs/glossary.md): N, G, M.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# A policy practically never draws a token with a log-prob below this. With a vocabulary of 1e6, one
# draw hits such a token with a chance of at most 1e6 * exp(-64) = 1.6e-22, and a collection of 1e12
# tokens contains one with a chance of 1.6e-10.
LEAST_LOGPROB = -64.0
# Engines that take the logarithm of a probability that was rounded up send a little more than 0.
MOST_LOGPROB = 1e-5
# vLLM replaces -inf by this number, because JSON has no infinity.
VLLM_MINUS_INFINITY = -9999.0

MOST_TOKEN_ID = 2**31 - 1
MOST_TEXT = 200  # characters of the name of an engine, a version or a model


def wrong_logprob(logprobs_G: np.ndarray) -> tuple[int, str] | None:
    """The first log-prob that no sampled token can have: its index, and what is wrong; else None.

    Args:
        logprobs_G: natural logarithms, one for each sampled token; any float dtype.
    """
    # The test is for possible values, because NaN is not possible, and comparing NaN gives False.
    possible_G = (logprobs_G >= LEAST_LOGPROB) & (logprobs_G <= MOST_LOGPROB)
    if possible_G.all():
        return None
    index = int(np.argmin(possible_G))
    value = float(logprobs_G[index])
    if not np.isfinite(value):
        return index, f"is {value}, which is not finite"
    if value == VLLM_MINUS_INFINITY:
        return index, (
            "is -9999, which vLLM sends in place of -inf: the policy gives the token no "
            "probability (a grammar, bad words or a logits processor forced it)"
        )
    if value > 0:
        return index, f"is {value:g}: a probability above 1 (logits, not log-probs?)"
    return index, f"is {value:g}, below {LEAST_LOGPROB:g}: the policy cannot have drawn the token"


def wrong_token(tokens_N: np.ndarray, vocab_size: int | None = None) -> tuple[int, str] | None:
    """The first token id outside the vocabulary: its index, and what is wrong; None if all are in.

    Args:
        tokens_N: integer ids.
        vocab_size: how many token ids the model has. None or 0 if that is not known: then an id may
            be any number from 0 to 2**31 - 1.
    """
    most = MOST_TOKEN_ID if not vocab_size else min(vocab_size - 1, MOST_TOKEN_ID)
    possible_N = (tokens_N >= 0) & (tokens_N <= most)
    if possible_N.all():
        return None
    index = int(np.argmin(possible_N))
    return index, f"is id {int(tokens_N[index])}; ids go from 0 to {most}"


def wrong_reward(value: Any) -> str | None:
    """Why `value` cannot be a reward, which is stored as float32; None if it can be."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return "a reward is a number"
    if not abs(number) <= float(np.finfo(np.float32).max):  # "not", so that NaN is wrong too
        return "a reward is finite, in float32"
    return None


def wrong_name(policy_version: int, group: int, sample: int) -> str | None:
    """Why these three numbers cannot name a rollout; None if they can."""
    for name, value, least in (
        ("policy_version", policy_version, 0),
        ("group", group, -(2**63)),
        ("sample", sample, 0),
    ):
        if not least <= value < 2**63:
            return f"{name} {value}: must be a whole number from {least} on, of 64 bits"
    return None


def wrong_count(counts_M: np.ndarray, least: int, total: int) -> str | None:
    """Why these counts cannot divide a tensor of `total` elements among rollouts; else None.

    Args:
        counts_M: int64, one for each rollout.
        least: the smallest count that a rollout can have.
        total: how many elements the tensor has.
    """
    # Each count is compared with the total before anything is summed, because a sum of int64 wraps
    # around. Example: four counts of 2**62 and one of 5 add up to 5. A reader that trusts this 5
    # would then make an array of 2**62 numbers for the first rollout.
    impossible_M = (counts_M < least) | (counts_M > total)
    if impossible_M.any():
        rollout = int(impossible_M.argmax())
        count = int(counts_M[rollout])
        return f"rollout {rollout} has {count}; possible are {least} to {total}"
    added = sum(counts_M.tolist())  # Python's whole numbers do not wrap around
    if added != total:
        return f"the counts of its rollouts add up to {added}; there are {total}"
    return None


def wrong_text(value: Any) -> str | None:
    """Why `value` cannot name an engine, a version or a model; None if it can.

    The caller puts "NAME must be" in front of the words. Example: "a text; got int".
    """
    if not isinstance(value, str):
        return f"a text; got {type(value).__name__}"
    if len(value) > MOST_TEXT:
        return f"a text of at most {MOST_TEXT} characters; got {len(value)}"
    if not value.isprintable():
        return "a text without control characters"
    return None
