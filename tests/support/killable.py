"""An engine and an agent, each as a process that a test kills.

python killable.py engine PORT
python killable.py agent BASE_URL LOG FIRST_NUMBER

Each session of the agent has a number, which stands in its messages and is its reward. An error
ends a session, and the agent begins a session with the next number in its place. The agent writes a
line to the log before it sends a reward, and another one once the reward was answered with 200. The
engine's routes and log-probs follow from the tokens alone, so a stored rollout shows whether its
rows are those of its tokens.

Shape suffixes (docs/glossary.md): K, L, N, T.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from typing import Any

import httpx
import numpy as np
from engine_server import engine

from proof.fuzz.bodies import Answer, Choice, completions

SESSIONS, TURNS = 16, 3
LAYERS, EXPERTS, TOPK = 3, 8, 3  # of tiny_models.qwen
END_ID = 256  # of chat_model.tokenizer


def question(number: int) -> str:
    """What the user of a session asks first."""
    return f"session {number} asks"


def routes_of(tokens_N: np.ndarray) -> np.ndarray:
    """The experts `[L, N, K]` of all tokens."""
    first_N = np.cumsum(np.asarray(tokens_N, np.int64))
    ids_LNK = first_N[:, None] + np.arange(LAYERS)[:, None, None] + np.arange(TOPK)
    return (ids_LNK % EXPERTS).astype(np.uint8)


def logprobs_of(tokens_N: np.ndarray) -> np.ndarray:
    """The log-prob `[N]` of each token."""
    return -(np.cumsum(np.asarray(tokens_N, np.int64)) % 97 + 1).astype(np.float32) / 128


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """vLLM's response to a request for one sample."""
    prompt = body["prompt"]
    sampled = [64 + (sum(prompt) + i) % 26 for i in range(5)] + [END_ID]  # letters
    whole = np.array([*prompt, *sampled])
    ids_TLK = routes_of(whole).transpose(1, 0, 2)[body.get("routed_experts_prompt_start", 0) : -1]
    logprobs = logprobs_of(whole)[len(prompt) :].tolist()
    choice = Choice(sampled, logprobs, ids_TLK.astype(np.int32), reason="stop")
    return completions(Answer(prompt, prompt, [choice], body["model"]))[0]


def _session(client: httpx.Client, number: int, log: int) -> None:
    messages = [{"role": "user", "content": question(number)}]
    for _ in range(TURNS):
        body = {"messages": messages}
        said = client.post(f"/sessions/s{number}/chat/completions", json=body)
        said.raise_for_status()
        messages += [said.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
    os.write(log, f"asked {number}\n".encode())
    client.post(f"/sessions/s{number}/reward", json={"reward": number}).raise_for_status()
    os.write(log, f"answered {number}\n".encode())


def _agent(url: str, log: int, numbers: itertools.count[int]) -> None:
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        while True:
            try:
                _session(client, next(numbers), log)
            except httpx.HTTPError:
                time.sleep(0.2)


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "engine":
        with engine(answer=answer, port=int(words[0])):
            threading.Event().wait()
    to = os.open(words[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    threads = [
        threading.Thread(
            target=_agent, args=(words[0], to, itertools.count(int(words[2]) + i, 100))
        )
        for i in range(SESSIONS)
    ]
    for thread in threads:
        thread.start()
