"""Published policies and a whole run's config for tests, from tiny random models.

Shape suffixes (docs/glossary.md): N, M.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import qwen

from megatron_r3.collect.generate import load_model
from megatron_r3.data.digest import file_digest
from megatron_r3.data.engines.transformers import capture_routes
from megatron_r3.loop.embedded import EmbeddedSampler, server
from megatron_r3.loop.probe import Probe, probe_tokens
from megatron_r3.loop.published import MANIFEST, PublishedPolicy, version_name

VOCABULARY = 64


def save_model(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
    """A tiny Qwen3-MoE with a dense layer between two MoE layers.

    Two seeds give models whose weights are some 5 % apart, as policies of one training are close.
    """
    save_changed(qwen(mlp_only_layers=[1]), folder, seed, dtype)


def save_changed(model: Any, folder: Path, seed: int, dtype: torch.dtype) -> None:
    """Write a transformers model with 5 % of noise on its weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(0.05 * weight.std(correction=0).clamp_min(0.02) * noise)
    model.to(dtype).save_pretrained(folder)


def probe_of(folder: Path) -> Probe:
    """What transformers computes on the probe's tokens: it stands in for the trainer's probe."""
    return probe_from(load_model(folder))


def probe_from(model: Any) -> Probe:
    """The same of a model that is loaded already."""
    tokens_MN = probe_tokens(model.config.vocab_size, 32)
    with torch.inference_mode(), capture_routes(model) as captured:
        logits = model(torch.from_numpy(tokens_MN), use_cache=False).logits.float()
    (ids,) = captured.take()
    logprobs_MN = np.zeros(tokens_MN.shape, np.float32)
    following = torch.from_numpy(tokens_MN[:, 1:, None])
    values = torch.log_softmax(logits[:, :-1], -1).gather(2, following)[..., 0]
    logprobs_MN[:, 1:] = values.numpy()
    routes = ids.numpy().astype(np.uint16).reshape(len(ids), *tokens_MN.shape, -1)
    return Probe(tokens_MN, logprobs_MN, routes)


def publish(policies: Path, version: int, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """Publish a random model as a version."""
    folder = policies / version_name(version)
    save_model(folder, seed, dtype)
    return add_manifest(folder, version)


def add_manifest(folder: Path, version: int) -> Path:
    """Make a policy of a transformers directory."""
    files = {path.name: file_digest(path) for path in sorted(folder.iterdir())}
    made = PublishedPolicy(folder, version, version, files, probe_of(folder))
    (folder / MANIFEST).write_text(made.to_json())
    return folder


@contextmanager
def served(sampler: EmbeddedSampler | None = None, port: int = 0) -> Iterator[str]:
    """The embedded sampler in a thread of this process; yields its address."""
    made = server(sampler or EmbeddedSampler(), "127.0.0.1", port)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_address[1]}"
    finally:
        made.shutdown()
        made.server_close()
        thread.join()


CONFIG = """
[run]
directory = "run"
collections = {collections}
seed = 5
wait = 20

[policy]
model = "run/policies/v000000"
checkpoint = "checkpoint"

[sampler]
port = {port}
max_tokens = 6

[prompts]
file = "prompts.jsonl"
per_collection = 4
samples = 3
reward = "rewards:length"

[trainer]
megatron = "megatron"
arguments = ["--bf16 --global-batch-size 12"]
"""


def make_tree(tree: Path) -> None:
    """What a config asks of a patched tree before anything is started."""
    for package in ("core", "training"):
        (tree / "megatron" / package).mkdir(parents=True, exist_ok=True)
    patched = tree / "megatron" / "training" / "training.py"
    patched.write_text("from megatron_r3.seams.pretrain import use_rollouts\n")


def write_run(folder: Path, port: int, collections: int = 3, more: str = "") -> Path:
    """A run's config, its prompts and its reward; the path of the config."""
    (folder / "rewards.py").write_text("def length(s):\n    return sum(s.response_tokens) % 7\n")
    (folder / "checkpoint").mkdir(exist_ok=True)
    make_tree(folder / "megatron")
    rng = np.random.default_rng(0)
    lines = [
        {"prompt": rng.integers(3, VOCABULARY, rng.integers(3, 6)).tolist(), "group": i}
        for i in range(6)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = folder / "run.toml"
    file.write_text(CONFIG.format(port=port, collections=collections) + more)
    return file
