"""Megatron's own inference server, for a tree that has no tools/ (the one on PyPI).

    torchrun ... -m megatron_r3.serve --load CKPT --moe-enable-routing-replay --port 5000 \\
        --micro-batch-size 1 <Megatron's model arguments>

Engine and server are Megatron's, of 0.19 and later; the tree must be patched, or requests lose
their routes. A checkout's tools/run_dynamic_text_generation_server.py starts the same server. This
script adds one page, /server_info, on which `megatron-r3 rollouts collect` sees whether it is still
the same server with the same weights. The weights of the checkpoint are loaded whole, or not at
all.
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

from megatron_r3.launch import build_model, initialize
from megatron_r3.placement import placement_of
from megatron_r3.untrusted import one_line
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
        listening = _listen(args.host, args.port) if torch.distributed.get_rank() == 0 else None
        model, step = build_model(args), _step_of(args)
        load_whole([model], args)
        if _step_of(args) != step:  # nobody knows which of both was loaded
            raise ValueError(f"--load {args.load}: another checkpoint was saved there meanwhile")
        if placement_of(args) is not None:
            raise ValueError(
                f"--load {args.load}: its experts are in other places (--hf-placement), so that "
                "recorded routes would name places; serve a checkpoint that was imported without"
            )
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
    if not args.moe_enable_routing_replay:
        raise ValueError("give --moe-enable-routing-replay: without it no response has routes")
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
            _add_page(_identity(args.load, step))
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


def _add_page(page: dict[str, str]) -> None:
    """Have the server answer GET /server_info with this page.

    Upstream registers every blueprint of a list in each process that answers HTTP.
    """
    from megatron.core.inference.text_generation_server.dynamic_text_gen_server import endpoints
    from quart import Blueprint

    blueprint = Blueprint("server_info", __name__)

    @blueprint.route("/server_info", methods=["GET"])
    async def server_info() -> dict[str, str]:
        return page

    endpoints.__all__.append(blueprint)


if __name__ == "__main__":
    main()
