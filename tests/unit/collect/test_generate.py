"""Collecting with transformers in this process, from a tiny model with random weights.

Shape suffixes (docs/glossary.md): K, L, N, T.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from engine_server import write_inputs
from tiny_models import qwen
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_r3.cli import main
from megatron_r3.collect.generate import _choose, _processed, load_model, stop_ids
from megatron_r3.collect.prompt_plan import Sampling
from megatron_r3.data.engines.transformers import capture_routes
from megatron_r3.data.store import RolloutStore

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = {3: [1, 5, 6, 7], 4: [1, 9], 9: [1, 30, 31, 32]}  # by group
STOP = 2


def save_model(folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """The model of these tests; it ends some responses early."""
    model = qwen(mlp_only_layers=[1]).to(dtype)
    model.lm_head.weight.data[STOP] *= 20
    model.save_pretrained(folder)


def write_prompts(folder: Path, lines: list[dict]) -> None:
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def folder(empty_folder):
    write_inputs(empty_folder, 1)
    save_model(empty_folder / "model")
    write_prompts(empty_folder, [{"prompt": ids, "group": g} for g, ids in PROMPTS.items()])
    return empty_folder


def command(n: int, *more: str) -> list[str]:
    arguments = "rollouts collect --engine transformers --model model --prompts prompts.jsonl"
    arguments += " --out store --reward rewards:length --seed 1 --max-tokens 6"
    return [*arguments.split(), "--n", str(n), *more]


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line at the end that was printed."""
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert line.isprintable()
    return line[len("error: ") :]


def rollouts(directory: str = "store") -> dict[tuple[int, int], np.ndarray]:
    store = RolloutStore([directory])
    all_of = [store.rollout(i) for i in range(len(store))]
    return {(rollout.group, rollout.sample): rollout.tokens_N for rollout in all_of}


def test_rollouts_are_what_a_full_forward_pass_sees(folder, capsys):
    assert main(command(8, "--concurrency", "10")) == 0
    assert "store has all 24 rollouts: 0 were there, 24 new" in capsys.readouterr().out
    assert main(["rollouts", "verify", "store", "--model", "model"]) == 0
    assert "model's shape and weights" in capsys.readouterr().out
    store, model = RolloutStore(["store"]), load_model(Path("model"))
    assert (store.info.engine, store.info.engine_version) == (
        "transformers", transformers.__version__,
    )  # fmt: skip
    assert (store.info.moe_layers, store.info.topk) == ((0, 2), 3)
    assert store.info.sampling.unknown_to_the_loss() == []
    assert stop_ids(model) == [STOP]
    lengths, same = [], []
    for index in range(len(store)):
        rollout = store.rollout(index)
        prompt = PROMPTS[rollout.group]
        response = rollout.tokens_N[len(prompt) :].tolist()
        lengths.append(len(response))
        assert rollout.tokens_N[: len(prompt)].tolist() == prompt
        assert STOP not in response[:-1]
        assert len(response) == 6 or response[-1] == STOP
        assert rollout.reward == len(response)
        with torch.inference_mode(), capture_routes(model) as captured:
            tokens = torch.from_numpy(rollout.tokens_N)[None].long()
            logits = model(tokens[:, :-1], use_cache=False).logits[0].float()
        logprobs = torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0]
        assert np.allclose(
            logprobs[len(prompt) - 1 :], rollout.logprobs_N[len(prompt) :], atol=0.05
        )
        (ids,) = captured.take()
        same.append((np.sort(ids) == np.sort(rollout.routes.ids_LTK)).all(-1).mean())
    assert min(lengths) < 4
    assert max(lengths) == 6
    assert np.mean(same) > 0.97


def test_a_seed_gives_the_same_samples_in_any_batches_and_after_a_resume(folder, capsys):
    """In float32: in bfloat16 the rounding of another batch may choose another token."""
    save_model(folder / "model", torch.float32)
    assert main(command(6)) == 0
    assert main(command(6, "--out", "alone", "--concurrency", "1")) == 0
    assert main(command(6, "--out", "other", "--seed", "2")) == 0
    assert main(command(2, "--out", "resumed")) == 0
    capsys.readouterr()
    assert main(command(6, "--out", "resumed")) == 0
    assert "resumed has all 18 rollouts: 6 were there, 12 new" in capsys.readouterr().out
    first = rollouts()
    for directory, equal in (("alone", True), ("resumed", True), ("other", False)):
        again = rollouts(directory)
        assert again.keys() == first.keys()
        assert all(np.array_equal(again[key], first[key]) for key in first) == equal


def save_tokenizer(folder: Path) -> None:
    """A tokenizer with a word for each token id: w3, w4, ..."""
    vocabulary = {f"w{i}": i for i in range(64)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w63"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "w1 {% for m in messages %}{{ m.content }} {% endfor %}"
    template += "{% if add_generation_prompt %}w8{% endif %}"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, chat_template=template, eos_token="w2"
    ).save_pretrained(folder)


def test_texts_and_chats_go_through_the_models_tokenizer(folder):
    save_tokenizer(folder / "model")
    (folder / "rewards.py").write_text(
        "def length(sample):\n"
        "    words = [f'w{i}' for i in sample.response_tokens if i != 2]\n"
        "    assert sample.response_text == ' '.join(words), sample\n"
        "    assert sample.finish_reason == ('stop' if 2 in sample.response_tokens else 'length')\n"
        "    return 1\n"
    )
    chat = [{"role": "user", "content": "w5 w6"}]
    write_prompts(folder, [{"prompt": "w4 w5"}, {"messages": chat}])
    assert main(command(3)) == 0
    prompts = {(group, tuple(tokens[:4])) for (group, _), tokens in rollouts().items()}
    assert {tokens[:2] for group, tokens in prompts if group == 0} == {(4, 5)}
    assert {tokens for group, tokens in prompts if group == 1} == {(1, 5, 6, 8)}


@pytest.mark.parametrize(
    ("prompt", "more", "message"),
    [
        ("text", "", "prompts.jsonl, line 2: model has no tokenizer; give `prompt` as token ids"),
        ([1, 64], "", "prompts.jsonl, line 2: prompt token 1 is id 64; ids go from 0 "),
        ([1], "--url http://x", "--engine transformers samples in this process: leave --url out"),
        ([1], "--engine vllm", "--engine vllm asks a server: give its address as --url"),
    ],
)
def test_what_cannot_be_asked_for(folder, capsys, prompt, more, message):
    write_prompts(folder, [{"prompt": [1]}, {"prompt": prompt}])
    assert main(command(1, *more.split())) == 1
    assert error_of(capsys).startswith(message)
    assert not Path("store").exists()


@pytest.mark.parametrize("wrong", ["no weights", "other layers"])
def test_a_model_that_cannot_be_used(folder, capsys, wrong):
    if wrong == "no weights":
        (folder / "model" / "model.safetensors").unlink()
        expected = "model: transformers cannot load it: "
    else:
        config = json.loads((folder / "model" / "config.json").read_text())
        config["model_type"], config["architectures"] = "mixtral", ["MixtralForCausalLM"]
        (folder / "model" / "config.json").write_text(json.dumps(config))
        expected = "model"
    assert main(command(1)) == 1
    assert error_of(capsys).startswith(expected)
    assert not Path("store").exists()


def test_routers_in_other_layers_than_the_config_says(folder, capsys, monkeypatch):
    from megatron_r3.collect import generate

    dense = qwen(mlp_only_layers=[0]).to(torch.bfloat16)
    monkeypatch.setattr(generate, "load_model", lambda directory: dense)
    assert main(command(1)) == 1
    expected = "model: transformers has routers in layers [1, 2]; config.json says [0, 2]"
    assert error_of(capsys) == expected


def test_a_model_that_fails_is_given_up(folder, capsys):
    """NaN weights: every log-prob is NaN, and no rollout of it is stored."""
    model = qwen(mlp_only_layers=[1]).to(torch.bfloat16)
    model.lm_head.weight.data[:] = float("nan")
    model.save_pretrained(folder / "model")
    assert main(command(2)) == 1
    error = capsys.readouterr().err
    assert "not stored: prompts.jsonl, line 1, sample 0: transformers failed: " in error
    assert (
        "store has 0 of 6 rollouts: samples given up: 6; the same command tries them again" in error
    )
    assert "Traceback" not in error
    assert not Path("store").exists()


SIGNAL = """
import os, signal
calls = []
def length(sample):
    calls.append(sample)
    if len(calls) == 20:
        os.kill(os.getpid(), signal.SIGTERM)
    return len(sample.response_tokens)
"""


@pytest.mark.slow
def test_a_signal_stores_whole_groups(folder):
    (folder / "rewards.py").write_text(SIGNAL)
    write_prompts(folder, [{"prompt": [1, 5, 6 + i]} for i in range(30)])
    words = [sys.executable, "-m", "megatron_r3.cli", *command(4, "--concurrency", "16")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 128 + 15, done.stderr
    have = len(RolloutStore(["store"]))
    assert 4 <= have < 120
    assert have % 4 == 0
    assert done.stderr.splitlines() == [
        f"interrupted; store has {have} of 120 rollouts: run the same command again for the rest"
    ]


def frequencies(sampling: Sampling, probabilities: list[float]) -> list[float]:
    """How often each token is chosen by evenly spread draws."""
    draws = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    logits = torch.tensor(probabilities).log().expand(1000, -1)
    chosen = _choose(_processed(logits, sampling), sampling, draws)
    return (torch.bincount(chosen, minlength=len(probabilities)) / 1000).tolist()


def test_tokens_are_chosen_by_their_probabilities():
    some = [0.2, 0.0, 0.5, 0.3]
    assert frequencies(Sampling(1), some) == pytest.approx(some, abs=2e-3)
    assert frequencies(Sampling(1, temperature=0), some) == [0, 0, 1, 0]
    hot = np.sqrt(some) / np.sqrt(some).sum()
    assert frequencies(Sampling(1, temperature=2), some) == pytest.approx([*hot], abs=2e-3)
    of_two = [0, 0, 5 / 8, 3 / 8]
    assert frequencies(Sampling(1, top_k=2), some) == pytest.approx(of_two, abs=2e-3)
    assert frequencies(Sampling(1, top_p=0.6), some) == pytest.approx(of_two, abs=2e-3)
    assert frequencies(Sampling(1, top_p=0.5), some) == [0, 0, 1, 0]
    assert frequencies(Sampling(1, top_k=9), some) == pytest.approx(some, abs=2e-3)
    last = torch.tensor([1 - 2**-53], dtype=torch.float64)
    for probabilities in ([0.1] * 10, [1 / 3] * 3, [0.5, 0.5, 0.0]):
        logits = torch.tensor([probabilities]).log()
        (chosen,) = _choose(_processed(logits, Sampling(1)), Sampling(1), last)
        assert probabilities[int(chosen)] > 0
