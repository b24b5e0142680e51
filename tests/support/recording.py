"""A recorder in this process, and what a test asks it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from megatron_r3.collect.client import Client
from megatron_r3.collect.prompt_plan import Sampling, read_model
from megatron_r3.collect.server import Server
from megatron_r3.record.chat_template import ChatTemplate
from megatron_r3.record.record_server import make_app
from megatron_r3.record.recorder import Recorder
from megatron_r3.record.recorder import recording as recording_of


@dataclass
class Recording:
    """A recorder under test.

    Attributes:
        client: sends requests to the recorder's application.
        recorder: the recorder.
        store: the store's directory.
        said: the lines that the recorder has printed.
        computed: the engine, if a test made one.
    """

    client: Any
    recorder: Recorder
    store: Path
    said: list[str]
    computed: Any = None

    async def post(self, path: str, body: Any, **headers: str) -> Any:
        """The status and the JSON of an answer."""
        answer = await self.client.post(f"/v1/{path}", json=body, headers=headers)
        return answer.status, await answer.json()

    async def ask(self, messages: Any, session: str = "s", **fields: Any) -> Any:
        """The messages of the answer to a chat."""
        body = {"model": "any", "messages": messages, **fields}
        status, answer = await self.post(f"sessions/{session}/chat/completions", body)
        assert status == 200, answer
        said = [choice["message"] for choice in answer["choices"]]
        return said if "n" in fields else said[0]


@asynccontextmanager
async def recording(
    directory: Path, url: str, store: Path, engine: str = "vllm", **given: Any
) -> AsyncIterator[Recording]:
    """Start a recorder.

    Args:
        directory: the model's.
        url: the engine's server.
        store: the store's directory.
        engine: the kind of the server.
        given: other arguments of Recorder than a test usually has.
    """
    read, sampling, said = read_model(directory), Sampling(256), list[str]()
    settings: dict[str, Any] = {
        "engine": Server(engine, Client(url, 32, 60.0, 0, 0.1), read.shape, sampling),
        "template": ChatTemplate(directory),
        "model": read,
        "sampling": sampling,
        "out": store,
        "policy_version": 0,
        "reward": None,
        "most_sessions": 256,
        "idle_s": 3600.0,
        "all_turns": False,
        "say": said.append,
    }
    async with recording_of(**{**settings, **given}) as recorder:
        app = make_app(recorder, sampling, engine, "hf")
        # as serve_app starts it
        async with TestClient(TestServer(app, handler_cancellation=True)) as client:
            yield Recording(client, recorder, store, said)
