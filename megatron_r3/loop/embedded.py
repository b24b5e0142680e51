"""The embedded sampler: a server that answers a run's requests, in SGLang's form, by transformers.

The sampler loads new weights from a directory, and runs wherever transformers runs. On one machine
a request with seeds gets the same answer under the same weights, bit for bit. The server's pages:

    GET  /health, /server_info, /model_info
    POST /generate                     {"input_ids": [ids] or [[ids], ...], "sampling_params": ...}
    POST /update_weights_from_disk     {"model_path": DIR, "weight_version": "3"}

Shape suffixes (docs/glossary.md): K, L, N, T.
"""

from __future__ import annotations

import base64
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_r3.collect.engine import Answer
from megatron_r3.collect.generate import SampleRequest, Transformers
from megatron_r3.collect.prompt_plan import Sampling
from megatron_r3.collect.request_fields import PLAIN, refuse_other_fields
from megatron_r3.data.engines.shape import EngineError, ModelShape
from megatron_r3.data.untrusted import read_json
from megatron_r3.data.values import wrong_token
from megatron_r3.replay.words import one_line

_LARGEST_BODY = 1 << 28
Begin = Callable[[int | None, bool], None]  # see `EmbeddedSampler`


class EmbeddedSampler:
    """Answers requests with a transformers model, one request after the other.

    Args:
        degrade: makes a model less exact on purpose, for experiments. It is called with each model
            that is loaded, and returns a function that is called before each batch, with the seed
            of the batch's first request and a bool. True means that the batch must be computed
            exactly, because it is one of a probe.
    """

    def __init__(self, degrade: Callable[[torch.nn.Module], Begin] | None = None) -> None:
        self._degrade = degrade or (lambda model: lambda seed, exact: None)
        self.path, self.version = "", ""
        self._engine: Transformers | None = None
        self._begin: Begin
        self._shape: ModelShape
        self._one = threading.Lock()

    def info(self) -> dict[str, Any]:
        """The answer of /server_info and of /model_info."""
        import transformers

        return {
            "version": transformers.__version__,
            "served_model_name": "policy",
            "model_path": self.path,
            "weight_version": self.version or None,
        }

    def load(self, directory: Path, version: str) -> None:
        """Replace the model in memory by the one of a directory.

        Raises:
            EngineError: transformers cannot load the directory; the sampler then has no model.
        """
        with self._one:
            # drop the old model first, so that old and new are never in memory together
            self._engine, self.path, self.version = None, "", ""
            self._shape = ModelShape.from_hf_config(directory)
            engine = Transformers(directory, self._shape, Sampling(1))
            self._begin = self._degrade(engine.model)
            self._engine, self.path, self.version = engine, str(directory), version

    def generate(self, body: Mapping[str, Any]) -> list[dict[str, Any]] | dict[str, Any]:
        """The responses to the prompts of a request in order, or the response to its only prompt.

        A single response comes back if `input_ids` is a list of ids and not a list of lists. All
        prompts of the same length run as one batch, if they are to be sampled in the same way.

        Raises:
            EngineError: the request cannot be answered.
        """
        with self._one:
            if self._engine is None:
                raise EngineError("no model is loaded: POST /update_weights_from_disk first")
            prompts, is_batch = _prompts(body, self._shape.vocab_size)
            given = body.get("sampling_params") or {}
            params = given if isinstance(given, list) else [given] * len(prompts)
            refuse_other_fields(body, "the request")
            requests = [
                SampleRequest(ids, one.get("sampling_seed"), f"prompt {i}")
                for i, (ids, one) in enumerate(zip(prompts, params, strict=True))
            ]
            wants_prompt = body.get("logprob_start_len") == 0
            batches: defaultdict[tuple[int, Sampling], list[int]] = defaultdict(list)
            for index, (ids, one) in enumerate(zip(prompts, params, strict=True)):
                batches[len(ids), _sampling(one)].append(index)
            responses: list[Any] = [None] * len(prompts)
            for (length, sampling), members in sorted(batches.items(), key=lambda item: item[0][0]):
                # Only the requests of a probe ask for this. Their answers must not be degraded.
                exact = wants_prompt or sampling.temperature == 0
                self._begin(requests[members[0]].seed, exact)
                self._engine.sampling = sampling
                batch = self._engine.answers([requests[i] for i in members])
                for i, answer in zip(members, batch, strict=True):
                    responses[i] = self._response(answer, length, sampling)
            if wants_prompt:
                for ids, response in zip(prompts, responses, strict=True):
                    response["meta_info"]["input_token_logprobs"] = self._of_prompt(ids)
        return responses if is_batch else responses[0]

    def _response(self, answer: Answer, length: int, sampling: Sampling) -> dict[str, Any]:
        rollout = answer.decoded
        ids = rollout.tokens_N[length:].tolist()
        values = rollout.logprobs_N[length:].tolist()
        reason: dict[str, Any] = {"type": answer.said.finish_reason}
        reason |= (
            {"matched": ids[-1]} if answer.said.finish_reason == "stop" else {"length": len(ids)}
        )
        meta: dict[str, Any] = {
            "prompt_tokens": length,
            "completion_tokens": len(ids),
            "finish_reason": reason,
            "weight_version": self.version,
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(values, ids, strict=True)
            ],
            "routed_experts": _all_layers(rollout.routes.ids_LTK, self._shape),
        }
        if sampling.wants_kept:
            assert rollout.kept is not None
            meta["output_token_sampling_mask"] = [
                rollout.kept.of(token).tolist() for token in range(length, length + len(ids))
            ]
            meta["output_token_sampling_logprobs"] = values
        return {"text": answer.said.message.get("content"), "output_ids": ids, "meta_info": meta}

    @torch.inference_mode()
    def _of_prompt(self, ids: list[int]) -> list[list[Any]]:
        """The log-prob of each prompt token given the tokens before it; None for the first."""
        assert self._engine is not None
        tokens = torch.tensor([ids], device=self._engine.device)
        logits = self._engine.model(input_ids=tokens, use_cache=False).logits[0].float()
        values = torch.log_softmax(logits[:-1], -1).gather(1, tokens[0, 1:, None])[:, 0].tolist()
        return [[value, token, None] for value, token in zip([None, *values], ids, strict=True)]


def _all_layers(ids_LTK: np.ndarray, shape: ModelShape) -> str:
    """Routes as SGLang sends them: int32 `[T, hidden layers, K]` in base64, 0 in dense layers."""
    rows = np.zeros((ids_LTK.shape[1], shape.num_hidden_layers, ids_LTK.shape[2]), "<i4")
    rows[:, list(shape.moe_layers)] = ids_LTK.transpose(1, 0, 2)
    return base64.b64encode(rows.tobytes()).decode()


def _prompts(body: Mapping[str, Any], vocab_size: int | None) -> tuple[list[list[int]], bool]:
    given = body["input_ids"]
    prompts = given if isinstance(given[0], list) else [given]
    for number, ids in enumerate(prompts):
        if wrong := wrong_token(np.asarray(ids, np.int64), vocab_size):
            raise EngineError(f"prompt {number} of input_ids: token {wrong[0]} {wrong[1]}")
    return prompts, prompts is given


_DEFAULTS = {"max_new_tokens": 128, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}


def _sampling(params: Mapping[str, Any]) -> Sampling:
    """How to sample a prompt, read from the sampling parameters of a request."""
    first = {**_DEFAULTS, **params}
    unknown = first.keys() - {*_DEFAULTS, *PLAIN, "sampling_seed"}
    if unknown or first["min_p"]:
        raise EngineError(
            f"sampling_params: the embedded sampler does not take {min(unknown, default='min_p')!r}"
        )
    top_k = max(0, int(first["top_k"]))
    sampling = Sampling(
        int(first["max_new_tokens"]), float(first["temperature"]), float(first["top_p"]), top_k
    )
    if sampling.settings.unknown_to_the_loss() and sampling.temperature > 0:
        return replace(sampling, logprobs_of="processed")
    return sampling


class _Handler(BaseHTTPRequestHandler):
    sampler: EmbeddedSampler
    protocol_version = "HTTP/1.1"
    # An answer is written in two pieces, header and body. With Nagle's algorithm the body would
    # wait for the client's acknowledgement of the header, which takes 40 ms.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, {})
        elif self.path in ("/server_info", "/model_info"):
            self._answer(200, self.sampler.info())
        else:
            self._answer(404, {"error": f"no page {self.path}"})

    def do_POST(self) -> None:
        try:
            length = int(self.headers.get("Content-Length", 0))
            if length > _LARGEST_BODY:
                raise EngineError(f"a body of {length} bytes; at most {_LARGEST_BODY}")
            body = read_json(self.rfile.read(length), "the request", _LARGEST_BODY)
            if not isinstance(body, Mapping):
                raise EngineError("the body must be a JSON object")
            self._answer(200, self._post(body))
        except (ValueError, OSError) as error:
            self._answer(400, {"error": {"message": one_line(str(error), 500)}})
        except Exception as error:  # from the model: out of memory, a shape that does not fit
            reason = one_line(f"{type(error).__name__}: {error}", 500)
            self._answer(400, {"error": {"message": reason}})

    def _post(self, body: Mapping[str, Any]) -> Any:
        if self.path == "/generate":
            return self.sampler.generate(body)
        if self.path == "/update_weights_from_disk":
            self.sampler.load(Path(str(body["model_path"])), str(body["weight_version"]))
            return {"success": True, "message": "", "num_paused_requests": 0}
        raise EngineError(f"no page {self.path}")

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing; the base class prints a line for each request."""


def server(sampler: EmbeddedSampler, host: str, port: int) -> ThreadingHTTPServer:
    """An HTTP server of the sampler, to be run by its `serve_forever`; port 0 takes a free port."""
    handler = type("Handler", (_Handler,), {"sampler": sampler})
    made = ThreadingHTTPServer((host, port), handler)
    made.daemon_threads = True
    return made
