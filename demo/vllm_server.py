"""The demo's other sampler: a real vLLM server on this machine's CPU, started and stopped here.

    python -m demo.vllm_server --model DIR --prompts prompts.jsonl --n 8 --out samples.npz

The first run installs vLLM into build/vllm, an environment of its own, since its pins differ from
the trainer's. The server listens on this machine alone and is gone when the command ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from demo.hf_sampler import Prompt, arguments, progress, read_prompts
from demo.vllm_install import BUILD, VERSION, ServerError, install, tail, watch
from megatron_r3.engines import vllm
from megatron_r3.engines.conversation import Sample, write_samples
from megatron_r3.engines.shape import ModelShape

READY_SECONDS = 600
STOP_SECONDS = 4  # it takes 2; one that still starts does not listen, and is killed
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else the first requests wait for a C++ compiler
}


@contextmanager
def serve(model: str | Path, build: Path = BUILD) -> Iterator[str]:
    """A server of `model` while the block runs; yields its address.

    Raises:
        ServerError: it does not come up; with the end of its log.
    """
    model, log = Path(model).resolve(), build / "vllm.log"
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    python = install(build)
    sockets = tempfile.TemporaryDirectory(prefix="vllm-")  # it leaves its own behind
    with log.open("wb") as output, _signals_end_the_block(), sockets as folder:
        process = subprocess.Popen(
            [str(python), *_server_arguments(model, port)],
            env={**os.environ, **ENVIRONMENT, "VLLM_RPC_BASE_PATH": folder},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # one group for the server and the processes it starts
        )
        with _guard(process):
            try:
                watch("starting vLLM", process, lambda: _healthy(url), READY_SECONDS)
                if process.poll() is not None or not _healthy(url):
                    raise ServerError(f"vLLM did not start; {tail(log)}")
                yield url
            finally:
                _stop(process)


def _server_arguments(model: Path, port: int) -> list[str]:
    config = json.loads((model / "config.json").read_text())
    length = min(1024, int(config.get("max_position_embeddings", 1024)))
    flags = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    flags += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    flags += ["--enable-return-routed-experts", "--enforce-eager", "--max-num-seqs", "32"]
    flags += ["--max-model-len", str(length), "--served-model-name", "model"]
    if not (model / "tokenizer_config.json").exists():
        flags.append("--skip-tokenizer-init")
    return flags


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def _signals_end_the_block() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind like ctrl-C, so that the server is stopped."""

    def leave(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    try:
        before = {
            number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)
        }
    except ValueError:  # not the main thread: signals are its caller's
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _guard(process: subprocess.Popen) -> Iterator[None]:
    """Kill the group when this process is gone without having left the block, even by SIGKILL."""
    waits = f"read left || kill -9 -{process.pid}"
    guard = subprocess.Popen(
        ["sh", "-c", waits],
        stdin=subprocess.PIPE,  # ends with this process
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.communicate(b"left\n")


def _stop(process: subprocess.Popen, seconds: float = STOP_SECONDS) -> None:
    """End the whole group: asked first, then killed, whatever interrupts the asking."""
    try:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while _group_lives(process) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _group_lives(process: subprocess.Popen) -> bool:
    """Whether a process of the group still runs; one that only waits to be reaped does not."""
    process.poll()  # reaps the server itself
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) == process.pid and state != "Z":
                return True
    return False


def sample(
    url: str,
    model: str | Path,
    prompts: Sequence[Prompt],
    n: int,
    max_tokens: int,
    seed: int,
    concurrency: int = 8,
) -> list[Sample]:
    """Ask a server of `model` to continue every prompt `n` times at temperature 1.

    Returns:
        Samples in the order of the prompts, the `n` of one prompt together.
    """
    shape = ModelShape.from_hf_config(model)
    made: list[list[Sample]] = [[] for _ in prompts]
    with (
        httpx.Client(base_url=url, timeout=600, trust_env=False) as client,
        ThreadPoolExecutor(concurrency) as pool,
    ):
        waiting = {}
        for index, prompt in enumerate(prompts):
            request = _request(prompt, n, max_tokens, seed + index * n)
            waiting[pool.submit(_ask, client, request, shape, f"prompt {index}")] = index
        try:
            for done, future in enumerate(as_completed(waiting), 1):
                index = waiting[future]
                made[index] = [replace(s, group=prompts[index].group) for s in future.result()]
                progress("prompts sampled by vLLM", done, len(prompts))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [one for samples in made for one in samples]


def _request(prompt: Prompt, n: int, max_tokens: int, seed: int) -> dict[str, Any]:
    return {
        "model": "model",
        "prompt": prompt.tokens,
        "n": n,
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,  # all off, whatever the model's generation_config says
        "seed": seed,
        "logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def _ask(
    client: httpx.Client, request: dict[str, Any], shape: ModelShape, where: str
) -> list[Sample]:
    try:
        response = client.post("/v1/completions", json=request)
        body = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ServerError(f"{where}: no answer from vLLM ({error})") from error
    return vllm.decode(body, request, shape, where)


def main(argv: Sequence[str] | None = None) -> int:
    """Start a server, sample, write the samples, stop the server."""
    options = arguments("Sample with vLLM", argv)
    try:
        shape, prompts = ModelShape.from_hf_config(options.model), read_prompts(options.prompts)
        with serve(options.model) as url:
            samples = sample(
                url, options.model, prompts, options.n, options.max_new_tokens, options.seed
            )
        write_samples(options.out, samples, shape.moe_layers, "vllm", VERSION)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; vLLM is stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
