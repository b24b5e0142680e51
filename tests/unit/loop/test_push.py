"""A push that went wrong is stopped: nothing is sampled with weights that the trainer did not give.

The sampler is the embedded one, in float32; what it loads wrongly is changed in its memory after
the load, so that it says that it has the policy.

Shape suffixes (docs/glossary.md): K, L, N.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import engine_server
import pytest
import torch
from published import publish, save_model, served
from slow import slow_except

from megatron_r3.collect.client import Client
from megatron_r3.data.engines.shape import EngineError, ModelShape
from megatron_r3.loop.embedded import EmbeddedSampler
from megatron_r3.loop.loading import Loader, LoadError
from megatron_r3.loop.probe import Difference, Probe
from megatron_r3.loop.probe_requests import probe_request, read_answer
from megatron_r3.loop.published import PolicyError, PublishedPolicy, read_policy, wait_for_policy
from megatron_r3.loop.push import Push, Pusher, PushError
from megatron_r3.loop.push_floor import PushFloor

pytestmark = pytest.mark.usefixtures("one_thread")


def push(
    url: str,
    policy: PublishedPolicy,
    floor: PushFloor,
    before: Probe | None = None,
    command: tuple[str, ...] = (),
) -> Push:
    async def whole() -> Push:
        client = Client(url, 4, 60, 0, 0.1)
        shape = ModelShape.from_hf_config(policy.path)
        loader = Loader("embedded", client, in_place=True, command=command, wait_s=5)
        try:
            return await Pusher(loader, client, shape, floor).push(policy, before)
        finally:
            await client.close()

    return asyncio.run(whole())


class Wrong(EmbeddedSampler):
    """Loads a policy, then has one thing wrong, and says nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.change: Any = None
        self.before: dict[str, torch.Tensor] = {}

    def load(self, directory: Path, version: str) -> None:
        super().load(directory, version)
        state = self._engine.model.state_dict()
        if self.change is not None:
            with torch.no_grad():
                self.change(state, self.before)
        else:
            self.before = {name: tensor.clone() for name, tensor in state.items()}


State = dict[str, torch.Tensor]


def not_loaded(index: int, state: State, before: State) -> None:
    names = [name for name, t in state.items() if t.ndim > 1 and "gate.weight" not in name]
    name = names[index % len(names)]
    state[name].copy_(before[name])


def expert_swapped(index: int, state: State, before: State) -> None:
    names = sorted(name for name in state if name.endswith("experts.gate_up_proj"))
    experts = state[names[index % len(names)]]
    one, other = index % len(experts), (index + 1) % len(experts)
    experts[[one, other]] = experts[[other, one]].clone()


def router_stale(index: int, state: State, before: State) -> None:
    names = sorted(name for name in state if name.endswith("mlp.gate.weight"))
    name = names[index % len(names)]
    state[name].copy_(before[name])


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two policies whose weights are some 5 % apart."""
    folder = tmp_path_factory.mktemp("policies")
    publish(folder, 0, seed=0)
    publish(folder, 1, seed=1)
    return folder


def test_a_right_push_is_accepted_and_its_floor_is_that_of_rounding(policies):
    floor = PushFloor()
    with served() as url:
        for version in (0, 1, 0):
            done = push(url, read_policy(policies, version), floor)
            assert done.how == "loaded"
            assert done.difference.abs_dlogp < 1e-5
            assert min(done.difference.agreement) > 0.99
    assert len(floor.before) == 3


@pytest.mark.parametrize("times", slow_except([3, 10], 3))
@pytest.mark.parametrize("fault", [not_loaded, expert_swapped, router_stale])
def test_a_wrong_push_is_stopped_each_time(policies, fault, times):
    first, second = read_policy(policies, 0), read_policy(policies, 1)
    sampler, stopped = Wrong(), 0
    with served(sampler) as url:
        for index in range(times):
            floor = PushFloor()
            sampler.change = None
            push(url, first, floor)
            sampler.change = partial(fault, index)
            with pytest.raises(PushError, match="does not compute it"):
                push(url, second, floor)
            stopped += 1
    assert stopped == times


class KeepsKeys(EmbeddedSampler):
    """Answers what it sampled before with the weights of before: a prefix cache not flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {}

    def generate(self, body: Any) -> Any:
        answer = super().generate(body)
        if "logprob_start_len" in body:
            return answer
        return self.kept.setdefault(str(body["input_ids"]), answer)


@pytest.mark.parametrize("times", slow_except([3, 10], 3))
def test_keys_and_values_of_older_weights_are_found_each_time(policies, times):
    first, second = read_policy(policies, 0), read_policy(policies, 1)
    for _ in range(times):
        floor = PushFloor()
        with served(KeepsKeys()) as url:
            push(url, first, floor)
            with pytest.raises(PushError, match="prefix cache is of older weights"):
                push(url, second, floor)


def test_what_vllm_answers_is_read() -> None:
    """A response of vLLM 0.30.0 to such a request, and log-probs of its prompt in vLLM's form."""
    recorded = json.loads((engine_server.DATA / "03_p5_g1.json").read_text())
    answer, ids = recorded["response"], recorded["request"]["prompt"]
    shape = ModelShape(16, 4, (0, 1, 2, 3), 4, 512)
    answer["choices"][0]["prompt_logprobs"] = [
        {str(token): {"logprob": -float(i)}} if i else None for i, token in enumerate(ids)
    ]
    for with_prompt, logprobs in ((True, [0, -1, -2, -3, -4]), (False, [0] * 5)):
        path, body = probe_request("vllm", answer["model"], ids, with_prompt)
        asked = read_answer(answer, body, "vllm", shape, path)
        assert asked.logprobs_N.tolist() == logprobs
        assert asked.routes_LNK.shape == (4, 5, 4)
        assert asked.next_logprob == pytest.approx(-1.0277965)
    answer["choices"][0]["prompt_logprobs"] = None
    with pytest.raises(EngineError, match="/v1/completions: the answer cannot be read"):
        read_answer(answer, {**body, "prompt_logprobs": 0}, "vllm", shape, path)
    answer["choices"][0]["routed_experts"] = None
    with pytest.raises(EngineError, match="choice 0: no routed_experts; start the server with"):
        read_answer(answer, body, "vllm", shape, path)


def test_a_load_that_changed_nothing_is_found_where_the_floor_is_wide(policies):
    """The floor lets two policies pass that are 5 % apart; the one before is still nearer."""
    first, second = read_policy(policies, 0), read_policy(policies, 1)

    class Stale(EmbeddedSampler):
        def load(self, directory: Path, version: str) -> None:
            super().load(first.path, version)

    wide = PushFloor([Difference(0.25, 0.25, (0.6, 0.6))])
    with served(Stale()) as url:
        push(url, second, replace(wide))
        with pytest.raises(PushError, match="the sampler still has the old weights"):
            push(url, second, wide, before=first.probe)
    with served() as url:
        push(url, second, wide, before=first.probe)


NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running."
)


def test_a_load_is_asked_for_again_until_the_prefix_cache_is_empty(policies):
    """SGLang 0.5.23 says so if its scheduler has not yet let go of the request before."""

    class Busy(EmbeddedSampler):
        tries = 0

        def load(self, directory: Path, version: str) -> None:
            super().load(directory, version)
            self.tries += 1
            if self.tries <= until:
                raise EngineError(told)

    until, told = 2, NOT_FLUSHED
    with served(sampler := Busy()) as url:
        push(url, read_policy(policies, 0), PushFloor())
    assert sampler.tries == 3
    until, told = 1000, "Weights could not be read."
    with served(sampler := Busy()) as url, pytest.raises(EngineError, match=told):
        push(url, read_policy(policies, 0), PushFloor())
    assert sampler.tries == 1
    told = NOT_FLUSHED
    with served(Busy()) as url, pytest.raises(EngineError, match="the cache was not flushed"):
        push(url, read_policy(policies, 0), PushFloor())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("sh", "-c", "echo no GPU for {model}; exit 3"), "exit status 3: no GPU for /"),
        (("no-such-command",), "no-such-command: no such command"),
        (("sh", "-c", "echo half; sleep 60"), "no end within 5 s: half"),
    ],
)
def test_a_push_command_that_fails_is_named(policies, command, words):
    with served() as url, pytest.raises(ValueError, match=words):
        push(url, read_policy(policies, 0), PushFloor(), command=command)


def test_a_sampler_that_has_another_version_than_it_was_given(policies):
    class Deaf(EmbeddedSampler):
        def load(self, directory: Path, version: str) -> None:
            super().load(directory, name)

    policy = read_policy(policies, 0)
    for name in ("v000007", "v000000", f"v000000-{read_policy(policies, 1).digest}"):
        with served(Deaf()) as url, pytest.raises(PushError, match=f"says that it has '{name}'"):
            push(url, policy, PushFloor())
    name = f"{policy.name}.4a1f"  # of one start of a server
    with served(Deaf()) as url:
        assert push(url, policy, PushFloor()).served == name


def test_another_service_is_no_server_that_starts(policies):
    """Its pages are another's: that does not change within the hour that a start may take."""
    with served() as url:

        async def wait() -> None:
            client = Client(url, 1, 5, 0, 0.1)
            try:
                await Loader("vllm", client, in_place=True, command=(), wait_s=60).wait_until_up()
            finally:
                await client.close()

        with pytest.raises(LoadError, match=r"is it a vllm server.*VLLM_SERVER_DEV_MODE=1"):
            asyncio.run(wait())


def test_files_that_the_trainer_did_not_write_are_refused(tmp_path):
    folder = publish(tmp_path, 0, seed=0)
    policy = read_policy(tmp_path, 0)
    policy.check_files()
    extra = folder / "extra.safetensors"
    extra.write_text("")
    with pytest.raises(PolicyError, match="was not published with this policy"):
        policy.check_files()
    extra.unlink()
    save_model(folder, seed=3)
    with pytest.raises(PolicyError, match="not those that the trainer wrote"):
        policy.check_files()
    (folder / "config.json").unlink()
    with pytest.raises(PolicyError, match=r"config\.json: is missing"):
        policy.check_files()


PROBE = f'"probe": {{"tokens": [[{2**70}]]}}'  # a token id that no int64 holds
TOO_LARGE = f'{{"format": 1, "version": 0, "iteration": 1, "files": {{}}, {PROBE}}}'


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "cannot be read as the file that a"), ("{}", "cannot be"), ("[1]", "cannot be read"),
     ('{"format": 2, "version": 0}', "format 2"), ('{"format": 1, "version": 3}', "version 3"),
     (TOO_LARGE, "cannot be read")],
)  # fmt: skip
def test_a_manifest_that_no_trainer_wrote(tmp_path, text, words):
    folder = tmp_path / "v000000"
    folder.mkdir()
    (folder / "policy.json").write_text(text)
    with pytest.raises(PolicyError, match=words):
        read_policy(tmp_path, 0)


def test_a_policy_that_does_not_come(tmp_path):
    (tmp_path / "v000002").mkdir()
    with pytest.raises(
        PolicyError, match=r"policy 3 did not come within 0.1 s \(the newest one is 2\)"
    ):
        wait_for_policy(tmp_path, 3, 0.1)
