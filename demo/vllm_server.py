"""The command of a real vLLM server on this machine's CPU.

The first run installs vLLM into build/vllm, an environment of its own, because its pinned versions
differ from the trainer's.
"""

from __future__ import annotations

import json
from pathlib import Path

from demo.installation import BUILD
from demo.vllm_install import install

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first requests wait for a C++ compiler
}


def template(
    model: Path, build: Path = BUILD, in_place: bool = False
) -> tuple[list[str], dict[str, str]]:
    """The server's command, and its environment, for any policy that has the shape of a model.

    The caller fills in {model}, {port} and {version} in the command; the version names the policy.

    Args:
        in_place: whether the server shall take new weights. If so, its model has the name `policy`
            at every version, since a running server cannot rename its model.

    Raises:
        ServerError: vLLM cannot be installed.
    """
    config = json.loads((model / "config.json").read_text())
    length = min(1024, int(config.get("max_position_embeddings", 1024)))
    flags = [str(install(build)), "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}"]
    flags += ["--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16"]
    flags += ["--enable-return-routed-experts", "--enforce-eager", "--max-num-seqs", "32"]
    name = "policy" if in_place else "{version}"
    flags += ["--max-model-len", str(length), "--served-model-name", name]
    if not (model / "tokenizer_config.json").exists():
        flags.append("--skip-tokenizer-init")
    return flags, {**ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"} if in_place else ENVIRONMENT
