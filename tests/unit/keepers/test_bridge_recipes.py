"""The table of Megatron-Bridge's recipes, on recipes that are made up; a clone is read by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
RECIPES = """
from megatron.bridge import AutoBridge
from megatron.bridge.peft.base import PEFT
from megatron.bridge.training.config import ConfigContainer

def taken_config(peft=None):
    cfg = ConfigContainer(ddp=None)
    cfg.model = AutoBridge.from_hf_pretrained("a/b").to_megatron_provider(load_weights=False)
    cfg.model.seq_length = 2 * cfg.model.max_length
    cfg.model.moe_flex_dispatcher_backend = None
    cfg.model.moe_permute_fusion = not isinstance(peft, PEFT)
    return cfg

def graph_config():
    cfg = taken_config()
    cfg.model.cuda_graph_impl, cfg.model.cuda_graph_scope = "local", ["moe_router"]
    return cfg

def dense_config():
    cfg = taken_config()
    cfg.model.moe_token_dispatcher_type = None
    return cfg

def broken_config():
    raise NotImplementedError("not yet")
"""


def test_recipes_are_read_without_their_packages(tmp_path: Path) -> None:
    folder = tmp_path / "megatron/bridge/recipes/some"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").write_text(RECIPES)
    argv = [sys.executable, "-m", "keepers.bridge_recipes", str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    refused, last = done.stdout.splitlines()
    assert refused.startswith("graph_config: a CUDA graph that captures the router")
    assert refused.endswith("give --cuda-graph-impl none")
    assert last == "replay takes 1 of 2 recipes as they are"
    assert done.stderr == "not run: broken_config: not yet\n"
