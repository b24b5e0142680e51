"""The server that samples: where it is, how patient to be with it, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_r3.rollouts.client import Client, NoAnswer
from megatron_r3.rollouts.dialects import version_paths

__all__ = ["Server", "served_model", "version"]


@dataclass(frozen=True)
class Server:
    """An engine's address, and how it is asked (`Client`)."""

    engine: str
    url: str
    concurrency: int = 32
    timeout: float = 600.0
    retries: int = 6
    pause: float = 0.5


async def version(client: Client, engine: str) -> str:
    """What the server says; "unknown" where it has no such page."""
    for path in version_paths(engine):
        try:
            answer = await client.get(path)
        except NoAnswer as error:
            if error.status != 404:
                raise
            continue
        if isinstance(answer, dict) and isinstance(answer.get("version"), str):
            return str(answer["version"])
    return "unknown"


async def served_model(client: Client, engine: str) -> str:
    """The name under which vLLM has its model; empty where it does not say."""
    if engine != "vllm":
        return ""
    try:
        return str((await client.get("/v1/models"))["data"][0]["id"])
    except NoAnswer as error:
        if error.status != 404:
            raise
    except (KeyError, IndexError, TypeError):
        pass
    return ""
