"""The model that an engine runs, as its transformers directory tells."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megatron_r3.engines.shape import EngineError, ModelShape

__all__ = ["Model", "read_model"]


@dataclass(frozen=True)
class Model:
    """What a store needs to know of a model.

    Attributes:
        name: the folder's.
        shape: its MoE layers.
        router_fingerprint: of its router weights; empty without weights.
        vocab_size: None where the config does not say.
    """

    name: str
    shape: ModelShape
    router_fingerprint: tuple[str, ...]
    vocab_size: int | None


def read_model(path: Path) -> Model:
    """Read a transformers directory, or a config.json alone, which has no weights.

    Raises:
        EngineError: naming the file.
    """
    shape = ModelShape.from_hf_config(path)
    folder = (path if path.is_dir() else path.parent).resolve()
    config = json.loads((path / "config.json" if path.is_dir() else path).read_text("utf-8"))
    vocab_size = config.get("vocab_size")
    return Model(
        folder.name,
        shape,
        _fingerprint(path, shape) if path.is_dir() else (),
        vocab_size if isinstance(vocab_size, int) else None,
    )


def _fingerprint(folder: Path, shape: ModelShape) -> tuple[str, ...]:
    if not any(folder.glob("*.safetensors")):
        return ()
    from megatron_r3.hf import router_fingerprint  # imports torch

    try:
        return router_fingerprint(folder, shape.moe_layers)
    except (ValueError, KeyError) as error:
        what = f"no tensor {error}" if isinstance(error, KeyError) else str(error)
        raise EngineError(
            f"{what}; --model {folder / 'config.json'} goes without a router fingerprint"
        ) from error
