"""Import megatron.bridge where Transformer Engine is not installed; a worker preloads this module.

megatron-bridge requires Transformer Engine, and its LoRA adapters name some of its classes when
they are imported: as a base class (`te.Linear`, 0.3.1) and in annotations (`te.ops.Sequential`).
The adapters of these tests need none of them. The names are there while megatron.bridge is
imported, and are taken away again, so that nothing else believes that Transformer Engine is
installed.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import megatron.core.models.gpt.gpt_model
import megatron.training  # Megatron looks for Transformer Engine when it is imported
import torch


def _names() -> dict[str, ModuleType]:
    """The modules `transformer_engine` and `transformer_engine.pytorch`, with what is named."""
    package = ModuleType("transformer_engine")
    package.__path__ = []
    pytorch = ModuleType("transformer_engine.pytorch")
    pytorch.Linear = type("Linear", (torch.nn.Module,), {})  # type: ignore[attr-defined]
    pytorch.ops = SimpleNamespace(Sequential=torch.nn.Sequential)  # type: ignore[attr-defined]
    package.pytorch = pytorch  # type: ignore[attr-defined]
    return {"transformer_engine": package, "transformer_engine.pytorch": pytorch}


names = _names()
sys.modules.update(names)
try:
    import megatron.bridge  # noqa: F401
finally:
    for name in names:
        del sys.modules[name]
