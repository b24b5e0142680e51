"""A toy agent for Megatron's RL loop, without a data set or a judge. It imports Megatron."""

from __future__ import annotations

import random
from typing import Any

from megatron.rl.agent.reward_only_agent import RewardOnlyAgent

from proof.fidelity.rl_loop import LETTERS

_EOD = 2


class ToyAgent(RewardOnlyAgent):
    """An agent that rewards the share of a response's letters that are in `LETTERS[:6]`."""

    env_id: str = "toy"

    def get_dataset(self, validation: bool = False) -> list[int]:
        """The numbers of all prompts."""
        return [*range(64)]

    async def evaluation_prompts(
        self, num_prompts: int, validation: bool = False
    ) -> list[tuple[str, dict[str, str]]]:
        """The first prompts, each with its problem id."""
        return [self._prompt(number) for number in range(num_prompts)]

    async def get_prompt(self, validation: bool = False) -> tuple[str, dict[str, str]]:
        """A random prompt."""
        return self._prompt(random.randrange(64))

    def _prompt(self, number: int) -> tuple[str, dict[str, str]]:
        first, second = divmod(number, 8)
        return LETTERS[first] * 3 + LETTERS[second] * 2, {"problem_id": str(number)}

    async def get_reward(self, response: str, golden: Any, finish_reason: str) -> float:
        """The reward, from 0 to 1."""
        return sum(letter in LETTERS[:6] for letter in response or "") / max(1, len(response or ""))

    async def get_rollout_response(self, request: Any, inference_request: Any) -> Any:
        """The engine's response; if it was cut, its last token becomes the end of document."""
        response = await super().get_rollout_response(request, inference_request)
        if response.finish_reason == "length":
            response.token_ids[-1] = _EOD  # the last token has no route that this could make wrong
        return response
