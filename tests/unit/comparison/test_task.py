"""The task: a reward for whole answers alone, and labels of which a share is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_r3.collect.reward import RewardSample
from proof.comparison.task import (
    EOS,
    MAX_ANSWER,
    SEQ_LENGTH,
    VOCAB_SIZE,
    problem,
    reward,
    write_prompts,
)


def reward_of(prompt: list[int], response: list[int]) -> float:
    return reward(RewardSample({}, prompt, response, {}, "stop", 0, 0))


def test_only_a_whole_answer_has_a_reward() -> None:
    prompt, answer = problem(5)
    assert reward_of(prompt, answer) == 1.0
    assert reward_of(prompt, answer[:-1]) == 0.0
    assert reward_of(prompt, [*answer, EOS]) == 0.0
    for place in range(len(answer)):
        wrong = [*answer]
        wrong[place] = (wrong[place] + 1) % VOCAB_SIZE
        assert reward_of(prompt, wrong) == 0.0
    assert len(answer) == MAX_ANSWER
    assert len(prompt) + len(answer) <= SEQ_LENGTH


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.0), (0.12, 0.12 * 0.9), (1.0, 0.9)])
def test_a_share_of_the_labels_is_wrong(share: float, expected: float) -> None:
    both = [(problem(i), problem(i, share)) for i in range(400)]
    assert all(right[0] == wrong[0] for right, wrong in both)  # prompts are the same
    assert all(wrong[1][-1] == EOS for _, wrong in both)
    differ = np.array([np.array(right[1]) != np.array(wrong[1]) for right, wrong in both])
    assert abs(differ[:, :-1].mean() - expected) < 0.02


def test_prompts_are_those_of_the_problems(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", 3, 100)
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl").open()]
    assert lines == [{"prompt": problem(100 + i)[0], "group": i} for i in range(3)]
