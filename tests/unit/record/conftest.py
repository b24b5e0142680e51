"""A recorder in front of an engine that computes with a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import recording as support
from chat_model import ComputedEngine, tokenizer, write_chat_model
from engine_server import engine

Start = Callable[..., AbstractAsyncContextManager[support.Recording]]


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The directory of a model with a chat template, and the model."""
    directory = tmp_path_factory.mktemp("chat") / "hf"
    return directory, write_chat_model(directory)


@pytest.fixture
def recording(chat_model: tuple[Path, Any], tmp_path: Path) -> Start:
    """A context manager that starts a recorder; takes arguments of Recorder.

    `change` gets each body that the engine would answer, and returns what the engine answers.
    """
    directory, model = chat_model

    @asynccontextmanager
    async def start(change: Callable[[Any], Any] = lambda body: body, **given: Any) -> Any:
        computed = ComputedEngine(model, tokenizer())
        with engine(answer=lambda body: change(computed.answer(body))) as server:
            store = tmp_path / "store"
            async with support.recording(directory, server.url, store, **given) as one:
                one.computed = computed
                yield one

    return start


@pytest.fixture
def whole_model(chat_model: tuple[Path, Any]) -> Any:
    """The model, to compute what its routers choose for a whole conversation."""
    return chat_model[1]
