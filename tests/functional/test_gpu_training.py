"""The trainings of `make gpu`, rehearsed on a real patched tree: rows, records, status, controls.

The judgements themselves are tested with made-up trainings in tests/unit/gpu.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from training import Policy, train

from proof.fidelity.rig.rank_process import RankError
from proof.fidelity.rig.worker import TreeWorker
from proof.gpu import training_judge as judge
from proof.gpu.training import main
from proof.gpu.training_load import load_local_checkpoints
from proof.gpu.training_runs import REHEARSAL, Place, RunFailed, write_stores

SCRIPT = Path(__file__).parents[2] / "megatron_r3" / "train" / "pretrain_gpt.py"


def arguments(tree: Path, policy: Policy, out: Path, cases: str) -> list[str]:
    argv = ["--cases", cases, "--tree", str(tree), "--store", str(policy.store)]
    argv += ["--checkpoint", str(policy.checkpoint), "--script", str(SCRIPT), "--out", str(out)]
    return [*argv, "--spec", "local", "--device", "cpu", "--rehearse"]


def test_cases_are_rehearsed_recorded_and_skipped_with_their_reasons(
    patched_tree: Path, policy: Policy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(arguments(patched_tree, policy, tmp_path, "recorded,fp8"))
    printed = capsys.readouterr().out
    assert status == 0, printed
    (file,) = tmp_path.glob("cpu-*.json")
    records = json.loads(file.read_text())
    assert list(records) == ["training recorded", "training fp8"]
    (row,) = records["training recorded"]["rows"]
    assert row["ok"]
    assert row["bitwise"]
    assert row["control_differs"]
    rows = {row["row"]: row for row in records["training fp8"]["rows"]}
    assert [name for name, row in rows.items() if "skipped" in row] == ["tensorwise", "delayed"]
    assert "skipped: fp8, delayed: Transformer Engine's layers are not used here" in printed


def test_a_recompute_that_is_not_bound_fails_its_row(
    patched_tree: Path, policy: Policy, tmp_path: Path
) -> None:
    """The row of full recompute passes as it is, and fails when the binding is undone."""
    stores = write_stores(policy.store, tmp_path, REHEARSAL.rollouts)
    place = Place(
        patched_tree, SCRIPT, policy.checkpoint, stores, tmp_path, te=False, cpu=True,
        scale=REHEARSAL,
    )  # fmt: skip
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    orders = {
        "none": place.order("shifted", gradients=True),
        "bound": place.order("shifted", *full.split(), gradients=True),
        "unbound": place.order("shifted", *full.split(), gradients=True, bound=False),
        "refused": place.order("shifted", "--moe-router-force-load-balancing"),
    }
    seen = place.run_all(orders)
    failed = seen.pop("refused")
    assert isinstance(failed, RunFailed)
    assert "replaces the logits" in str(failed)
    none, bound, unbound = (one for one in seen.values() if not isinstance(one, RunFailed))

    def row(one: Any) -> dict[str, Any]:
        return judge.recomputed(one, none, passes=2, bitwise=True, by="checkpoint")

    assert row(bound)["ok"], row(bound)
    assert not row(unbound)["ok"]
    assert judge.unbound(unbound, none)["ok"]
    assert not judge.unbound(bound, none)["ok"]


def train_with_the_names_of_te(rank: int, argv: list[str], help_it: bool) -> dict[str, Any]:
    """Train local layers whose norm before the MLP has the key that Transformer Engine's has."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    submodules = specs.get_gpt_layer_local_submodules

    def renamed(*args: Any, **kwargs: Any) -> Any:
        made = submodules(*args, **kwargs)
        made.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
        return made

    specs.get_gpt_layer_local_submodules = renamed
    if help_it:
        load_local_checkpoints()
    return train(rank, argv)


def test_a_local_checkpoint_loads_under_the_names_of_transformer_engine(
    patched: TreeWorker, policy: Policy
) -> None:
    argv = policy.arguments()
    (want,) = patched.run(train, 1, argv, timeout_s=120)
    (got,) = patched.run(train_with_the_names_of_te, 1, argv, True, timeout_s=120)
    assert all(torch.equal(weight, got[name]) for name, weight in want.items())
    with pytest.raises(RankError, match=r"decoder\.layers\.pre_mlp_layernorm\.weight"):
        patched.run(train_with_the_names_of_te, 1, argv, False, timeout_s=120)
