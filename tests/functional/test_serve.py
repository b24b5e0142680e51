"""`python -m megatron_r3.loop.serve`: Megatron's own server and engine, and what they answer.

Shape suffixes (docs/glossary.md): K, L, N, T, U.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from training import Policy, trained_with

from demo import megatron_server, task
from demo.model import arguments
from megatron_r3.cli import main
from megatron_r3.data.engines import decode
from megatron_r3.data.engines.shape import ModelShape
from megatron_r3.data.store import RolloutStore
from proof.fidelity.rig.worker import TreeWorker


@pytest.fixture(scope="module")
def url(
    patched_tree: Path, policy: Policy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("serve")
    with megatron_server.serve(policy.checkpoint, patched_tree, folder) as address:
        yield address


def test_the_server_sends_routes_as_bytes(url: str, policy: Policy) -> None:
    prompt = task.problem(10_000_000)[0]
    request = {"prompt": prompt, "max_tokens": 4, "logprobs": 0, "ignore_eos": True}
    request |= {"top_k": 1, "top_p": 0.0}  # upstream's default for top_p ends the engine here
    response = httpx.post(f"{url}/v1/completions", json=request, timeout=60).json()
    (choice,) = response["choices"]
    tag, content = choice["moe_topk_indices"]
    assert (tag, content["dtype"], content["shape"]) == (
        "ndarray",
        "int16",
        [len(prompt) + 3, 4, 4],
    )
    assert isinstance(content["data"], str)
    (rollout,) = decode("megatron", response, request, ModelShape.from_hf_config(policy.hf), "x")
    assert rollout.routes.ids_LTK.shape == (4, len(prompt) + 3, 4)
    again = httpx.post(f"{url}/v1/completions", json=request, timeout=60).json()
    assert again["choices"][0]["moe_topk_indices"] == choice["moe_topk_indices"]
    other = {**request, "prompt": task.problem(10_000_001)[0]}
    another = httpx.post(f"{url}/v1/completions", json=other, timeout=60).json()
    assert another["choices"][0]["moe_topk_indices"] != choice["moe_topk_indices"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"stop": ["7"]}, "stop: a stop word ends the engine; leave it out"),
        ({"top_p": 1.0, "top_k": 3}, "top_k 3 and top_p 1: one of them must be 0"),
        ({"max_tokens": 0}, "max_tokens 0: ask for at least 1"),
        ({"prompt": [5, 100_000]}, "prompt: token id 100000"),
    ],
)
def test_a_request_that_would_end_the_engine_is_refused(url, change, what):
    request = {"prompt": [5, 6, 7], "max_tokens": 4, "logprobs": 0, "top_k": 1, "top_p": 0.0}
    refused = httpx.post(f"{url}/v1/completions", json={**request, **change}, timeout=60)
    assert (refused.status_code, refused.text[: len(what)]) == (400, what)
    assert httpx.post(f"{url}/v1/completions", json=request, timeout=60).status_code == 200


def test_who_the_server_is(url: str, policy: Policy) -> None:
    page = httpx.get(f"{url}/server_info", timeout=10).json()
    assert page["model"] == str(policy.checkpoint)
    assert page["policy"] == "iteration 60"
    assert page["version"].startswith("0.")


def test_collect_stores_what_the_server_samples(url: str, policy: Policy, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    task.write_prompts(prompts, 6, 10_000_000)
    command = ["rollouts", "collect", "--engine", "megatron", "--url", url, "--n", "4"]
    command += ["--model", str(policy.hf), "--prompts", str(prompts), "--max-tokens", "13"]
    command += ["--out", str(tmp_path / "store"), "--reward", "demo.task:reward"]
    assert main(command) == 0
    store = RolloutStore([tmp_path / "store"])
    assert len(store) == 24
    assert (store.info.engine, store.info.engine_policy) == ("megatron", "iteration 60")
    for index in range(len(store)):
        assert store.rollout(index).routes.recorded_T.all()  # every row is there
    assert main(["rollouts", "verify", str(tmp_path / "store"), "--model", str(policy.hf)]) == 0
    inspected = ["rollouts", "inspect", str(tmp_path / "store"), "--model", str(policy.hf)]
    assert main([*inspected, "--fail-on-alarm"]) == 0


def test_a_session_of_three_turns_has_the_rows_of_one_forward_pass(url, policy, tmp_path):
    from recording import recording  # ranks import this file, and do not have tests/support

    ids = list(task.problem(10_000_000)[0])

    async def turns() -> None:
        nonlocal ids
        async with recording(policy.hf, url, tmp_path / "store", "megatron") as run:
            for _ in range(3):
                body = {"model": "any", "prompt": ids, "max_tokens": 4}
                status, answer = await run.post("sessions/s/completions", body)
                assert status == 200, answer
                (turn,) = run.recorder.open["id:s"].session.turns[-1:]
                ids = [*turn.increment.tokens_N.tolist(), 5, 6]
            assert (await run.post("sessions/s/reward", {"reward": 1.0}))[0] == 200

    asyncio.run(turns())
    rollout = RolloutStore([tmp_path / "store"]).rollout(0)
    assert len(rollout.spans_U2) == 3
    tokens = rollout.tokens_N.tolist()
    request = {"prompt": tokens, "max_tokens": 1, "logprobs": 0, "top_k": 1, "top_p": 0.0}
    response = httpx.post(f"{url}/v1/completions", json=request, timeout=60).json()
    (whole,) = decode("megatron", response, request, ModelShape.from_hf_config(policy.hf), "x")
    rows = len(tokens) - 1
    whole_LTK = np.sort(whole.routes.ids_LTK[:, :rows], -1)
    stitched_LTK = np.sort(rollout.routes.ids_LTK, -1)
    assert np.array_equal(stitched_LTK, whole_LTK)
    assert not np.array_equal(stitched_LTK[:, 1:], whole_LTK[:, :-1])


def test_two_ranks_answer_as_one(url, patched_tree, policy, tmp_path):
    request = {"prompt": task.problem(7)[0], "max_tokens": 6, "logprobs": 0, "ignore_eos": True}
    request |= {"top_k": 1, "top_p": 0.0}
    one = httpx.post(f"{url}/v1/completions", json=request, timeout=60).json()
    served = megatron_server.serve(policy.checkpoint, patched_tree, tmp_path, pipeline_stages=2)
    with served as address:
        two = httpx.post(f"{address}/v1/completions", json=request, timeout=60).json()
    names = ("generation_token_ids", "moe_topk_indices")
    assert [one["choices"][0][n] for n in names] == [two["choices"][0][n] for n in names]


def refused(rank: int, words: list[str]) -> str:
    """How a server ends that refuses to serve."""
    from megatron_r3.loop import serve

    sys.argv = ["serve.py", *words]
    with pytest.raises(SystemExit) as ended:
        serve.main()
    return str(ended.value.code)


def words_of(policy: Policy, values: dict[str, str]) -> list[str]:
    """The command of the demo's server with other values; words without a value are left out."""
    values = {"{checkpoint}": str(policy.checkpoint), "{port}": "0", **values}
    words = arguments(megatron_server.SERVER, ["--load", "{checkpoint}"])
    return " ".join(values.get(word, word) for word in words).split()


def test_a_second_server_does_not_share_the_port(url, patched, policy):
    port = url.rpartition(":")[2]
    (said,) = patched.run(refused, 1, words_of(policy, {"{port}": port}))
    assert f"--port {port}: cannot listen (Address already in use" in said
    assert httpx.get(f"{url}/health", timeout=10).status_code == 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--moe-enable-routing-replay", ""], "give --moe-enable-routing-replay"),
        (["{checkpoint}", "/nowhere"], "--load /nowhere: there is no checkpoint"),
        (
            [
                "--moe-enable-routing-replay",
                "--moe-enable-routing-replay --transformer-impl=inference_optimized",
            ],
            "--transformer-impl inference_optimized: not tested",
        ),
    ],
)
def test_a_server_that_could_not_serve_is_refused(patched, policy, change, message):
    (said,) = patched.run(refused, 1, words_of(policy, {change[0]: change[1]}))
    assert said.startswith(f"error: {message}")


def test_a_checkpoint_that_was_trained_with_another_argument_is_refused(
    patched: TreeWorker, torch_checkpoint: Path, tmp_path: Path
) -> None:
    """It would answer as another model; the same checkpoint is served as it is above."""
    shutil.copytree(torch_checkpoint, tmp_path / "changed")
    name, value = "moe_router_topk_scaling_factor", 2.5
    patched.run(trained_with, 1, tmp_path / "changed", name, value)
    values = {"{checkpoint}": str(tmp_path / "changed"), "torch_dist": "torch"}
    (said,) = patched.run(refused, 1, words_of(Policy.within(tmp_path), values))
    assert f"it has {name} 2.5, the arguments say None: give the checkpoint's" in said


def test_the_command_of_the_page_is_the_one_that_runs_here() -> None:
    page = (megatron_server.ROOT / "docs" / "megatron-engine.md").read_text()
    written = page.partition("megatron_r3/loop/serve.py $(cat build/demo/train.args)")[2]
    words = written.partition("```")[0].replace("\\\n", " ").split()
    options = [word.format(port=5000) for word in megatron_server.SERVER]
    # in train.args already
    for known in (["--bf16"], ["--moe-router-load-balancing-type", "none"]):
        at = options.index(known[0])
        del options[at : at + len(known)]
    assert sorted(words) == sorted([*options, "--expert-model-parallel-size", "1"])
