"""A push that went wrong is stopped: nothing is sampled with weights that the trainer did not give.

The sampler is the embedded one, in float32; what it loads wrongly is changed in its memory after
the load, so that it says that it has the policy.

Shape suffixes (docs/glossary.md): K, L, N, P.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from published import probe_from, publish, save_model, served
from sampled import moved, tiny_model
from slow import slow_except

from megatron_r3.collect.client import Client
from megatron_r3.data.engines.shape import EngineError, ModelShape
from megatron_r3.loop.embedded import EmbeddedSampler
from megatron_r3.loop.loading import Loader, LoadError
from megatron_r3.loop.probe import Difference, Probe, difference
from megatron_r3.loop.published import (
    PolicyError,
    PublishedPolicy,
    read_policy,
    wait_for_policy,
)
from megatron_r3.loop.push import Push, Pusher, PushError
from megatron_r3.loop.push_floor import PushFloor, still_before

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


def not_loaded(index: int) -> Any:
    def change(state: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
        names = [name for name, t in state.items() if t.ndim > 1 and "gate.weight" not in name]
        name = names[index % len(names)]
        state[name].copy_(before[name])

    return change


def expert_swapped(index: int) -> Any:
    def change(state: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
        names = sorted(name for name in state if name.endswith("experts.gate_up_proj"))
        experts = state[names[index % len(names)]]
        one, other = index % len(experts), (index + 1) % len(experts)
        experts[[one, other]] = experts[[other, one]].clone()

    return change


def router_stale(index: int) -> Any:
    def change(state: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
        names = sorted(name for name in state if name.endswith("mlp.gate.weight"))
        name = names[index % len(names)]
        state[name].copy_(before[name])

    return change


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
            sampler.change = fault(index)
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
        return {**answer, "meta_info": self.kept.setdefault(
            str(body["input_ids"]), answer["meta_info"]
        )}  # fmt: skip


@pytest.mark.parametrize("times", slow_except([3, 10], 3))
def test_keys_and_values_of_older_weights_are_found_each_time(policies, times):
    first, second = read_policy(policies, 0), read_policy(policies, 1)
    for _ in range(times):
        floor = PushFloor()
        with served(KeepsKeys()) as url:
            push(url, first, floor)
            with pytest.raises(PushError, match="prefix cache is of older weights"):
                push(url, second, floor)


def test_a_load_that_changed_nothing_is_found_where_the_floor_is_wide(policies):
    """The floor lets two policies pass that are 5 % apart; the one before is still nearer."""
    first, second = read_policy(policies, 0), read_policy(policies, 1)

    class Stale(EmbeddedSampler):
        def load(self, directory: Path, version: str) -> None:
            super().load(first.path, version)

    wide = PushFloor([Difference(0.25, 0.25, (0.6, 0.6))])
    with served(Stale()) as url:
        push(url, second, replace(wide))
        with pytest.raises(PushError, match="it has the weights of before"):
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
    with pytest.raises(PolicyError, match="was not published with it"):
        policy.check_files()
    extra.unlink()
    save_model(folder, seed=3)
    with pytest.raises(PolicyError, match="not those that the trainer wrote"):
        policy.check_files()
    (folder / "config.json").unlink()
    with pytest.raises(PolicyError, match=r"config\.json: is missing"):
        policy.check_files()


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "not what a trainer publishes"), ("{}", "not what a trainer"), ("[1]", "not what"),
     ('{"format": 2, "version": 0}', "format 2"), ('{"format": 1, "version": 3}', "version 3")],
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


MEDIAN = "the median of the last 8 pushes"
# A push after one whose mean |dlogp| was 0.01, and whose two layers differed in 0.01 and 0.03 of
# the routes; and what is said of it. The routes of the layers may differ in 0.08 and 0.14.
JUDGED: dict[str, tuple[Difference, str]] = {
    "right": (Difference(0.03, 0.03, (0.925, 0.865)), ""),
    "log-probs": (Difference(0.031, 0.031, (0.99, 0.97)), "mean |dlogp| 0.031, at most 0.03, which "
                  f"is 3 times {MEDIAN}, 0.01, plus 1e-05: it has other weights"),
    "routes": (Difference(0.01, 0.01, (0.91, 0.99)), "share of other routes in MoE layer 0 0.09, "
               f"at most 0.08, which is 3 times {MEDIAN}, 0.01, plus 0.05: it has other weights"),
    "kept": (Difference(0.01, 0.01, (0.99, 0.97), 0.04), "|dlogp| with kept keys and values 0.04, "
             f"at most 0.03, which is 3 times {MEDIAN}, 0.01, plus 1e-05: its prefix cache is of"),
    "kept routes": (Difference(0.01, 0.01, (0.99, 0.97), 0.0, 0.2), "share of other routes with "
                    "kept keys and values 0.2, at most 0.11, "),
    "NaN": (Difference(float("nan"), 0.0, (1.0, 1.0)), "mean |dlogp| nan, "),
}  # fmt: skip


@pytest.mark.parametrize("name", JUDGED)
def test_a_push_is_judged_by_those_before(name):
    push, words = JUDGED[name]
    found = PushFloor([Difference(0.01, 0.01, (0.99, 0.97))]).judge(push)
    assert len(found) == bool(words)
    assert "".join(found).startswith(words)


def test_the_first_push_has_wide_limits_and_later_ones_are_judged_by_the_median():
    floor = PushFloor()
    assert floor.judge(Difference(0.29, 0.29, (0.51, 0.6))) == []
    assert floor.judge(Difference(0.31, 0.31, (0.49, 0.6))) == [
        f"mean |dlogp| 0.31, at most 0.3, since {MEDIAN} is not known yet: it has other weights, "
        "or computes them wrongly",
        f"share of other routes in MoE layer 0 0.51, at most 0.5, since {MEDIAN} is not known "
        "yet: it has other weights, or computes them wrongly",
    ]
    for shown in (9.0, 0.02, 0.04, 0.01, 0.02, 0.03, 0.01, 0.02, 0.02):  # the first is forgotten
        floor.accept(Difference(shown, shown, (0.9,)))
    assert floor.judge(Difference(0.06, 0.06, (0.9,))) == []
    assert floor.judge(Difference(0.061, 0.061, (0.9,)))


def probes(num_sequences: int = 4, length: int = 8) -> tuple[Probe, Probe]:
    """Two probes of the same tokens that are equal; arrays of their own."""
    shape = (num_sequences, length)

    def one() -> Probe:
        routes = np.tile(np.arange(2, dtype=np.uint16), (1, *shape, 1))
        return Probe(np.zeros(shape, np.int64), np.zeros(shape, np.float32), routes)

    return one(), one()


def test_tokens_after_a_near_tie_are_left_out():
    trainer, sampler = probes()
    sampler.routes_LPNK[0, 1, 4] = [0, 2]  # so the tokens 5 to 7 of sequence 1
    sampler.logprobs_PN[1, 5:] = 0.9
    found = difference(trainer, sampler)
    assert found.abs_dlogp == 0
    assert found.left_out == pytest.approx(3 / 28)
    assert found.abs_dlogp_all == pytest.approx(0.9 * 3 / 28)
    # a token before the tie is counted
    sampler.logprobs_PN[1, 4] = 0.28
    assert difference(trainer, sampler).abs_dlogp == pytest.approx(0.28 / 25)


def test_where_nearly_all_tokens_come_after_other_experts_every_token_is_compared():
    trainer, sampler = probes()
    sampler.routes_LPNK[0, :, 0] = [0, 2]  # so all tokens but the first ones
    sampler.logprobs_PN[:, 2:] = 0.5
    found = difference(trainer, sampler)
    assert found.left_out is None
    assert found.abs_dlogp == pytest.approx(0.5 * 6 / 7)


def test_means_of_the_same_tokens_are_compared():
    """Without the tokens after near ties the mean is far smaller than with them."""
    some = Difference(0.02, 0.05, (0.95,), left_out=0.5)
    every = Difference(0.14, 0.14, (0.95,), left_out=None)
    floor = PushFloor([some])
    assert floor.judge(replace(some, abs_dlogp=0.06)) == []
    assert "at most 0.06, " in floor.judge(replace(some, abs_dlogp=0.061))[0]
    assert floor.judge(every) == []  # 3 times 0.05
    assert "at most 0.15, " in floor.judge(replace(every, abs_dlogp=0.151))[0]
    floor.accept(every)
    assert "at most 0.06, " in floor.judge(replace(some, abs_dlogp=0.061))[0]
    assert PushFloor([every]).judge(replace(some, abs_dlogp=0.4)) == []  # nothing else is known
    assert PushFloor([every]).judge(replace(some, abs_dlogp=0.43))


def test_a_sampler_in_bfloat16_is_accepted_and_swapped_experts_in_it_are_found():
    """It rounds more than the trainer; nearly all tokens come after one with other experts."""
    base, floor, before = tiny_model(), PushFloor(), None
    for version in range(12):
        model = moved(base, 0.05, seed=version)
        trainer, sampler = probe_from(model), probe_from(copy.deepcopy(model).bfloat16())
        shown = difference(trainer, sampler)
        assert floor.judge(shown) == []
        assert before is None or not still_before(sampler, trainer, before)
        floor.accept(shown)
        before = trainer
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    with torch.no_grad():
        experts[[0, 1]] = experts[[1, 0]].clone()
    swapped = probe_from(model.bfloat16())
    assert "mean |dlogp|" in floor.judge(difference(trainer, swapped))[0]


def test_nearer_to_the_policy_before():
    now, before = probes()
    before.logprobs_PN[:, 1:] = 0.02
    sampler, _ = probes()
    for shown, is_before in ((0.0, False), (0.009, False), (0.011, False), (0.013, True)):
        sampler.logprobs_PN[:, 1:] = shown
        assert bool(still_before(sampler, now, before)) == is_before, shown
    sampler.logprobs_PN[:, 1:] = 1e-7
    before.logprobs_PN[:, 1:] = 1e-7
    assert not still_before(sampler, now, before)  # two policies that are the same


def test_a_near_tie_that_goes_as_in_the_policy_before_is_no_load_that_failed():
    """Found in right runs in bfloat16 and float8, stopped at their policies 41 and 26."""
    now, before = probes(num_sequences=8)
    sampler, _ = probes(num_sequences=8)
    before.logprobs_PN[:, 1:] = 0.02  # the policies are 0.02 apart
    before.routes_LPNK[0, 0, 2] = [0, 2]
    before.logprobs_PN[0, 3:] = 1.0  # and far apart after the tie
    sampler.routes_LPNK[0, 0, 2] = [0, 2]  # the sampler has the new weights, and the other expert
    sampler.logprobs_PN[0, 3:] = 1.0
    assert not still_before(sampler, now, before)
    sampler.logprobs_PN[1:, 1:] = 0.02  # with the old weights it is found by the other tokens
    assert still_before(sampler, now, before)
    # where nearly all tokens come after a tie all are compared
    for probe in (before, sampler):
        probe.routes_LPNK[0, :, 0] = [0, 2]
    assert still_before(sampler, now, before)


def test_a_probe_of_other_tokens_is_no_comparison():
    tokens = np.arange(6).reshape(2, 3)
    probe = Probe(tokens, np.zeros((2, 3), np.float32))
    assert difference(probe, probe) == Difference(0.0, 0.0, ())
    with pytest.raises(ValueError, match="other tokens"):
        difference(probe, replace(probe, tokens_PN=tokens + 1))
    assert Probe.from_json(probe.to_json()).tokens_PN.tolist() == tokens.tolist()
