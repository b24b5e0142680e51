"""A real vLLM on the CPU computes what Megatron wrote of each family, as transformers does.

A transformers directory is read into Megatron and written again in bfloat16. vLLM serves what was
written, in bfloat16. transformers computes the same directory in float32, and in bfloat16 too: how
far these two are apart is the floor, and vLLM may be a little further from float32 than that.

It is run by hand, where MEGATRON_R3_VLLM names a folder that has vLLM: `build` after
`make demo SAMPLER=vllm`. One server takes 15 to 60 s to start on two cores.

Shape suffixes (docs/glossary.md): L.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import call_kimi, move
from once import Once
from published import probe_from
from served_families import SERVED, flipped, kinds_of, make, swap_experts
from transformers import AutoConfig

from demo import vllm_server
from demo.server_process import run_server
from megatron_r3.collect.client import Client
from megatron_r3.collect.generate import load_model
from megatron_r3.data.engines.shape import ModelShape
from megatron_r3.loop.loading import Loader
from megatron_r3.loop.probe import Probe, abs_dlogp, same_experts
from megatron_r3.loop.published import PublishedPolicy, version_name
from megatron_r3.loop.push import Pusher
from megatron_r3.loop.push_floor import PushFloor
from megatron_r3.weights.families import FAMILIES
from proof.fidelity.rig.worker import TreeWorker

# How much further from float32 vLLM may be than transformers in bfloat16 is. A probe has 256
# tokens, so that one near tie more is a share of 0.004.
FACTOR, ROOM_OF_ROUTES = 2.0, 0.03


@pytest.fixture(scope="module")
def build() -> Path:
    """The folder that has vLLM."""
    folder = os.environ.get("MEGATRON_R3_VLLM")
    if folder is None:
        pytest.skip("by hand: MEGATRON_R3_VLLM names no folder with vLLM (docs/models.md)")
    return Path(folder).resolve()


@dataclass(frozen=True)
class Apart:
    """How far one probe is from another one.

    Attributes:
        dlogp: the mean |log-prob difference| over all tokens.
        same_L: of each MoE layer, the share of tokens with the same set of experts.
    """

    dlogp: float
    same_L: tuple[float, ...]

    @classmethod
    def of(cls, one: Probe, other: Probe) -> Apart:
        shares = same_experts(one, other).mean((1, 2)).tolist()
        return cls(float(abs_dlogp(one, other).mean()), tuple(shares))

    def is_at(self, floor: Apart) -> bool:
        """Whether this may be rounding."""
        least = [1 - FACTOR * (1 - share) - ROOM_OF_ROUTES for share in floor.same_L]
        enough = all(a >= b for a, b in zip(self.same_L, least, strict=True))
        return self.dlogp <= FACTOR * floor.dlogp and enough

    def __str__(self) -> str:
        return f"{self.dlogp:.4f} | " + " ".join(f"{100 * share:.1f}" for share in self.same_L)


@dataclass(frozen=True)
class Computed:
    """What transformers computes of a directory.

    Attributes:
        model: in float32.
        exact: its probe.
        floor: how far the probe in bfloat16 is from it.
    """

    path: Path
    model: Any
    exact: Probe
    floor: Apart

    @classmethod
    def of(cls, path: Path) -> Computed:
        model = load_model(path).float()
        exact = probe_from(model)
        return cls(path, model, exact, Apart.of(probe_from(load_model(path)), exact))


@pytest.fixture(scope="module")
def computed(build: Path, patched: TreeWorker, once: Once) -> Any:
    """What transformers computes of a family's model that went through Megatron."""

    def made(name: str) -> Computed:
        def through_megatron(folder: Path) -> None:
            make(name, folder / "made")
            patched.run(move, 1, folder / "made", folder / "float32", timeout_s=120)
            # written as the family of its Megatron model; transformers has no name of Kimi-K2
            if name != "kimi_k2" and FAMILIES[name.split()[0]].by_name:
                config = AutoConfig.from_pretrained(folder / "made", dtype=torch.bfloat16)
                config.save_pretrained(folder / "bfloat16")

        return Computed.of(once(f"served {name}", through_megatron) / "bfloat16")

    return made


def ask_vllm(
    path: Path, exact: Probe, build: Path, log: Path, options: tuple[str, ...] = ()
) -> Probe:
    """Start a vLLM of a directory: what it computes of the tokens of a probe."""
    words, environment = vllm_server.template(path, build)
    values = {"model": str(path), "version": version_name(0)}

    async def compare(url: str) -> Probe:
        client = Client(url, 4, 120, 3, 0.2)
        loader = Loader("vllm", client, in_place=False, command=(), wait_s=60)
        pusher = Pusher(loader, client, ModelShape.from_hf_config(path), PushFloor())
        try:
            served, _ = await pusher._compare(PublishedPolicy(path, 0, 0, {}, exact))
            return served
        finally:
            await client.close()

    with run_server("vLLM", [*words, *options], values, environment, log) as url:
        return asyncio.run(compare(url))


@pytest.mark.parametrize("name", SERVED)
def test_vllm_computes_the_family(build: Path, computed: Any, name: str, tmp_path: Path) -> None:
    ours = computed(name)
    log, options, path = tmp_path / "vllm.log", SERVED[name].options, ours.path
    if name == "kimi_k2":
        call_kimi(path := Path(shutil.copytree(path, tmp_path / name)))
    served = ask_vllm(path, ours.exact, build, log, options)
    shown = Apart.of(served, ours.exact)
    assert shown.is_at(ours.floor), (shown, ours.floor)
    # the control: the same answers are not those of a model with one kind of tensor turned around
    others = {}
    for kind, tensors in kinds_of(ours.model).items():
        with flipped(tensors):
            others[kind] = Apart.of(served, probe_from(ours.model))
    nearest = min(others, key=lambda kind: others[kind].dlogp)
    print(f"\n| {name} | {shown} | {ours.floor} | {others[nearest].dlogp:.4f} {nearest} |")
    assert not [kind for kind, other in others.items() if other.is_at(ours.floor)], others


def test_two_experts_in_each_others_place(build: Path, computed: Any, tmp_path: Path) -> None:
    """The control on the side of the server: it serves a directory with other experts."""
    ours = computed("qwen3_moe")
    model = load_model(ours.path)
    swap_experts(model)
    model.save_pretrained(tmp_path / "swapped")
    served = ask_vllm(tmp_path / "swapped", ours.exact, build, tmp_path / "vllm.log")
    shown = Apart.of(served, ours.exact)
    print(f"\n| two experts swapped | {shown} | {ours.floor} |")
    assert shown.dlogp > 3 * ours.floor.dlogp
    assert Apart.of(served, Computed.of(tmp_path / "swapped").exact).is_at(ours.floor)


def test_vllms_own_rotary_kernel(build: Path, computed: Any, tmp_path: Path) -> None:
    """The control on vLLM's side: its kernel for a CPU turns the pairs of DeepSeek wrongly."""
    ours = computed("deepseek_v3")
    served = ask_vllm(ours.path, ours.exact, build, tmp_path / "vllm.log")
    shown = Apart.of(served, ours.exact)
    print(f"\n| deepseek_v3, vLLM's kernels | {shown} | {ours.floor} |")
    assert shown.dlogp > 3 * ours.floor.dlogp
    assert not shown.is_at(ours.floor)
