"""What ranks do in tests/clients/test_bridge_weights.py: move weights through a bridge.

Megatron and the bridges are imported only inside the functions.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from family_models import Computed, build, compute_in_megatron

FLOAT32 = torch.float32


def move_both_ways(
    rank: int, bridge: str, folder: Path, out: Path, more: tuple[str, ...] = ()
) -> Computed:
    """Read a directory through a bridge, compute, and write the model through it and by ourselves.

    `out` gets the folders bridge, own, bfloat16, own-bfloat16, and changed, where a weight of the
    last rank was changed before.
    """
    from megatron_r3.weights.bridge import chosen_family
    from megatron_r3.weights.families import FAMILIES
    from megatron_r3.weights.write_policy import read_policy, write_policy

    models, args = build(folder, more)
    family = chosen_family(bridge, folder, models)
    read_policy(models, folder, family, vocab_size=args.vocab_size)
    computed = compute_in_megatron(models)

    def write(name: str, by: Any, dtype: torch.dtype = FLOAT32) -> None:
        write_policy(models, out / name, by, folder, dtype, vocab_size=args.vocab_size)

    for dtype, suffix in ((FLOAT32, ""), (torch.bfloat16, "bfloat16")):
        write(suffix or "bridge", family, dtype)
        if family.model_type in FAMILIES:
            write("-".join(filter(None, ("own", suffix))), None, dtype)
    if rank == torch.distributed.get_world_size() - 1:
        with torch.no_grad():
            changed_in(models).view(-1)[0] += 1
    write("changed", family)
    return computed


def changed_in(models: list[Any]) -> torch.Tensor:
    """A weight that no other rank holds in the layouts of the test."""
    layer = models[-1].decoder.layers[-1]
    if layer.config.tensor_model_parallel_size > 1 or not hasattr(layer.mlp, "experts"):
        weight: torch.Tensor = layer.self_attention.linear_proj.weight
    else:
        weight = layer.mlp.experts.local_experts[-1].linear_fc2.weight
    return weight


def library_export(rank: int, folder: Path, more: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """What Megatron-Bridge's own export gives of a model that was read through it."""
    from megatron.bridge import AutoBridge

    from megatron_r3.weights.bridge import chosen_family
    from megatron_r3.weights.write_policy import read_policy

    models, args = build(folder, more)
    family = chosen_family("megatron-bridge", folder, models)
    read_policy(models, folder, family, vocab_size=args.vocab_size)
    bridge = AutoBridge.from_hf_pretrained(folder)  # without weights it does not export
    exported = bridge.export_hf_weights(models, cpu=True, show_progress=False)
    return {name: tensor.clone() for name, tensor in exported}


def refusals(
    rank: int, bridge: str, folder: Path, others: list[Path], more: tuple[str, ...] = ()
) -> list[str]:
    """What the model of `folder` says of other directories; it stays as it was if it refuses."""
    from megatron_r3.weights.bridge import chosen_family
    from megatron_r3.weights.write_policy import read_policy

    models, args = build(folder, more)
    before = [parameter.clone() for parameter in models[0].parameters()]
    said = []
    for other in others:
        try:
            family = chosen_family(bridge, other, models)
            read_policy(models, other, family, vocab_size=args.vocab_size)
            said.append("")
        except ValueError as error:
            said.append(str(error))
            after = models[0].parameters()
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    return said


def wrong_translations(rank: int, bridge: str, folder: Path, out: Path) -> list[str]:
    """What writing says where a bridge rounds, swaps or loses a tensor."""
    from megatron_r3.weights.bridge import chosen_family
    from megatron_r3.weights.bridge_family import BridgeFamily
    from megatron_r3.weights.write_policy import write_policy

    models, args = build(folder)
    said = []
    for change in WRONG:
        family = chosen_family(bridge, folder, models)
        assert isinstance(family, BridgeFamily)
        translator = family._translator
        translator.to_hf = WRONG[change](translator.to_hf)  # type: ignore[method-assign]
        try:
            write_policy(models, out, family, folder, FLOAT32, vocab_size=args.vocab_size)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def _rounds(to_hf: Any) -> Any:
    return lambda name, whole: {n: t.bfloat16().float() for n, t in to_hf(name, whole).items()}


def _swaps(to_hf: Any) -> Any:
    def swapped(name: str, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        found = to_hf(name, whole)
        return dict(zip(found, reversed(found.values()), strict=True))

    return swapped


def _loses(to_hf: Any) -> Any:
    return lambda name, whole: dict(list(to_hf(name, whole).items())[1:])


WRONG = {"rounds": _rounds, "swaps": _swaps, "loses": _loses}


def script(rank: int, argv: list[str]) -> Any:
    """megatron_r3/weights/hf.py: what it ends with, or None."""
    from megatron_r3.weights import hf

    sys.argv = ["hf.py", *argv]
    try:
        hf.main()
    except SystemExit as ended:
        return ended.code
    return None
