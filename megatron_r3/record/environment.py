"""Runs an environment of the library verifiers as an agent (agent_sampler.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from megatron_r3.collect.prompts import Prompt
from megatron_r3.record.agent_sampler import Agent
from megatron_r3.replay.words import one_line


def load_environment(spec: str) -> tuple[Agent, list[Prompt]]:
    """An agent that runs one rollout of an environment, and the examples of its training dataset.

    Args:
        spec: verifiers:NAME, where NAME is what verifiers calls the environment.

    Raises:
        ValueError: there is no such environment, or the library is missing or of another version.
    """
    library, _, name = spec.partition(":")
    if library != "verifiers" or not name:
        raise ValueError(f"--environment {spec}: give it as verifiers:NAME")
    try:
        from verifiers.types import ClientConfig
        from verifiers.utils.env_utils import load_environment as load
    except ImportError as missing:  # verifiers 0.4 has tasksets and harnesses in their place
        raise ValueError(
            f"--environment {spec}: pip install 'verifiers>=0.1.10,<0.4' ({missing})"
        ) from missing
    try:
        environment = load(name)
        rows = environment.get_dataset().to_list()
    except Exception as error:  # an environment is a program, and may raise anything
        reason = one_line(f"{type(error).__name__}: {error}", 500)
        raise ValueError(f"--environment {spec}: {reason}") from error

    async def agent(client: AsyncOpenAI, row: Mapping[str, Any]) -> float:
        address = str(client.base_url).rstrip("/")
        config = ClientConfig(api_base_url=address, api_key_var="MEGATRON_R3_NEEDS_NO_KEY")
        found = await environment.run_rollout(
            input=dict(row), client=config, model="policy", sampling_args={}
        )
        if found.get("error"):
            raise RuntimeError(str(found["error"]))
        return float(found["reward"])

    prompts = [
        Prompt(f"{spec}, example {row['example_id']}", row["example_id"], row["prompt"], row)
        for row in rows
    ]
    return agent, prompts
