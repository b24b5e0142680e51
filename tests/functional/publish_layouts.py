"""The tiny GPT MoE in any layout, written and read as a transformers directory by its ranks.

Megatron is imported only inside the functions.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from demo.task import VOCAB_SIZE
from megatron_r3.data.digest import file_digest
from proof.fidelity import tiny
from proof.fidelity.tiny import make_chunks

# Less than the model has rows for: the last rows of the vocabulary are padding.
VOCABULARY = 61

Layout = tuple[int, dict[str, int]]  # ranks, sizes of Megatron's process groups
TP2 = {"tensor_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
DENSE = {"moe_layer_freq": [0, 1, 1, 1]}
LAYOUTS: dict[str, Layout] = {
    "EP2": (2, EP2),
    "PP2": (2, PP2),
    "PP2xEP2": (4, {**PP2, **EP2}),
    "PP2xVPP2": (2, {**PP2, **VPP2}),
    "TP2xEP2, ETP 1": (2, {**TP2, **EP2}),
}


def save(rank: int, checkpoint: Path, policy: Path, options: dict[str, Any]) -> None:
    """In one process: random weights as Megatron's distributed checkpoint, and as a policy.

    Args:
        options: more of the config.
    """
    from megatron.core import dist_checkpointing

    from megatron_r3.weights.write_policy import write_policy

    models = make_chunks({}, **options)
    with torch.no_grad():
        for name, parameter in models[0].named_parameters():
            values = parameter + 0.1 * torch.randn_like(parameter)
            parameter.copy_(values.bfloat16())  # a policy in bfloat16 has these values as they are
            if "word_embeddings" in name or "output_layer" in name:
                parameter[VOCABULARY:] = 0  # as padding is read
    checkpoint.mkdir()
    dist_checkpointing.save({"0": models[0].sharded_state_dict()}, str(checkpoint))
    write_policy(models, policy, vocab_size=VOCABULARY)


def load(models: list[Any], checkpoint: Path) -> None:
    """Megatron's own way from the checkpoint into the chunks of any layout."""
    from megatron.core import dist_checkpointing

    wanted = {str(number): model.sharded_state_dict() for number, model in enumerate(models)}
    loaded = dist_checkpointing.load(wanted, str(checkpoint))
    for number, model in enumerate(models):
        model.load_state_dict(loaded[str(number)], strict=False)


def write_and_read(
    rank: int,
    sizes: dict[str, int],
    options: dict[str, Any],
    checkpoint: Path,
    policy: Path,
    out: Path,
) -> tuple[bool, bool]:
    """Write what Megatron loaded as `out`; then read `policy` over other weights.

    Returns:
        Whether the weights read are those that Megatron loaded; and, as a control, whether they
        were the same before.
    """
    from megatron_r3.weights.write_policy import read_policy, write_policy

    models = make_chunks(sizes, **options)
    load(models, checkpoint)
    loaded = [parameter.detach().clone() for model in models for parameter in model.parameters()]
    write_policy(models, out, vocab_size=VOCABULARY)
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter.add_(1)

    def equal() -> bool:
        parameters = (parameter for model in models for parameter in model.parameters())
        return all(torch.equal(a, b) for a, b in zip(parameters, loaded, strict=True))

    before = equal()
    read_policy(models, policy)
    return equal(), before


def write_changed(rank: int, sizes: dict[str, int], policy: Path, out: Path, change: str) -> str:
    """Write the policy again, after a change on the last rank; what `write_policy` raised."""
    from megatron_r3.weights.write_policy import read_policy, write_policy

    models = make_chunks(sizes)
    read_policy(models, policy)
    if rank == torch.distributed.get_world_size() - 1:
        with torch.no_grad():
            CHANGES[change](models)
    try:
        write_policy(models, out, vocab_size=VOCABULARY)
    except ValueError as error:
        return str(error)
    return ""


def write_after_training(rank: int, argv: list[str], out: Path, like: Path | None) -> list[str]:
    """Train as demo/pretrain.py does, then write its models, which are in Megatron's wrappers.

    Returns:
        The files of which `finish` was told.
    """
    from demo.pretrain import datasets, forward_step
    from megatron_r3.train import launch
    from megatron_r3.weights.write_policy import write_policy

    sys.argv = ["pretrain.py", *argv]
    models: list[torch.nn.Module] = []
    launch.train(datasets, forward_step, models.extend)
    told: list[str] = []

    def finish(folder: Path, digests: dict[str, str]) -> None:
        assert all(file_digest(folder / name) == digest for name, digest in digests.items())
        told.extend(digests)
        (folder / "policy.json").write_text("{}")

    write_policy(models, out, like=like, vocab_size=VOCAB_SIZE, finish=finish)
    return told


def write_between_steps(rank: int, argv: list[str], out: Path, whole: bool = True) -> None:
    """Train, and write the models after the second of three steps.

    Args:
        whole: without, the ranks do not take each other's updates first.
    """
    from megatron.training import training

    from demo.pretrain import datasets, forward_step
    from megatron_r3.train import launch
    from megatron_r3.weights import write_policy

    if not whole:
        write_policy.finish_updates = lambda models: None
    sys.argv = ["pretrain.py", *argv]
    models: list[torch.nn.Module] = []
    train_step, done = training.train_step, [0]

    def step(*args: Any, **kwargs: Any) -> Any:
        if done[0] == 2:
            write_policy.write_policy(models, out, vocab_size=VOCAB_SIZE)
        done[0] += 1
        return train_step(*args, **kwargs)

    training.train_step = step
    launch.train(datasets, forward_step, models.extend)


def _experts(models: list[Any]) -> Any:
    return models[-1].decoder.layers[-1].mlp.experts.local_experts


def _swap_experts(models: list[Any]) -> None:
    one, other = (expert.linear_fc2.weight for expert in _experts(models)[:2])
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def _full_disk(models: list[Any]) -> None:
    """A limit on the size of a file fails a write where a full disk does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


CHANGES: dict[str, Callable[[list[Any]], Any]] = {
    "nothing": lambda models: None,
    "an expert swapped": _swap_experts,
    "nan": lambda models: _experts(models)[0].linear_fc1.weight[3].fill_(torch.nan),
    "full disk": _full_disk,
}


def write_other_model(rank: int, kind: str, out: Path) -> str:
    """What `write_policy` raises for a model that has no place in transformers' Qwen3-MoE."""
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from megatron_r3.weights.write_policy import write_policy

    tiny.start()
    more = {"mtp_num_layers": 1} if kind == "mtp" else {}
    given = tiny.config(moe_router_replay=False, **more)
    mtp = None
    if kind == "mtp":
        spec = specs.get_gpt_decoder_block_spec(given, use_transformer_engine=False)
        mtp = specs.get_gpt_mtp_block_spec(given, spec.layer_specs[-1], False)
    tied = kind == "tied"
    made = tiny.model(given, share_embeddings_and_output_weights=tied, mtp_block_spec=mtp)
    if kind == "fsdp":
        # Megatron's own wrapper calls this with the device mesh of a GPU.
        fully_shard(made, mesh=init_device_mesh("cpu", (1,)))
    try:
        write_policy([made], out, vocab_size=VOCABULARY)
    except ValueError as error:
        return str(error)
    return ""


def write_like(rank: int, policy: Path, like: Path, out: Path) -> str:
    """What `write_policy` raises with the config.json of `like`."""
    from megatron_r3.weights.write_policy import read_policy, write_policy

    models = make_chunks({})
    read_policy(models, policy)
    try:
        write_policy(models, out, like=like, vocab_size=VOCABULARY)
    except ValueError as error:
        return str(error)
    return ""


def read_wrong(rank: int, sizes: dict[str, int], policy: Path, **options: Any) -> str:
    """What `read_policy` raised; the weights are unchanged."""
    from megatron_r3.weights.write_policy import read_policy

    models = make_chunks(sizes, **options)
    before = [p.detach().clone() for model in models for p in model.parameters()]
    try:
        read_policy(models, policy)
    except ValueError as error:
        after = [p for model in models for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return str(error)
    return ""
