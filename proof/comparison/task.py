"""The comparison's task: sort eight digits. An answer counts only if all of it is right.

A prompt is `<bos> 3 1 2 5 5 0 9 7 =`, its answer `0 1 2 3 5 5 7 9 <eos>`. Token ids are given here;
there is no text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

# The first training knows nothing of rollouts.
if TYPE_CHECKING:
    from megatron_r3.collect.reward import RewardSample

PAD, BOS, EOS, EQUALS, FIRST_DIGIT = 0, 1, 2, 3, 4
VOCAB_SIZE = 16
NUM_DIGITS = 8
MAX_ANSWER = NUM_DIGITS + 1
SEQ_LENGTH = 20  # of a batch: prompt and answer are 19 tokens


def problem(index: int, wrong_labels: float = 0.0) -> tuple[list[int], list[int]]:
    """Prompt and answer of the problem with this number, which is the same in every process.

    Args:
        index: of the problem.
        wrong_labels: the share of the answer's digits that are replaced by random ones. Example:
            a policy that has learnt well from 0.12 is right in a digit with a chance of 0.892,
            and in all eight with one of 0.40.
    """
    rng = np.random.default_rng(index)
    digits = rng.integers(0, 10, NUM_DIGITS) + FIRST_DIGIT
    answer = np.sort(digits)
    is_wrong = rng.random(NUM_DIGITS) < wrong_labels
    answer[is_wrong] = rng.integers(0, 10, int(is_wrong.sum())) + FIRST_DIGIT
    return [BOS, *digits.tolist(), EQUALS], [*answer.tolist(), EOS]


def reward(sample: RewardSample) -> float:
    """1 if the whole answer is right, else 0."""
    return float(sample.response_tokens == [*sorted(sample.prompt_tokens[1:-1]), EOS])


def write_prompts(path: Path, count: int, first: int) -> None:
    """JSON lines `{"prompt": [ids], "group": n}`, problems `first`, `first + 1`, ..."""
    lines = [json.dumps({"prompt": problem(first + i)[0], "group": i}) for i in range(count)]
    path.write_text("\n".join(lines) + "\n")
