"""The task of the comparison: sort eight digits. The reward is 1 if the whole answer is right.

A prompt is `<bos> 3 1 2 5 5 0 9 7 =`, its answer `0 1 2 3 5 5 7 9 <eos>`. Run as a program, this
file trains the starting policy (`start.py`), as a Megatron script with one option of its own:

    ... -m megatron_r3.cpu proof/comparison/task.py --wrong-labels SHARE <Megatron's arguments>

The script trains on problems whose answers have this share of wrong digits.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from demo.task import BOS, EOS, EQUALS, FIRST_DIGIT

# for types only: the training here knows nothing of rollouts
if TYPE_CHECKING:
    from megatron_r3.collect.reward import RewardSample

VOCAB_SIZE, NUM_DIGITS = 16, 8
MAX_ANSWER = NUM_DIGITS + 1
SEQ_LENGTH = 20  # of a batch: prompt and answer are 19 tokens


def problem(index: int, wrong_labels: float = 0.0) -> tuple[list[int], list[int]]:
    """Prompt and answer of the problem with this number; the number determines the problem.

    Args:
        index: the number of the problem.
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


def main() -> None:
    """Take this script's own option off the command line, and train as demo/pretrain.py does."""
    from demo import pretrain
    from megatron_r3.train.launch import train
    from megatron_r3.train.pretrain_gpt import forward_step

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--wrong-labels", type=float, required=True)
    own, sys.argv[1:] = parser.parse_known_args()
    pretrain.problem = partial(problem, wrong_labels=own.wrong_labels)
    train(pretrain.datasets, forward_step)


if __name__ == "__main__":
    main()
