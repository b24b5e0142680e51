"""Megatron's training loop in the ranks of a worker, and a tiny policy to train.

Megatron is imported only inside the functions that ranks run.

Shape suffixes (docs/glossary.md): B, K, L, S, T.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grouped_experts
import numpy as np
import pytest
import torch

from demo import task
from demo.model import arguments
from megatron_r3.cli import main
from megatron_r3.data.store import Rollout, RolloutStore, StoreInfo, write_shard
from megatron_r3.replay.routes import Routes
from megatron_r3.train import launch
from proof.fidelity.off import hide_megatron_r3, weights
from proof.fidelity.rig.rank_process import RankError
from proof.fidelity.rig.worker import TreeWorker

ROOT = Path(__file__).parents[2]
STEP = ["--micro-batch-size", "8", "--global-batch-size", "32", "--train-iters", "1"]
STEP += ["--lr", "1e-3", "--moe-router-load-balancing-type", "none", "--calculate-per-token-loss"]
STEP += ["--moe-router-replay-verify-dispatch", "--moe-router-replay-log-mismatch-interval", "1"]


def train(rank: int, argv: list[str], *, validate: bool = False) -> dict[str, torch.Tensor]:
    """Run `pretrain()` as demo/pretrain.py does; returns this rank's weights after training."""
    from megatron.training import get_args

    from demo.pretrain import Problems, datasets, forward_step

    def with_validation(sizes: list[int], vp_stage: int | None = None) -> Any:
        problems = Problems(256, get_args().seq_length)
        return problems, problems, problems

    def live_step(data_iterator: Any, model: Any) -> Any:
        from megatron_r3.replay.active import active_microbatch

        assert active_microbatch() is None
        assert not model.training, "the script's own step is for validation here"
        return forward_step(data_iterator, model)

    with_validation.is_distributed = True  # type: ignore[attr-defined]
    sys.argv = ["pretrain.py", *argv]
    models: list[torch.nn.Module] = []
    launch.train(
        with_validation if validate else datasets,
        live_step if validate else forward_step,
        models.extend,
    )
    return weights(models)


def torchrun(
    tree: Path, script: str, processes: int, *argv: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of this repository as a user does, unchanged. It takes ten seconds to begin."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(processes), "-m", "megatron_r3.cpu"]
    return subprocess.run(
        [*command, str(ROOT / script), *argv],
        env={**os.environ, "PYTHONPATH": f"{tree}:{ROOT}", "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )


def gradients(rank: int, argv: list[str]) -> dict[str, torch.Tensor]:
    """The gradients of this rank after the last step, by chunk and name."""
    from megatron.training import training

    if "--moe-grouped-gemm" in argv:
        grouped_experts.install()
    found: dict[str, torch.Tensor] = {}
    train_step = training.train_step

    def step(forward_step: Any, data: Any, model: Any, *more: Any, **named: Any) -> Any:
        result = train_step(forward_step, data, model, *more, **named)
        for chunk, module in enumerate(model):
            for name, parameter in module.named_parameters():
                # bfloat16 wraps a model once more
                found[f"{chunk}.{name.replace('module.', '')}"] = parameter.main_grad.clone()
        return result

    training.train_step = step
    train(rank, argv)
    return found


def parse(rank: int, argv: list[str], hidden: bool = False) -> str:
    """Only parse and check the arguments; why they were refused, or nothing."""
    import contextlib
    import io

    if hidden:
        hide_megatron_r3()
    from megatron.training.arguments import parse_and_validate_args

    sys.argv = ["pretrain.py", *argv]
    errors = io.StringIO()
    code: Any = None
    try:
        with contextlib.redirect_stderr(errors):
            parse_and_validate_args()
    except SystemExit as refusal:
        code = refusal.code
    if isinstance(code, str):  # python prints it and exits with 1
        return errors.getvalue() + code
    assert code in (None, 1, 2), code
    return errors.getvalue() if code else ""


def parse_all(rank: int, argvs: list[list[str]]) -> list[str]:
    """`parse` of each command, in one process."""
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.training.global_vars import unset_global_variables

    said = []
    for argv in argvs:
        said.append(parse(rank, argv))
        unset_global_variables()
        unset_num_microbatches_calculator()
    return said


def export(rank: int, argv: list[str]) -> None:
    """megatron_r3/weights/hf.py."""
    from megatron_r3.weights import hf

    sys.argv = ["hf.py", *argv]
    hf.main()


def trained_with(rank: int, checkpoint: Path, name: str, value: Any) -> None:
    """Make a checkpoint in one file say that it was trained with another argument."""
    (file,) = checkpoint.glob("iter_*/*/*.pt")
    saved = torch.load(file, weights_only=False)
    assert getattr(saved["args"], name) != value
    setattr(saved["args"], name, value)
    torch.save(saved, file)


def differences(rank: int, argv: list[str]) -> list[torch.Tensor]:
    """|log-prob of the trainer - that of the sampler|, of the response tokens of micro-batches."""
    from megatron_r3.train import step

    found: list[torch.Tensor] = []
    made = step.terms_of

    def keep(*given: Any) -> Any:
        terms = made(*given)
        difference_BS = (terms.logprobs_BS - terms.sampled_logprobs_BS).detach().abs()
        found.append(difference_BS[terms.mask_BS > 0])
        return terms

    step.terms_of = keep
    train(rank, argv)
    return found


@dataclass(frozen=True)
class Policy:
    """A trained checkpoint, its transformers directory, and the rollouts sampled from it."""

    checkpoint: Path
    hf: Path
    store: Path

    @staticmethod
    def within(folder: Path) -> Policy:
        """The policy that `make_policy` has put into a folder."""
        return Policy(folder / "checkpoint", folder / "hf", folder / "store")

    def arguments(self, *more: str, store: Path | None = None) -> list[str]:
        """One replayed step on its rollouts."""
        load = ["--load", str(self.checkpoint), "--finetune", "--no-load-optim", "--no-load-rng"]
        rollouts = ["--rollouts", str(store or self.store), "--moe-router-replay"]
        return arguments(STEP, load, rollouts, list(more))


def make_policy(worker: TreeWorker, folder: Path, iterations: int = 60) -> None:
    """Train a policy, export it, and store 32 rollouts of it in one shard.

    Args:
        worker: of a patched tree.
        iterations: of its training.
    """
    made = Policy.within(folder)
    pretrain = ["--micro-batch-size", "32", "--global-batch-size", "32", "--lr", "3e-3"]
    pretrain += ["--train-iters", str(iterations), "--save-interval", "1000"]
    save = ["--save", str(made.checkpoint)]
    worker.run(train, 1, arguments(pretrain, save), timeout_s=300)
    load = ["--micro-batch-size", "1", "--load", str(made.checkpoint)]
    worker.run(export, 1, arguments(load, ["--hf-export", str(made.hf)]), timeout_s=120)
    prompts = folder / "prompts.jsonl"
    task.write_prompts(prompts, 8, 10_000_000)
    # transformers samples in bfloat16
    argv = ["rollouts", "collect", "--engine", "transformers", "--model", str(made.hf)]
    argv += ["--prompts", str(prompts), "--out", str(made.store), "--n", "4", "--seed", "1"]
    argv += ["--max-tokens", str(task.MAX_ANSWER), "--reward", "demo.task:reward"]
    assert main(argv) == 0


def changed_store(
    source: Path, target: Path, change: Callable[[list[np.ndarray]], list[np.ndarray]], **info: Any
) -> Path:
    """A store with the routes `[L, T, K]` of all its rollouts changed, or another stamp."""
    store = RolloutStore([source])
    rollouts = [store.rollout(index) for index in range(len(store))]
    routes = change([r.routes.ids_LTK for r in rollouts])
    stamped: StoreInfo = replace(store.info, **info)
    write_shard(
        target,
        stamped,
        [
            replace(r, routes=Routes.from_array(ids, stamped.num_experts))
            for r, ids in zip(rollouts, routes, strict=True)
        ],
    )
    return target


PART = 8  # rollouts of a step, and of a shard


def parts(policy: Policy) -> tuple[StoreInfo, list[list[Rollout]]]:
    """The policy's 32 rollouts as four shards, each with whole groups, of four versions.

    They have no policy stamp: a training refuses new rollouts of a policy that it has updated, and
    the tests that are about this stamp their shards themselves.
    """
    store = RolloutStore([policy.store])
    rollouts = [store.rollout(index) for index in range(len(store))]
    rollouts.sort(key=lambda rollout: rollout.group)
    shards = [rollouts[i : i + PART] for i in range(0, len(rollouts), PART)]
    return replace(store.info, policy_stamp=""), [
        [replace(rollout, policy_version=version) for rollout in shard]
        for version, shard in enumerate(shards)
    ]


def steps_on(policy: Policy, store: Path, steps: int, *more: str) -> list[str]:
    batch = ["--micro-batch-size", "4", "--global-batch-size", str(PART)]
    argv = policy.arguments(*batch, "--train-iters", str(steps), *more, store=store)
    return [*argv, "--lr-decay-style", "constant"]


def stores(policy: Policy, folder: Path, mixed: bool = False) -> Path:
    """The four parts as one store, one policy version each; not stamped.

    Args:
        mixed: rewards 0 and 1 in turn, so that every update changes the weights.
    """
    info, shards = parts(policy)
    for shard in shards:
        if mixed:
            shard = [replace(rollout, reward=i % 2) for i, rollout in enumerate(shard)]
        write_shard(folder / "store", replace(info, router_fingerprint=()), shard)
    return folder / "store"


def half(patched: TreeWorker, policy: Policy, store: Path, folder: Path, *more: str) -> Path:
    """Two of four steps, saved."""
    saved = ["--save", str(folder / "saved"), "--save-interval", "2", "--exit-interval", "2"]
    patched.run(train, 1, steps_on(policy, store, 4, *more, *saved), timeout_s=120)
    return folder / "saved"


def resumed(policy: Policy, store: Path, saved: Path, *more: str) -> list[str]:
    argv = steps_on(policy, store, 4, *more)
    for name in ("--finetune", "--no-load-optim", "--no-load-rng"):
        argv.remove(name)
    argv[argv.index("--load") + 1] = str(saved)
    return argv


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)


def fails(patched: TreeWorker, argv: list[str]) -> str:
    with pytest.raises(RankError) as failure:
        patched.run(train, 1, argv, timeout_s=120)
    assert "SystemExit: 1" in str(failure.value)
    return str(failure.value)


def unread_options(rank: int) -> list[str]:
    """The fields of this tree's config that say something of routing, and are not in the list."""
    import dataclasses

    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_r3.replay import replayable

    return [
        field.name
        for field in dataclasses.fields(TransformerConfig)
        if replayable._ABOUT_ROUTING.search(field.name)
        and not replayable._OURS.match(field.name)
        and field.name not in replayable.KNOWN_NAMES
    ]
