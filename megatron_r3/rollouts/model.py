"""The model that an engine runs, as its transformers directory tells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_r3.engines.shape import EngineError, ModelShape
from megatron_r3.fingerprint import policy_stamp, router_fingerprint
from megatron_r3.untrusted import one_line, read_json
from megatron_r3.values import MOST_TOKEN_ID

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
    vocab_size = _vocab_size(path / "config.json" if path.is_dir() else path)
    shape = ModelShape.from_hf_config(path)
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        return Model(folder.name, shape, (), vocab_size)
    try:
        routers = router_fingerprint(path, shape.moe_layers)
        return Model(folder.name, shape, routers, vocab_size, policy_stamp(path))
    except ValueError as error:
        raise EngineError(
            f"{error}; --model {path / 'config.json'} goes without a router fingerprint"
        ) from error


def _vocab_size(path: Path) -> int | None:
    """Rows of the model's output layer, as its config says."""
    try:
        config = read_json(path.read_bytes(), str(path))
    except (OSError, ValueError) as error:
        raise EngineError(f"{path}: not a readable model config ({error})") from error
    if not isinstance(config, dict):
        raise EngineError(f"{path}: a model config is a JSON object")
    value = config.get("vocab_size")
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= MOST_TOKEN_ID:
        raise EngineError(
            f"{path}: `vocab_size` is a whole number from 1 on; got {one_line(repr(value), 40)}"
        )
    return value
