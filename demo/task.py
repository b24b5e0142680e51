"""The demo's task, with a checkable answer: sort a list of digits.

A prompt is `<bos> 3 1 2 =`, its answer `1 2 3 <eos>`. Prompts are token ids; there is no text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

# Not imported at run time: in the proof's runs of unpatched trees, megatron_r3 is hidden.
if TYPE_CHECKING:
    from megatron_r3.collect.reward import RewardSample

PAD, BOS, EOS, EQUALS, FIRST_DIGIT = 0, 1, 2, 3, 4
VOCAB_SIZE = 64
NUM_DIGITS = (8, 12)  # of a problem: the least and the most
MAX_ANSWER = NUM_DIGITS[1] + 1
SEQ_LENGTH = 32


def problem(index: int) -> tuple[list[int], list[int]]:
    """Prompt and answer of the problem with this number, which is the same in every process."""
    rng = np.random.default_rng(index)
    digits = rng.integers(0, 10, rng.integers(NUM_DIGITS[0], NUM_DIGITS[1] + 1)) + FIRST_DIGIT
    return [BOS, *digits.tolist(), EQUALS], [*sorted(digits.tolist()), EOS]


def example(index: int) -> tuple[list[int], list[bool]]:
    """The ids of a problem with its answer, and which of them the model is to say."""
    prompt, answer = problem(index)
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def reward(sample: RewardSample) -> float:
    """The share of the answer's positions that are right; 0 if the answer's length is wrong."""
    answer = [*sorted(sample.prompt_tokens[1:-1]), EOS]
    if len(sample.response_tokens) != len(answer):
        return 0.0
    return float(np.mean(np.array(sample.response_tokens) == np.array(answer)))


def write_prompts(path: Path, count: int, first: int) -> None:
    """Write JSON lines `{"prompt": [ids], "group": n}` of problems `first`, `first + 1`, ..."""
    lines = [json.dumps({"prompt": problem(first + i)[0], "group": i}) for i in range(count)]
    path.write_text("\n".join(lines) + "\n")
