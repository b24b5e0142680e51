"""The HTTP server of the recorder: the paths of OpenAI's API, and those that end a session.

    POST /v1/chat/completions, /v1/completions       the session is named by the header X-Session-ID
                                                     or, if there is none, by the API key session-ID
    POST /v1/sessions/ID/chat/completions, ...       the session is named by the base URL
    POST /v1/sessions/ID/reward, /discard            end a session
    GET  /v1/models, /health

A session's name is all that a client needs to read and end the session, so agents that do not trust
each other get names that cannot be guessed. An API key is printed as a digest.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
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
    from aiohttp import web
except ImportError as missing:  # an optional dependency: nothing else needs a web server
    raise ValueError(
        f"recording needs a web server: pip install 'megatron-r3[record]' ({missing})"
    ) from missing

_MOST_BYTES = 1 << 25  # of a request: a conversation of some million tokens
_MOST_NAME = 200  # characters of a session's name
_GRACE_S = 3.0  # for the requests that are under way when the server ends


def open_port(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        ValueError: the address cannot be used.
    """
    try:
        return socket.create_server((host, port), backlog=1024)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--host {host} --port {port}: cannot listen there ({error})") from error


async def serve_app(sessions: Sessions, app: web.Application, listening: socket.socket) -> None:
    """Serve until no response may be recorded any more; raises the error that is the reason."""
    # A handler is cancelled when its client goes away, so that its response is no turn. No request
    # is logged, because the line would show the session's name.
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, shutdown_timeout=_GRACE_S
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listening, backlog=1024).start()
        await asyncio.wait([sessions.failed])
    finally:
        await runner.cleanup()
    sessions.failed.result()


def make_app(sessions: Sessions, sampling: Sampling, engine: str, model: str) -> web.Application:
    """The application.

    Args:
        sessions: answers the requests; only a `Recorder` takes /reward and /discard.
        sampling: how each response is sampled.
        engine: the engine's name.
        model: the name under which the model is listed.
    """

    async def complete(request: web.Request, is_chat: bool) -> web.Response:
        try:
            question = read_question(await _body(request), is_chat, sampling, engine)
        except EngineError as error:  # the fault is the client's, not the engine's
            raise ValueError(str(error)) from error
        turns, prompt_ids = await sessions.answer(_session(request), question)
        answer = answer_of(turns, prompt_ids, question, model)
        if not question.stream:
            return web.json_response(answer)
        events = b"".join(events_of(answer, question))
        return web.Response(body=events, content_type="text/event-stream")

    async def chat(request: web.Request) -> web.Response:
        return await complete(request, True)

    async def completion(request: web.Request) -> web.Response:
        return await complete(request, False)

    async def reward(request: web.Request) -> web.Response:
        body = await _body(request)
        if not isinstance(body, dict) or set(body) - {"reward"}:
            raise ValueError('expected {"reward": 1.0}, a list of rewards, one a turn, or {}')
        responses, rewards = await _recorder(sessions).end(_session(request), body.get("reward"))
        return web.json_response(
            {"responses": responses, "stored": len(rewards), "rewards": rewards}
        )

    async def discard(request: web.Request) -> web.Response:
        _recorder(sessions).discard(_session(request))
        return web.json_response({"stored": 0})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": model, "object": "model"}]})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"service": "megatron-r3 rollouts record"})

    app = web.Application(middlewares=[_refuse], client_max_size=_MOST_BYTES)
    for base in ("/v1", "/v1/sessions/{name}", "/v1/sessions/{name}/v1"):
        app.router.add_post(f"{base}/chat/completions", chat)
        app.router.add_post(f"{base}/completions", completion)
        app.router.add_post(f"{base}/reward", reward)
        app.router.add_post(f"{base}/discard", discard)
        app.router.add_get(f"{base}/models", models)
    app.router.add_get("/health", health)
    return app


def _recorder(sessions: Sessions) -> Recorder:
    if isinstance(sessions, Recorder):
        return sessions
    raise ValueError("this session ends with its agent, which returns the reward")


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


@web.middleware
async def _refuse(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer an error in the form of OpenAI's API."""
    try:
        return await handler(request)
    except Exception as error:
        status = next((number for kind, number in _STATUS if isinstance(error, kind)), 500)
        if isinstance(error, NoAnswer) and error.status is not None and error.status < 500:
            status = 400  # the engine refused this request, for example because it is too long
        if isinstance(error, web.HTTPException):  # of the web server: 404, 405, 413
            status = error.status
        headers = {"Retry-After": "1"} if status == 429 else None
        said = refusal_of(one_line(str(error), 1000), status)
        return web.json_response(said, status=status, headers=headers)


async def _body(request: web.Request) -> Any:
    return read_json(await request.read() or b"{}", "the request", _MOST_BYTES)


def _session(request: web.Request) -> str:
    """The session's name: that of the path, else of the header, else the API key."""
    kind, text = "id", request.match_info.get("name") or request.headers.get("X-Session-ID", "")
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
