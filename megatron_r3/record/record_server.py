"""The HTTP server of the recorder: the paths of OpenAI's API, and those that end a session.

    POST /v1/chat/completions, /v1/completions       the session is named by the header X-Session-ID
                                                     or, if there is none, by the API key session-ID
    POST /v1/sessions/ID/chat/completions, ...       the session is named by the base URL
    POST /v1/sessions/ID/reward, /discard            end a session
    GET  /v1/models, /health

A session's name is all that a client needs to read and end the session, so agents that do not trust
each other get names that cannot be guessed. No name of an API key is printed.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from megatron_r3.collect.engine import EngineChanged, NoAnswer
from megatron_r3.collect.prompt_plan import Sampling
from megatron_r3.data.engines.shape import EngineError
from megatron_r3.data.store import StoreError
from megatron_r3.data.untrusted import read_json
from megatron_r3.record.openai_form import answer_of, events_of, read_question, refusal_of
from megatron_r3.record.recorder import Recorder
from megatron_r3.record.sessions import Busy, NoSession, Sessions
from megatron_r3.replay.words import one_line

try:
    from hypercorn.asyncio import serve
    from hypercorn.config import Config
    from quart import Quart, Response, request
except ImportError as missing:  # optional dependencies: nothing else needs them
    raise ValueError(
        f"recording needs a web server: pip install 'megatron-r3[record]' ({missing})"
    ) from missing

_MOST_BYTES = 1 << 25  # of a request: a conversation of some million tokens
_MOST_NAME = 200  # characters of a session's name


def open_port(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        ValueError: the address cannot be used.
    """
    try:
        return socket.create_server((host, port), backlog=1024)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--host {host} --port {port}: cannot listen there ({error})") from error


async def serve_app(sessions: Sessions, app: Quart, listening: socket.socket) -> None:
    """Serve until no response may be recorded any more; raises the error that is the reason."""
    config = Config()
    config.bind = [f"fd://{listening.detach()}"]  # the server closes it
    config.loglevel = "WARNING"
    # Clients drop a connection that was idle for seconds. If the server were the first to close it,
    # a request that is sent at that moment would be lost.
    config.keep_alive_timeout = 3600
    config.accesslog = None  # a line would show the session's name

    async def wait() -> None:
        while not sessions.failed.done():
            await asyncio.wait([sessions.failed])

    await serve(app, config, shutdown_trigger=wait)
    sessions.failed.result()


def make_app(sessions: Sessions, sampling: Sampling, engine: str, model: str) -> Quart:
    """The ASGI application.

    Args:
        sessions: answers; only those of a recorder are ended by requests.
        sampling: how each response is sampled.
        engine: the engine's name.
        model: the name under which the model is listed.
    """
    app = Quart(__name__)
    app.config["MAX_CONTENT_LENGTH"] = _MOST_BYTES

    async def complete(is_chat: bool, name: str | None) -> Response:
        try:
            question = read_question(await _body(), is_chat, sampling, engine)
        except EngineError as error:  # the fault is the client's, not the engine's
            raise ValueError(str(error)) from error
        turns, prompt_ids = await sessions.answer(_session(name), question)
        answer = answer_of(turns, prompt_ids, question, model)
        if not question.stream:
            return _json(answer)
        return Response(b"".join(events_of(answer, question)), content_type="text/event-stream")

    @app.post("/v1/chat/completions")
    @app.post("/v1/sessions/<name>/chat/completions")
    @app.post("/v1/sessions/<name>/v1/chat/completions")
    async def chat(name: str | None = None) -> Response:
        return await complete(True, name)

    @app.post("/v1/completions")
    @app.post("/v1/sessions/<name>/completions")
    @app.post("/v1/sessions/<name>/v1/completions")
    async def completion(name: str | None = None) -> Response:
        return await complete(False, name)

    @app.get("/v1/models")
    @app.get("/v1/sessions/<name>/models")
    async def models(name: str | None = None) -> Response:
        return _json({"object": "list", "data": [{"id": model, "object": "model"}]})

    @app.get("/health")
    async def health() -> Response:
        return _json({"service": "megatron-r3 rollouts record"})

    if isinstance(sessions, Recorder):
        _add_ends(app, sessions)

    @app.errorhandler(Exception)
    async def refuse(error: Exception) -> Response:
        status = next((number for kind, number in _STATUS if isinstance(error, kind)), 500)
        if isinstance(error, NoAnswer) and error.status is not None and error.status < 500:
            status = 400  # the engine refused this request, for example because it is too long
        status = getattr(error, "code", None) or status  # an error of the web server: 404, 405, 413
        answer = _json(refusal_of(one_line(str(error), 1000), status), status)
        if status == 429:
            answer.headers["Retry-After"] = "1"
        return answer

    return app


def _add_ends(app: Quart, recorder: Recorder) -> None:
    @app.post("/v1/sessions/<name>/reward")
    @app.post("/v1/reward")
    async def reward(name: str | None = None) -> Response:
        body = await _body()
        if not isinstance(body, dict) or set(body) - {"reward"}:
            raise ValueError('expected {"reward": 1.0}, a list of rewards, one a turn, or {}')
        responses, rewards = await recorder.end(_session(name), body.get("reward"))
        return _json({"responses": responses, "stored": len(rewards), "rewards": rewards})

    @app.post("/v1/sessions/<name>/discard")
    @app.post("/v1/discard")
    async def discard(name: str | None = None) -> Response:
        recorder.discard(_session(name))
        return _json({"stored": 0})


# The status of each kind of error; the first that fits counts. Clients repeat a request after 429,
# 409 and 5xx.
_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (NoSession, 404),
    (Busy, 429),
    (EngineChanged, 503),
    (EngineError, 502),
    (StoreError, 507),
    (ValueError, 400),
)


async def _body() -> Any:
    return read_json(await request.get_data() or b"{}", "the request", _MOST_BYTES)


def _session(name: str | None) -> str:
    """The session's name: that of the path, else of the header, else the API key."""
    kind, text = "id", name or request.headers.get("X-Session-ID", "")
    if not text:
        kind, text = "key", request.headers.get("Authorization", "").removeprefix("Bearer ")
        # a key that a harness gives to all its agents would mix their sessions
        text = text if text.startswith("session-") else ""
    if not text or len(text) > _MOST_NAME or not text.isprintable():
        raise ValueError(
            "name the session: by the base URL (/v1/sessions/ID), by the header X-Session-ID, or "
            f"by an API key of its own (session-ID); a name has at most {_MOST_NAME} characters"
        )
    return f"{kind}:{text}"


def _json(body: Any, status: int = 200) -> Response:
    return Response(json.dumps(body), status=status, content_type="application/json")
