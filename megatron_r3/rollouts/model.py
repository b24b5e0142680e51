"""The model that an engine runs, as its transformers directory tells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_r3.engines.shape import EngineError, ModelShape
from megatron_r3.fingerprint import policy_stamp, router_fingerprint

__all__ = ["Model", "read_model"]


@dataclass(frozen=True)
class Model:
    """What a store needs to know of a model.

    Attributes:
        name: the folder's.
        shape: its MoE layers.
        router_fingerprint: of its router weights; empty without weights.
        vocab_size: None where the config does not say.
        policy_stamp: of all its weights; empty without weights.
    """

    name: str
    shape: ModelShape
    router_fingerprint: tuple[str, ...]
    vocab_size: int | None
    policy_stamp: str = ""


def read_model(path: Path) -> Model:
    """Read a transformers directory, or a config.json alone, which has no weights.

    Raises:
        EngineError: naming the file.
    """
    folder = (path if path.is_dir() else path.parent).resolve()
    shape = ModelShape.from_hf_config(path)
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        return Model(folder.name, shape, (), shape.vocab_size)
    try:
        routers = router_fingerprint(path, shape.moe_layers)
        return Model(folder.name, shape, routers, shape.vocab_size, policy_stamp(path))
    except ValueError as error:
        raise EngineError(
            f"{error}; --model {path / 'config.json'} goes without a router fingerprint"
        ) from error
