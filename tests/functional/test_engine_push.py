"""Pushes into the real servers: SGLang's loading in place is right, vLLM's on a CPU is wrong.

Two policies are 5 % apart, of a model of the demo's shape. The servers compute in bfloat16, and so
does transformers, which stands in for the trainer's probe.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from published import add_manifest, save_changed
from training import Policy

from demo import sglang_server, vllm_server
from demo.server_process import run_server
from megatron_r3.collect.client import Client
from megatron_r3.collect.generate import load_model
from megatron_r3.data.engines.shape import ModelShape
from megatron_r3.loop.loading import Loader
from megatron_r3.loop.published import PublishedPolicy, read_policy, version_name
from megatron_r3.loop.push import Pusher, PushError
from megatron_r3.loop.push_floor import PushFloor


@pytest.fixture(scope="module")
def policies(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> list[PublishedPolicy]:
    folder = tmp_path_factory.mktemp("policies")
    for version in range(2):
        model = load_model(policy.hf).float()
        path = folder / version_name(version)
        save_changed(model, path, seed=version, dtype=torch.bfloat16)
        add_manifest(path, version)
    return [read_policy(folder, version) for version in range(2)]


@contextmanager
def server(module: Any, policies: list[PublishedPolicy], log: Path) -> Iterator[str]:
    """A server that was started with policy 0, to take weights in place; its address."""
    words, environment = module.template(policies[0].path, in_place=True)
    with run_server(log.stem, words, {"model": str(policies[0].path)}, environment, log) as url:
        yield url


def pushing(engine: str, url: str, model: Path, work: Callable[..., Any], *command: str) -> None:
    """Run `work(pusher)` with a server, to which `command` hands the weights, if there is one."""

    async def whole() -> None:
        client = Client(url, 4, 120, 3, 0.2)
        loader = Loader(engine, client, in_place=True, command=command, wait_s=60)
        try:
            await work(Pusher(loader, client, ModelShape.from_hf_config(model), PushFloor()))
        finally:
            await client.close()

    asyncio.run(whole())


def test_what_vllm_loads_in_place_on_a_cpu_is_refused(policies, tmp_path):
    async def work(pusher: Pusher) -> None:
        shown = await pusher.compare_the_start(policies[0])
        assert shown is not None, "the server does not compute the policy that it began with"
        with pytest.raises(PushError, match="does not compute it: mean") as error:
            await pusher.push(policies[1], policies[0].probe)
        push = error.value.push
        assert push is not None
        assert push.difference.abs_dlogp > 3 * shown.abs_dlogp

    with server(vllm_server, policies, tmp_path / "vllm.log") as url:
        pushing("vllm", url, policies[0].path, work)


# What a command of the user's does, on GPUs by NCCL: it hands the weights over, and forgets the
# keys and values of before. Policy 0 has its files in the place of those that were asked for.
HANDS_OVER = """
import json, sys, urllib.request
body = json.dumps({"model_path": sys.argv[1], "flush_cache": True}).encode()
request = urllib.request.Request(
    sys.argv[2] + "/update_weights_from_disk", body, {"Content-Type": "application/json"}
)
assert json.load(urllib.request.urlopen(request))["success"]
"""


def test_what_sglang_loads_in_place_is_right_and_so_is_a_command_of_the_users(policies, tmp_path):
    async def loads(pusher: Pusher) -> None:
        shown = await pusher.compare_the_start(policies[0])
        assert shown is not None
        done = [await pusher.push(policies[i], policies[1 - i].probe) for i in (1, 0, 1)]
        assert all(one.how == "loaded" for one in done)
        assert max(one.difference.abs_dlogp for one in done) < 2 * shown.abs_dlogp
        # the control: the server has policy 1, and says that it has policy 0
        await pusher.loader._mark(policies[0])
        _, wrong = await pusher._compare(policies[0])
        assert pusher.floor.judge(wrong)
        await pusher.push(policies[0])

    script = tmp_path / "hand_over.py"
    script.write_text(HANDS_OVER)
    stale = json.dumps(str(policies[0].path))

    async def is_handed(pusher: Pusher) -> None:
        assert await pusher.compare_the_start(policies[0]) is not None
        push = await pusher.push(policies[1], policies[0].probe)
        assert push.how == "command"
        assert await pusher.loader.served() == policies[1].name == push.served
        # a command that hands over the policy before
        script.write_text(HANDS_OVER.replace("sys.argv[1]", stale))
        await pusher.push(policies[0], policies[1].probe)
        with pytest.raises(PushError, match="does not compute it"):
            await pusher.push(policies[1], policies[0].probe)

    command = (sys.executable, str(script), "{model}", "{url}")
    with server(sglang_server, policies, tmp_path / "sglang.log") as url:
        pushing("sglang", url, policies[0].path, loads)
        pushing("sglang", url, policies[0].path, is_handed, *command)
