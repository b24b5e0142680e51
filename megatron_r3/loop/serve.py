"""Megatron's own inference server, for a tree without tools/, such as the one on PyPI.

    torchrun ... -m megatron_r3.loop.serve --load CKPT --moe-enable-routing-replay --port 5000 \\
        --micro-batch-size 1 <Megatron's model arguments>

Engine and server are those of Megatron 0.19 and later; the tree must be patched, or responses have
no routes. In a git checkout tools/run_dynamic_text_generation_server.py starts the same server.
This script adds four things. A page /server_info tells `megatron-r3 rollouts collect` whether
server and weights are still the same. A request that would end the engine is answered with 400. A
checkpoint that does not fit the model exactly is refused. No second server can share the port.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_r3.replay.ending import why_unpatched
from megatron_r3.replay.words import one_line
from megatron_r3.seams.option import engine_records
from megatron_r3.train.launch import build_model, initialize
from megatron_r3.weights.checkpoint import check_load, load_whole


def _arguments(parser: Any) -> Any:
    group = parser.add_argument_group(title="serve")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on")
    group.add_argument("--port", type=int, default=5000, help="port to listen on")
    text = "parsers of responses, by the names that Megatron's own server script takes"
    group.add_argument("--parsers", nargs="*", default=[], help=text)
    return parser


TOLD_TO_END = 128 + signal.SIGTERM  # the exit status that a shell gives a process after SIGTERM


def main() -> None:
    """Serve until the process is told to end. Every rank runs this; rank 0 answers HTTP."""
    # SIGTERM raises SystemExit, so that `_serve` ends the processes that answer HTTP
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(TOLD_TO_END))
    try:
        args = _initialized()
        # routes are sent as base64 (patch 0205)
        os.environ.setdefault("MEGATRON_INFERENCE_NDARRAY_BASE64", "1")
        listening = _listen(args.host, args.port) if torch.distributed.get_rank() == 0 else None
        model, step = build_model(args), _step_of(args)
        load_whole([model], args)
        if _step_of(args) != step:  # the checkpoint before or the new one may have been loaded
            raise ValueError(
                f"--load {args.load}: another checkpoint was saved there meanwhile: start again"
            )
        with torch.inference_mode():
            asyncio.run(_serve(_engine(model.eval(), args), args, step, listening))
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _initialized() -> Any:
    """Megatron's arguments, checked."""
    try:
        args = initialize(_arguments)
    except AssertionError as error:  # how Megatron refuses most arguments
        reason = one_line(str(error)) or "no reason is given"
        raise ValueError(f"Megatron refuses these arguments: {reason}") from error
    if why := why_unpatched():
        raise ValueError(f"responses would lose their routes: {why}")
    if not engine_records():
        raise ValueError(
            "responses would lose their routes: this tree lacks the patches of the group engine "
            "(0.17 to main can have them; make status shows which groups a tree has)"
        )
    if not args.moe_enable_routing_replay:
        raise ValueError("give --moe-enable-routing-replay: without it no response has routes")
    if args.transformer_impl == "inference_optimized":
        raise ValueError(
            "--transformer-impl inference_optimized: not tested, its layers may not record their "
            "routes; give local or transformer_engine"
        )
    check_load(args)
    return args


def _step_of(args: Any) -> str:
    """The iteration of the checkpoint that `load_whole` loads."""
    from megatron.training.checkpointing import get_checkpoint_tracker_filename

    if args.ckpt_step:
        return str(args.ckpt_step)
    return Path(get_checkpoint_tracker_filename(args.load)).read_text().strip()


def _listen(host: str, port: int) -> socket.socket:
    """A socket that no other server shares, opened before the weights are loaded.

    Upstream opens the port with SO_REUSEPORT, by which its four processes share the requests. A
    second server on the port would then take some of the requests, with other weights.
    """
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise ValueError(
            f"--host {host} --port {port}: cannot listen ({error.strerror})"
        ) from error


def _end_with_parent() -> None:
    """In a child: ask the kernel to end the child when its parent ends, even by SIGKILL."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _engine(model: torch.nn.Module, args: Any) -> Any:
    """Megatron's dynamic engine for a model."""
    try:
        from megatron.training.argument_utils import inference_cfg_from_args
    except ImportError as error:
        raise ValueError(
            "this Megatron has no megatron.training.argument_utils.inference_cfg_from_args, which "
            "0.19 has: start its own tools/run_dynamic_text_generation_server.py"
        ) from error
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.core.inference.engines import DynamicInferenceEngine
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
        GPTInferenceWrapper,
    )
    from megatron.core.inference.text_generation_controllers.text_generation_controller import (
        TextGenerationController,
    )
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    config = inference_cfg_from_args(args).to_inference_config(
        model,
        kv_cache_management_mode=args.rl_kv_cache_management_mode,
        static_kv_memory_pointers=args.rl_persist_cuda_graphs,
        enable_cuda_graphs=args.inference_cuda_graph_scope.name != "none",
        metrics_writer=None,
    )
    context = DynamicInferenceContext(model.config, config)
    controller = TextGenerationController(
        GPTInferenceWrapper(model, context), build_tokenizer(args)
    )
    return DynamicInferenceEngine(controller, context)


async def _serve(engine: Any, args: Any, step: str, listening: socket.socket | None) -> None:
    import megatron.core
    from megatron.core.inference.text_generation_server import dynamic_text_gen_server as server

    address = await engine.start_listening_to_data_parallel_coordinator(hostname=args.host)
    try:
        if listening is not None:
            page = {"version": megatron.core.__version__, "model": args.load}
            _add_page({**page, "policy": f"iteration {step}"}, args.padded_vocab_size)
            # the four processes that answer HTTP are forks of this process
            os.register_at_fork(after_in_child=_end_with_parent)
            server.start_text_gen_server(
                coordinator_addr=address,
                tokenizer=engine.controller.tokenizer,
                parsers=args.parsers,
                rank=0,
                server_port=args.port,
                hostname=args.host,
                sock=listening,
            )
        await engine.engine_loop_task
    finally:
        if listening is not None:
            server.stop_text_gen_server()
            # Upstream ends the coordinator only at a client's request. Without this kill the
            # process would wait for the coordinator at its exit.
            engine.inference_coordinator_process.kill()


def why_refused(body: Any, vocabulary: int) -> str | None:
    """Why a request would end Megatron's engine and all other requests; None if it would not.

    Invalid requests that upstream itself answers with an error pass here.

    Args:
        body: the JSON of a completion, or of a chat.
        vocabulary: how many token ids the model has.
    """
    if not isinstance(body, dict):
        return "a request is a JSON object"
    if body.get("stop"):
        return "stop: a stop word ends the engine; leave it out, and give max_tokens"
    logprobs = body.get("logprobs")
    if logprobs is None or logprobs is False:
        return (
            "logprobs: requests with and without log-probs in one engine end the engine when it is "
            "short of memory; give logprobs 0 in a completion, true in a chat"
        )
    most = _number(body, "top_logprobs" if logprobs is True else "logprobs", 0)
    if not most <= vocabulary:
        return f"{most:g} log-probs for each token: there are {vocabulary} token ids; ask for fewer"
    length = _number(body, "max_completion_tokens", 0) or _number(body, "max_tokens", 1)
    if not length >= 1:
        return f"max_tokens {length:g}: ask for at least 1"
    return _why_no_sampling(body, vocabulary) or _why_no_prompt(body.get("prompt"), vocabulary)


def _why_no_sampling(body: dict[str, Any], vocabulary: int) -> str | None:
    """Why the sampling parameters would end the engine; None if they would not."""
    temperature = _number(body, "temperature", 1)
    if temperature == 0:  # upstream takes the likeliest token, and ignores top_k and top_p
        return None
    if not 1e-6 <= temperature < float("inf"):
        return f"temperature {temperature:g}: expected 0, or 1e-6 or more"
    topk, topp = _number(body, "top_k", 0), _number(body, "top_p", 1)
    if not topk < vocabulary or not 0 <= topp <= 1:
        return f"top_k {topk:g}, top_p {topp:g}: give a top_k below {vocabulary}, a top_p of 0 to 1"
    if topk > 0 and topp > 0:
        return f"top_k {topk:g} and top_p {topp:g}: one of them must be 0; top_p is 1 by default"
    return None


def _number(body: dict[str, Any], name: str, default: float) -> float:
    """A number of a request, as upstream reads it; `default` if it is missing or no number."""
    try:
        return float(default if body.get(name) is None else body[name])
    except (TypeError, ValueError):
        return default


def _why_no_prompt(prompt: Any, vocabulary: int) -> str | None:
    """Why a prompt would end the engine; None if it would not. A chat has the prompt None."""
    prompts = prompt if isinstance(prompt, list) else [prompt]
    for one in [prompts] if all(isinstance(part, int) for part in prompts) else prompts:
        if one == [] or (isinstance(one, str) and not one.strip()):
            return "prompt: it is empty; expected a text, or token ids"
        if isinstance(one, list):
            for token in one:
                if isinstance(token, int) and not 0 <= token < vocabulary:
                    return f"prompt: token id {token}; expected 0 to {vocabulary - 1}"
    return None


def _add_page(page: dict[str, str], vocabulary: int) -> None:
    """Make the server answer GET /server_info with `page`, and refuse requests by `why_refused`.

    Upstream registers every blueprint of `endpoints.__all__` in each process that answers HTTP.
    """
    from megatron.core.inference.text_generation_server.dynamic_text_gen_server import endpoints
    from quart import Blueprint, request

    blueprint = Blueprint("server_info", __name__)

    @blueprint.before_app_request
    async def refuse() -> tuple[str, int] | None:
        if not request.path.endswith("/completions"):
            return None
        why = why_refused(await request.get_json(force=True, silent=True), vocabulary)
        return None if why is None else (why, 400)

    @blueprint.route("/server_info", methods=["GET"])
    async def server_info() -> dict[str, str]:
        return page

    endpoints.__all__.append(blueprint)


if __name__ == "__main__":
    main()
