"""A server that answers with recorded vLLM responses, and misbehaves if a test wants it to.

Each sample of a collection has its own seed, so by the seed of a request the server sees which
sample is asked for once more.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.collect.prompt_plan import Sampling
from megatron_r3.data.store import RolloutStore

DATA = Path(__file__).parents[1] / "data" / "vllm" / "vllm-0.30.0-qwen3moe-bf16"
CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 512,
}
SEED = 3
REWARD = """
def length(sample):
    return len(sample.response_tokens) + sample.fields.get("bonus", 0)
def wrong(sample):
    return {}[sample.fields["answer"]]
def nothing(sample):
    return None
def exits(sample):
    raise SystemExit(3)
def cancels(sample):
    import asyncio
    raise asyncio.CancelledError
def stops(sample):
    raise StopIteration
def lines(sample):
    raise ValueError("one\\ntwo\\x1b[2J")
def infinite(sample):
    return float("inf")
def pair(sample):
    import numpy
    return numpy.array([1, 2])
"""


def recorded() -> dict[tuple[int, ...], tuple[dict[str, Any], list[dict[str, Any]]]]:
    """For each recorded prompt a response and its choices."""
    responses = {}
    for name in ("14_p12_g10_n2", "15_batch3_lists", "03_p5_g1"):
        payload = json.loads((DATA / f"{name}.json").read_text())
        prompts = payload["request"]["prompt"]
        prompts = [prompts] if isinstance(prompts[0], int) else prompts
        choices = payload["response"]["choices"]
        each = len(choices) // len(prompts)
        for i, prompt in enumerate(prompts):
            responses[tuple(prompt)] = payload["response"], choices[i * each : (i + 1) * each]
    return responses


RECORDED = recorded()
PROMPTS = list(RECORDED)
CHAT = json.loads((DATA / "19_chat_turn1.json").read_text())


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """The recorded response to a prompt, with the one of its choices that the seed selects.

    A text gets the response to the first prompt. The response names the model that was asked for,
    as vLLM's does.
    """
    if "messages" in body:
        response = json.loads(json.dumps(CHAT["response"]))
    else:
        prompt = PROMPTS[0] if isinstance(body["prompt"], str) else tuple(body["prompt"])
        response, choices = RECORDED[prompt]
        choice = {**choices[body.get("seed", 0) % len(choices)], "index": 0}
        response = {**response, "choices": [choice]}
    return {**response, "model": body.get("model", response["model"])}


@dataclass(frozen=True)
class Raw:
    """A body that is sent as it is, piece by piece, with headers of its own."""

    pieces: Iterable[bytes]
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 200


# from a request's body, and how often its sample was asked for: "ok" or a way to fail
Behave = Callable[[dict[str, Any], int], str]
Answer = Callable[[dict[str, Any]], "dict[str, Any] | Raw"]
PAGES = {"/version": {"version": "0.30.0"}, "/v1/models": {"data": [{"id": "served"}]}}


class Engine(ThreadingHTTPServer):
    """The server; counts requests by seed in `asked`, and answers given in `answered`.

    `pages` may be replaced while it runs.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, behave: Behave, delay: float, answer: Answer, pages: dict[str, Any], port: int
    ) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.behave, self.delay, self.answer, self.pages = behave, delay, answer, pages
        self.asked: Counter[int] = Counter()
        self.answered: Counter[int] = Counter()
        self.pages_asked: Counter[str] = Counter()
        self.authorized: list[tuple[str, str | None]] = []  # GET or POST, and who asks
        self.most, self.now = 0, 0
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: tests kill clients."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Engine

    def do_GET(self) -> None:
        pages = self.server.pages
        with self.server.lock:
            self.server.pages_asked[self.path] += 1
            self.server.authorized.append(("GET", self.headers["Authorization"]))
        if self.server.behave({"path": self.path}, 0) == "404" or self.path not in pages:
            self._send(404, {"detail": "Not Found"})
        elif isinstance(pages[self.path], Raw):
            self._send_raw(pages[self.path])
        else:
            self._send(200, pages[self.path])

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seed = body.get("seed", -1)
        with server.lock:
            server.bodies.append({**body, "path": self.path})
            server.authorized.append(("POST", self.headers["Authorization"]))
            server.asked[seed] += 1
            server.now += 1
            server.most = max(server.most, server.now)
            nth = server.asked[seed]
        try:
            time.sleep(server.delay)
            self._answer(server.behave(body, nth), body)
        finally:
            with server.lock:
                server.now -= 1

    def _answer(self, behaviour: str, body: dict[str, Any]) -> None:
        if behaviour == "hang":
            self.server.closing.wait(30)
            self.close_connection = True
        elif behaviour == "disconnect":
            self.close_connection = True
        elif behaviour == "half":
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.close_connection = True
        elif behaviour == "garbage":
            self._send(200, "<html>", raw=True)
        elif behaviour.isdigit():
            self._send(int(behaviour), {"error": {"message": f"told to say {behaviour}"}})
        else:
            response = self.server.answer(body)
            if isinstance(response, Raw):
                self._send_raw(response)
                return
            if behaviour == "zeros":
                response["choices"][0]["routed_experts"] = np.zeros((22, 4, 4), int).tolist()
            elif behaviour == "odd":
                response["choices"][0]["logprobs"] = {"content": [3]}
            elif behaviour == "abort":
                response["choices"][0]["finish_reason"] = "abort"
            self._send(200, response)
            with self.server.lock:
                self.server.answered[body.get("seed", -1)] += 1

    def _send(self, status: int, body: Any, raw: bool = False) -> None:
        data = body.encode() if raw else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if status == 429:
            self.send_header("Retry-After", "0.1")
        self.end_headers()
        self.wfile.write(data)

    def _send_raw(self, raw: Raw) -> None:
        """Send all pieces, unless the client hangs up; closing the connection ends the body."""
        self.send_response(raw.status)
        for name, value in raw.headers.items():
            self.send_header(name, value)
        self.close_connection = True
        with suppress(OSError):
            self.end_headers()
            for piece in raw.pieces:
                self.wfile.write(piece)

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def engine(
    behave: Behave = lambda body, nth: "ok",
    delay: float = 0.0,
    answer: Answer = answer,
    pages: dict[str, Any] = PAGES,
    port: int = 0,
) -> Iterator[Engine]:
    """A running server."""
    server = Engine(behave, delay, answer, pages, port)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


def write_inputs(folder: Path, num_prompts: int) -> None:
    """prompts.jsonl, config.json and rewards.py; the recorded prompts in turn, group by group."""
    lines = [
        json.dumps({"prompt": PROMPTS[i % len(PROMPTS)], "group": 100 + i, "bonus": i / 4})
        for i in range(num_prompts)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "rewards.py").write_text(REWARD)


def command(url: str, n: int, *more: str) -> list[str]:
    """A collection of `write_inputs`'s prompts, for a process in that folder."""
    arguments = ["rollouts", "collect", "--engine", "vllm", "--url", url, "--out", "store"]
    arguments += ["--prompts", "prompts.jsonl", "--n", str(n), "--reward", "rewards:length"]
    arguments += ["--model", "config.json", "--seed", str(SEED), "--retry-pause", "0.02"]
    return [*arguments, *more]


def check_store(directory: Path, num_prompts: int, n: int, policy_version: int = 0) -> None:
    """Every sample of every prompt is there once, and is what the server answers to its request."""
    store = RolloutStore([directory])
    store.verify()
    keys = zip(store.column("group").tolist(), store.column("sample").tolist(), strict=True)
    where = {key: index for index, key in enumerate(keys)}
    assert len(where) == len(store)
    assert where.keys() == {(100 + i, j) for i in range(num_prompts) for j in range(n)}
    for (group, sample), index in where.items():
        prompt = PROMPTS[(group - 100) % len(PROMPTS)]
        seed = Sampling(1, seed=SEED).seed_of(group, sample, policy_version)
        choice = answer({"prompt": prompt, "seed": seed})["choices"][0]
        fields = store.fields(index)
        assert fields["tokens"].tolist() == [*prompt, *choice["token_ids"]]
        logprobs = fields["logprobs"][len(prompt) :]
        assert np.allclose(logprobs, choice["logprobs"]["token_logprobs"])
        reward = len(choice["token_ids"]) + (group - 100) / 4
        assert store.column("reward")[index] == reward
