"""The command of a real SGLang server on this machine's CPU.

The server takes new weights in place: POST /update_weights_from_disk with the JSON
`{"model_path": DIRECTORY, "weight_version": "7", "flush_cache": true}`. Without `flush_cache` the
keys and routes of the old weights stay in the prefix cache, and a response to a cached prompt mixes
old and new weights.
"""

from __future__ import annotations

import json
from pathlib import Path

from demo.installation import BUILD
from demo.sglang_install import install

CPU = Path(__file__).with_name("sglang_cpu")  # its sitecustomize.py runs in every process
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}
MOST_REQUESTS = 32  # at a time; `rollouts collect` sends as many


def template(
    model: Path, build: Path = BUILD, in_place: bool = True
) -> tuple[list[str], dict[str, str]]:
    """The server's command, and its environment, for any policy that has the shape of a model.

    The caller fills in {model}, {port} and {version} in the command; the version names the policy.

    Args:
        in_place: whether the server shall take new weights. If so, the command names no version,
            and the server reports "default" until weights are loaded: a server that died and was
            started again with old weights cannot be taken for an updated server.

    Raises:
        ServerError: SGLang cannot be installed.
    """
    python, home = install(build)
    config = json.loads((model / "config.json").read_text())
    length = min(1024, int(config.get("max_position_embeddings", 1024)))
    flags = [str(python), "-m", "sglang.launch_server", "--model-path", "{model}"]
    flags += ["--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16"]
    flags += ["--enable-return-routed-experts", "--skip-tokenizer-init"]
    flags += ["--served-model-name", "model", "--context-length", str(length)]
    flags += ["--device", "cpu", "--attention-backend", "torch_native"]
    flags.append("--disable-overlap-schedule")  # a step's results are read before the next step
    # without this an idle scheduler keeps a core busy that a trainer needs
    flags.append("--sleep-on-idle")
    # Every running request has room for its longest response, so none is retracted half-way.
    flags += ["--max-running-requests", str(MOST_REQUESTS)]
    flags += ["--max-total-tokens", str(MOST_REQUESTS * length)]
    # The cache is bounded by --max-total-tokens, not by this share of the memory. The share is high
    # because SGLang also counts the memory that other programs take while SGLang loads, and does
    # not start if it counts more than the share.
    flags += ["--mem-fraction-static", "0.9"]
    if not in_place:
        flags += ["--weight-version", "{version}"]
    return flags, {**ENVIRONMENT, "PYTHONPATH": f"{home}:{CPU}"}
