"""The demo's samplers: what they hand on is what a decoder would accept."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from demo import hf_sampler, vllm_server
from demo.hf_sampler import Prompt
from megatron_r3.engines.conversation import EngineError, read_samples, read_source
from megatron_r3.engines.shape import ModelShape
from megatron_r3.engines.transformers import capture_routes
from tests.unit.engines.test_transformers import qwen
from tests.unit.engines.test_vllm import QWEN, load

PROMPTS = [Prompt([1, 5, 6, 7], 3), Prompt([1, 9], 4), Prompt([1, 30, 31, 32], 9)]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model = qwen(mlp_only_layers=[1]).to(torch.bfloat16)
    model.lm_head.weight.data[2] *= 20  # some responses end early
    model.save_pretrained(path)
    return path


def test_sampled_sequences_are_what_a_full_forward_sees(directory):
    model, shape = hf_sampler.load_model(directory), ModelShape.from_hf_config(directory)
    assert hf_sampler.eos_ids(model) == (2,)
    samples = hf_sampler.sample(model, shape, PROMPTS, 8, 6, seed=1, batch_size=6)
    assert [s.group for s in samples] == [3] * 8 + [4] * 8 + [9] * 8
    lengths = [s.response_length for s in samples]
    assert min(lengths) < 4
    assert max(lengths) == 6
    same = []
    for index, sample in enumerate(samples):
        sample.check(f"sample {index}")
        prompt = PROMPTS[index // 8].tokens
        response = sample.tokens_N[len(prompt) :].tolist()
        assert sample.tokens_N[: len(prompt)].tolist() == prompt
        assert 2 not in response[:-1]
        assert len(response) == 6 or response[-1] == 2
        with torch.inference_mode(), capture_routes(model) as captured:
            tokens = torch.from_numpy(sample.tokens_N)[None].long()
            logits = model(tokens[:, :-1], use_cache=False).logits[0].float()
        logprobs = torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0]
        got = logprobs[len(prompt) - 1 :].numpy()
        assert np.allclose(got, sample.logprobs_G, atol=0.05)
        (ids,) = captured.take()
        same.append((np.sort(ids) == np.sort(sample.routes.ids_LTK)).all(-1).mean())
    assert np.mean(same) > 0.97


def test_same_seed_same_samples_and_the_file(directory, tmp_path):
    lines = [json.dumps({"prompt": prompt.tokens, "group": prompt.group}) for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    arguments = ["--model", str(directory), "--prompts", str(tmp_path / "prompts.jsonl")]
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        out = str(tmp_path / f"{name}.npz")
        assert (
            hf_sampler.main(
                [*arguments, "--n", "3", "--max-new-tokens", "4", "--seed", seed, "--out", out]
            )
            == 0
        )
    files = [(tmp_path / f"{name}.npz").read_bytes() for name in "abc"]
    assert files[0] == files[1]
    assert files[0] != files[2]
    assert len(read_samples(tmp_path / "a.npz")) == 9
    source = read_source(tmp_path / "a.npz")
    assert (source.engine, source.moe_layers, source.topk) == ("transformers", (0, 2), 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "no prompts"), ("{}", "line 1"), ('{"prompt": []}', "empty"), ("x", "line 1")],
)
def test_wrong_prompts_are_refused(tmp_path, text, message):
    (tmp_path / "prompts.jsonl").write_text(text)
    with pytest.raises(EngineError, match=message):
        hf_sampler.read_prompts(tmp_path / "prompts.jsonl")


def test_prompts_outside_the_vocabulary_are_refused(directory):
    model, shape = hf_sampler.load_model(directory), ModelShape.from_hf_config(directory)
    with pytest.raises(EngineError, match="from 0 to 63"):
        hf_sampler.sample(model, shape, [Prompt([64], 0)], 1, 2, seed=0)


class Replay(BaseHTTPRequestHandler):
    """Answers a prompt of the recorded batch with its recorded choice."""

    payload = load(QWEN, "15_batch3_lists")

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        index = self.payload["request"]["prompt"].index(request["prompt"])
        assert (request["temperature"], request["logprobs"]) == (1.0, 1)
        choice = {**self.payload["response"]["choices"][index], "index": 0}
        response = {**self.payload["response"], "choices": [choice], "model": request["model"]}
        body = json.dumps(response).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Replay)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_samples_of_a_server_come_in_the_order_of_the_prompts(url):
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    }
    asked = Replay.payload["request"]["prompt"]
    prompts = [Prompt(tokens, 10 - i) for i, tokens in enumerate(asked)]
    samples = vllm_server.sample(url, config, prompts, 1, 6, seed=0)
    assert [s.prompt_length for s in samples] == [7, 19, 40]
    assert [s.group for s in samples] == [10, 9, 8]
    with pytest.raises(vllm_server.ServerError, match="prompt 0: no answer"):
        vllm_server.sample("http://127.0.0.1:9", config, prompts[:1], 1, 6, seed=0)


STUBBORN = "trap '' TERM; (trap '' TERM; sleep 60) & sleep 60 & wait; wait"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="groups are read from /proc")


def ends(process) -> bool:
    for _ in range(100):
        if not vllm_server._group_lives(process):
            return True
        threading.Event().wait(0.1)
    return False


@on_linux
def test_a_server_is_stopped_with_the_processes_it_started():
    process = subprocess.Popen(["sh", "-c", STUBBORN], start_new_session=True)
    assert vllm_server._group_lives(process)
    with vllm_server._guard(process):
        vllm_server._stop(process, 0.2)
    assert process.returncode is not None
    assert ends(process)


@on_linux
def test_a_server_does_not_outlive_a_sampler_that_was_killed():
    process = subprocess.Popen(["sh", "-c", STUBBORN], start_new_session=True)
    code = """
import os, signal, sys, types
from demo import vllm_server
with vllm_server._guard(types.SimpleNamespace(pid=int(sys.argv[1]))):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert vllm_server._group_lives(process)
    killed = subprocess.run([sys.executable, "-c", code, str(process.pid)], check=False)
    assert killed.returncode == -9
    assert ends(process)
