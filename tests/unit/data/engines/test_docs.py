"""The Python code in docs/engines.md runs.

Shape suffixes (docs/glossary.md): K, L, T.
"""

import json
import re
from pathlib import Path

import engine_bodies as made
import pytest
import torch
from tiny_models import qwen

from megatron_r3.data.rollout import Rollout
from megatron_r3.data.store import RolloutStore

PAGE = Path(__file__).parents[4] / "docs" / "engines.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
HOOKS = next(block for block in BLOCKS if "capture_routes" in block)
BLOCKS.remove(HOOKS)
CONFIG = {
    "model_type": "qwen3_moe",
    "mlp_only_layers": [0, 3],
    "num_hidden_layers": made.HIDDEN,
    "num_experts": made.EXPERTS,
    "num_experts_per_tok": made.TOPK,
}


@pytest.mark.parametrize("block", BLOCKS, ids=("store", "own", "turns"))
def test_the_examples(tmp_path, monkeypatch, block):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    response, request = made.vllm(made.made_rows())
    names = {
        "response": response,
        "request": request,
        "exchanged": [(request, response)],
        "shape": made.SHAPE,
        "score": lambda rollout: 1.0,
    }
    exec(block, names)
    rollout = names["rollouts"][0] if "rollouts" in names else names["rollout"]
    assert isinstance(rollout, Rollout)
    assert rollout.wrong_parts() is None
    if (tmp_path / "rollouts").exists():
        stored = RolloutStore([tmp_path / "rollouts"]).rollout(0)
        assert (stored.reward, stored.group, stored.policy_version) == (1.0, 7, 3)
        assert (stored.routes.ids_LTK == rollout.routes.ids_LTK).all()


def test_the_example_of_hooks():
    names = {"model": qwen(), "input_ids": torch.tensor([[5, 9, 7], [3, 8, 4]])}
    exec(HOOKS, names)
    assert names["ids_LTK"].shape == (3, 6, 3)
    assert names["captured"].moe_layers == (0, 1, 2)
