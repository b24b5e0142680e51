"""Collecting under top-p and top-k: kept sets are asked for, stored, and demanded of a server.

Shape suffixes (docs/glossary.md): N.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_server import PROMPTS, answer, command, engine, write_inputs
from stored import header_of, rewrite_header

from megatron_r3.cli import main
from megatron_r3.collect.generate import load_model
from megatron_r3.collect.prompt_plan import Sampling, sampling_for
from megatron_r3.data.store import RolloutStore
from tests.unit.collect.test_generate import PROMPTS as TINY_PROMPTS
from tests.unit.collect.test_generate import command as sampled
from tests.unit.collect.test_generate import save_model, write_prompts
from tests.unit.collect.test_prompts import generate as plain
from tests.unit.collect.test_server import SERVER_INFO, sglang

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(empty_folder):
    write_inputs(empty_folder, 3)
    return empty_folder


# -- transformers


@pytest.fixture
def tiny(empty_folder):
    write_inputs(empty_folder, 1)
    save_model(empty_folder / "model", torch.float32)
    lines = [{"prompt": ids, "group": g} for g, ids in TINY_PROMPTS.items()]
    write_prompts(empty_folder, lines)
    return empty_folder


def by_hand(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> dict[int, float]:
    """The log-probs of the tokens that are kept, by sorting: one token after the other.

    This is written apart from the sampler: in numpy, and from the definitions alone.
    """
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled)
    if top_k:
        order = order[:top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    kept, mass = [], 0.0
    for token, share in zip(order.tolist(), weights / weights.sum(), strict=True):
        kept.append(token)
        mass += share
        if mass >= top_p:
            break
    total = np.log(np.exp(scaled[kept] - scaled[order[0]]).sum()) + scaled[order[0]]
    return {token: float(scaled[token] - total) for token in kept}


def logits_of(model: Any, rollout: Any) -> np.ndarray:
    """float32, `[N - 1, vocabulary]`, from one pass over the whole sequence."""
    with torch.inference_mode():
        tokens = torch.from_numpy(rollout.tokens_N)[None, :-1].long()
        return model(tokens, use_cache=False).logits[0].float().numpy()


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(0.7, 0.8, 0), (1.3, 1.0, 5), (0.6, 0.9, 12), (1.0, 0.5, 3)]
)
def test_kept_sets_and_log_probs_are_those_of_the_logits(tiny, temperature, top_p, top_k):
    options = ["--temperature", temperature, "--top-p", top_p, "--top-k", top_k]
    assert main(sampled(6, *map(str, options))) == 0
    assert main(["rollouts", "verify", "store", "--model", "model"]) == 0
    store, model = RolloutStore(["store"]), load_model(Path("model"))
    sampling = store.info.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (temperature, top_p, top_k)
    assert sampling.logprobs_of == "processed"
    furthest, raw_differs, sizes = 0.0, 0.0, set()
    for index in range(len(store)):
        rollout = store.rollout(index)
        logits = logits_of(model, rollout)
        for token in np.flatnonzero(rollout.response_N).tolist():
            expected = by_hand(logits[token - 1], temperature, top_p, top_k)
            assert rollout.kept.of(token).tolist() == sorted(expected)
            own, stored = int(rollout.tokens_N[token]), float(rollout.logprobs_N[token])
            furthest = max(furthest, abs(stored - expected[own]))
            raw = torch.log_softmax(torch.from_numpy(logits[token - 1]), -1)[own].item()
            raw_differs = max(raw_differs, abs(stored - raw))
            sizes.add(len(expected))
    assert furthest < 1e-5
    assert raw_differs > 0.1  # control: the log-probs of the whole distribution are others
    assert max(sizes) > 1


def test_inspect_compares_the_cut_distribution_with_the_model(tiny, capsys):
    options = ["--temperature", "0.6", "--top-p", "0.9", "--top-k", "12"]
    assert main(sampled(4, *options)) == 0
    capsys.readouterr()
    agreement = ["rollouts", "inspect", "store", "--model", "model", "--json"]
    assert main(agreement) == 0
    (measured,) = json.loads(capsys.readouterr().out)
    assert measured["agreement"]["abs_dlogp"] < 1e-5
    assert main([*sampled(4), "--out", "raw"]) == 0
    path = Path("raw/shard-00000.safetensors")  # control: raw log-probs called processed
    body = header_of(path)
    body["info"]["sampling"] |= {"temperature": 0.6, "logprobs_of": "processed"}
    rewrite_header(path, body)
    capsys.readouterr()
    assert main(["raw" if word == "store" else word for word in agreement]) == 0
    (measured,) = json.loads(capsys.readouterr().out)
    assert measured["agreement"]["abs_dlogp"] > 0.05


def test_a_temperature_alone_has_log_probs_of_it_and_no_sets(tiny):
    assert main(sampled(4, "--temperature", "0.5")) == 0
    store, model = RolloutStore(["store"]), load_model(Path("model"))
    assert store.info.sampling.logprobs_of == "processed"
    for index in range(len(store)):
        rollout = store.rollout(index)
        assert rollout.kept is None
        scaled = torch.log_softmax(torch.from_numpy(logits_of(model, rollout)) / 0.5, -1)
        own = scaled.gather(1, torch.from_numpy(rollout.tokens_N[1:, None]).long())[:, 0].numpy()
        assert np.abs(own - rollout.logprobs_N[1:])[rollout.response_N[1:]].max() < 1e-5


def test_a_collection_goes_on_with_the_same_sampling_only(tiny, capsys):
    assert main(sampled(2, "--top-k", "4")) == 0
    assert main(sampled(4, "--top-k", "4")) == 0
    assert len(RolloutStore(["store"])) == 12
    capsys.readouterr()
    assert main(sampled(6)) == 1
    assert "logprobs_of 'processed' there" in capsys.readouterr().err


# -- servers


def masked_vllm(body: dict[str, Any]) -> dict[str, Any]:
    """The recorded response as /inference/v1/generate of 0.32 would give it, with masks."""
    response = answer({**body, "prompt": body["token_ids"], **body["sampling_params"]})
    (choice,) = response["choices"]
    masks = [sorted({token, (token + 7) % 512}) for token in choice["token_ids"]]
    return {**response, "choices": [{**choice, "sampling_mask": masks}]}


def test_vllm_is_asked_for_masks_on_the_endpoint_that_has_them(folder):
    options = ["--temperature", "0.5", "--top-p", "0.9", "--top-k", "7"]
    with engine(answer=masked_vllm) as server:
        assert main(command(server.url, 2, *options)) == 0
    asked = server.bodies[0]
    assert asked["path"] == "/inference/v1/generate"
    assert (asked["model"], asked["output_mode"]) == ("served", "text")
    params = asked["sampling_params"]
    assert {name: params[name] for name in ("temperature", "top_p", "top_k", "min_p", "n")} == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.0, "n": 1,
    }  # fmt: skip
    store = RolloutStore(["store"])
    store.verify()
    assert store.info.sampling.logprobs_of == "processed"
    for index in range(len(store)):
        rollout = store.rollout(index)
        for token in np.flatnonzero(rollout.response_N).tolist():
            own = int(rollout.tokens_N[token])
            assert rollout.kept.of(token).tolist() == sorted({own, (own + 7) % 512})


def unmasked_vllm(body: dict[str, Any]) -> dict[str, Any]:
    response = masked_vllm(body)
    del response["choices"][0]["sampling_mask"]
    return response


def test_a_vllm_server_without_masks_is_refused(folder, capsys):
    with engine(answer=unmasked_vllm) as server:
        assert main(command(server.url, 1, "--top-k", "7", "--refused-retries", "0")) == 1
    error = capsys.readouterr().err
    assert "the response has no sampling mask: start the server with --enable-scale-out " in error
    assert "--return-sampling-mask --logprobs-mode processed_logprobs" in error
    assert not Path("store").exists()


def test_vllm_returns_masks_for_token_ids_alone(folder, capsys):
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "a text"}) + "\n")
    with engine(answer=masked_vllm) as server:
        assert main(command(server.url, 1, "--top-k", "7")) == 1
        assert not server.asked
    assert "vLLM returns kept sets for prompts of token ids alone" in capsys.readouterr().err


def generate(body: dict[str, Any]) -> dict[str, Any]:
    """SGLang 0.5.23: masks where they are asked for."""
    response = plain(body)
    if body.get("return_sampling_mask"):
        sampled_ids = response["output_ids"]
        response["meta_info"] |= {
            "output_token_sampling_mask": [[token, 3] for token in sampled_ids],
            "output_token_sampling_logprobs": [-0.25] * len(sampled_ids),
        }
    return response


def test_sglang_is_asked_for_masks(folder):
    with engine(answer=generate, pages={"/server_info": SERVER_INFO}) as server:
        assert sglang(server, "--top-p", "0.9", "--temperature", "0.5", "--top-k", "9") == 0
    assert server.bodies[0]["return_sampling_mask"] is True
    store = RolloutStore(["store"])
    store.verify()
    rollout = store.rollout(0)
    assert rollout.logprobs_N[rollout.response_N].tolist() == [-0.25] * 3
    assert rollout.kept.of(len(PROMPTS[0])).tolist() == [3, 11]


def test_an_sglang_server_without_masks_is_refused(folder, capsys):
    with engine(answer=plain, pages={"/server_info": SERVER_INFO}) as server:
        assert sglang(server, "--top-k", "9", "--refused-retries", "0") == 1
        assert "the response has no sampling mask: SGLang 0.5.23" in capsys.readouterr().err
        assert sglang(server, "--temperature", "0.9", "--top-p", "0.9") == 1
        assert "SGLang's are of this temperature, or of temperature 1 if the server has " in (
            capsys.readouterr().err
        )
        assert sglang(server) == 0  # control: plain sampling needs no masks
    assert "return_sampling_mask" not in server.bodies[-1]


def test_what_each_engine_is_asked_for():
    plain, cut = Sampling(9), Sampling(9, temperature=0.5, top_k=5)
    for name in ("vllm", "sglang", "transformers"):
        assert sampling_for(name, plain) is plain
        assert sampling_for(name, cut).wants_kept
        with pytest.raises(ValueError, match="temperature 0: the likeliest token is taken"):
            sampling_for(name, Sampling(9, temperature=0))
