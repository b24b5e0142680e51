"""Megatron's own inference server, for a tree that has no tools/ (the one on PyPI).

    torchrun ... -m megatron_r3.loop.serve --load CKPT --moe-enable-routing-replay --port 5000 \\
        --micro-batch-size 1 <Megatron's model arguments>

Engine and server are Megatron's, of 0.19 and later; the tree must be patched, or requests lose
their routes. A checkout's tools/run_dynamic_text_generation_server.py starts the same server. This
script adds one page, /server_info, on which `megatron-r3 rollouts collect` sees whether it is still
the same server with the same weights. A request that would end the engine is answered with 400. The
weights of the checkpoint are loaded whole, or not at all.
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
    group.add_argument("--host", default="127.0.0.1", help="address to listen at")
    group.add_argument("--port", type=int, default=5000, help="port to listen at")
    group.add_argument("--parsers", nargs="*", default=[], help="of a response, as upstream's")
    return parser


TOLD_TO_END = 128 + signal.SIGTERM  # what a shell says of a process that SIGTERM ended


def main() -> None:
    """Serve until the process is told to end. Every rank runs this; the first one answers."""
    # at SIGTERM, too, the processes that answer HTTP are ended with this one
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(TOLD_TO_END))
    try:
        args = _initialized()
        os.environ.setdefault("MEGATRON_INFERENCE_NDARRAY_BASE64", "1")  # patch 205
        listening = _listen(args.host, args.port) if torch.distributed.get_rank() == 0 else None
        model, step = build_model(args), _step_of(args)
        load_whole([model], args)
        if _step_of(args) != step:  # nobody knows which of both was loaded
            raise ValueError(f"--load {args.load}: another checkpoint was saved there meanwhile")
        with torch.inference_mode():
            asyncio.run(_serve(_engine(model.eval(), args), args, step, listening))
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _initialized() -> Any:
    """Megatron's arguments, once they were checked.

    Raises:
        ValueError: Megatron refuses them, or no routes would be recorded.
    """
    try:
        args = initialize(_arguments)
    except AssertionError as error:  # how Megatron refuses most arguments
        reason = one_line(str(error)) or "no reason is given"
        raise ValueError(f"Megatron refuses these arguments: {reason}") from error
    if why := why_unpatched():
        raise ValueError(f"responses would lose their routes: {why}")
    if not engine_records():
        raise ValueError(
            "responses would lose their routes: this tree has no patches of the group engine (0.17 "
            "to main have them; make status shows which groups are in)"
        )
    if not args.moe_enable_routing_replay:
        raise ValueError("give --moe-enable-routing-replay: without it no response has routes")
    if args.transformer_impl == "inference_optimized":
        raise ValueError(
            "--transformer-impl inference_optimized: nobody has shown that its layers record what "
            "they choose; use another"
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
    """A socket that no other server shares, taken before the weights are loaded.

    Upstream lets several processes listen at one port (SO_REUSEPORT), which is how its own four
    share the requests. A second server at the port would take some of them, with other weights.

    Raises:
        ValueError: the port is taken.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()
    except OSError as error:
        raise ValueError(
            f"--host {host} --port {port}: cannot listen ({error.strerror})"
        ) from error
    return listening


def _end_with_parent() -> None:
    """In a child: have the kernel end it when its parent is gone, even by SIGKILL."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _engine(model: torch.nn.Module, args: Any) -> Any:
    """The engine over a model.

    Raises:
        ValueError: this Megatron is too old, or the engine refuses an option.
    """
    try:
        from megatron.training.argument_utils import inference_cfg_from_args
    except ImportError as error:
        raise ValueError(
            "this Megatron has no engine config from arguments (0.19 has): start its own "
            "tools/run_dynamic_text_generation_server.py"
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
    from megatron.core.inference.text_generation_server import dynamic_text_gen_server as server

    address = await engine.start_listening_to_data_parallel_coordinator(hostname=args.host)
    try:
        if listening is not None:
            _add_page(_identity(args.load, step), args.padded_vocab_size)
            # the four processes that answer HTTP are forks of this one
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
            # upstream ends this process only if a client asks for it, and Python would wait for it
            engine.inference_coordinator_process.kill()


def _identity(checkpoint: str, step: str) -> dict[str, str]:
    """What /server_info says: the version of Megatron, the checkpoint, and its iteration."""
    import megatron.core

    return {
        "version": str(megatron.core.__version__),
        "model": str(checkpoint),
        "policy": f"iteration {step}",
    }


def why_refused(body: Any, vocabulary: int) -> str | None:
    """Why a request would end Megatron's engine, and all other requests with it; None if not.

    What upstream itself answers with an error is left to upstream.

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
            "logprobs: requests with and without log-probs in one engine end it when it is short "
            "of memory; give 0 (in a chat true)"
        )
    most = _number(body, "top_logprobs" if logprobs is True else "logprobs", 0)
    if not most <= vocabulary:
        return f"{most:g} log-probs for each token: there are {vocabulary} token ids"
    length = _number(body, "max_completion_tokens", 0) or _number(body, "max_tokens", 1)
    if not length >= 1:
        return f"max_tokens {length:g}: ask for at least 1"
    return _why_no_sampling(body, vocabulary) or _why_no_prompt(body.get("prompt"), vocabulary)


def _why_no_sampling(body: dict[str, Any], vocabulary: int) -> str | None:
    """Why sampling would end the engine; None if not."""
    temperature = _number(body, "temperature", 1)
    if temperature == 0:  # upstream takes the best token, and reads neither top_k nor top_p
        return None
    if not 1e-6 <= temperature < float("inf"):
        return f"temperature {temperature:g}: expected 0, or a number from 1e-6 on"
    topk, topp = _number(body, "top_k", 0), _number(body, "top_p", 1)
    if not topk < vocabulary or not 0 <= topp <= 1:
        return f"top_k {topk:g}, top_p {topp:g}: expected less than {vocabulary}, and 0 to 1"
    if topk > 0 and topp > 0:
        return f"top_k {topk:g} and top_p {topp:g}: one of both must be 0; top_p is 1 by default"
    return None


def _number(body: dict[str, Any], name: str, default: float) -> float:
    """A number of a request, read as upstream reads it; what is no number gets its answer there."""
    try:
        return float(default if body.get(name) is None else body[name])
    except (TypeError, ValueError):
        return default


def _why_no_prompt(prompt: Any, vocabulary: int) -> str | None:
    """Why a prompt would end the engine; None if not. A chat has none."""
    prompts = prompt if isinstance(prompt, list) else [prompt]
    for one in [prompts] if all(isinstance(part, int) for part in prompts) else prompts:
        if one == [] or (isinstance(one, str) and not one.strip()):
            return "prompt: it is empty"
        if isinstance(one, list):
            for token in one:
                if isinstance(token, int) and not 0 <= token < vocabulary:
                    return f"prompt: token id {token}; expected 0 to {vocabulary - 1}"
    return None


def _add_page(page: dict[str, str], vocabulary: int) -> None:
    """Have the server answer GET /server_info with this page, and refuse what would end it.

    Upstream registers every blueprint of a list in each process that answers HTTP.
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
