"""Policies that a training publishes: the same bytes and the same probe in every layout.

Shape suffixes (docs/glossary.md): N, M.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from slow import slow_except
from training import Policy, fails, parse_all, resumed, steps_on, stores, train

from megatron_r3.data.fingerprint import router_fingerprint
from megatron_r3.data.store import RolloutStore, write_shard
from megatron_r3.loop.probe import difference
from megatron_r3.loop.published import PublishedPolicy, published, read_policy, version_name
from proof.fidelity.rig.worker import TreeWorker

LAYOUTS = {
    "TP2": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "CP2": (2, ["--context-parallel-size", "2"]),
    "PP2xEP2": (4, ["--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2"]),
    "PP2xVPP2": (
        2,
        ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"],
    ),
}


def publishes(policy: Policy, folder: Path, *more: str) -> list[str]:
    return [
        *("--rollouts-publish", str(folder / "policies"), "--rollouts-follow", "20"),
        *("--rollouts-publish-like", str(policy.hf), *more),
    ]


def all_of(folder: Path) -> list[PublishedPolicy]:
    policies = folder / "policies"
    assert sorted(path.name for path in policies.iterdir()) == [
        version_name(version) for version in published(policies)
    ]
    found = [read_policy(policies, version) for version in published(policies)]
    for one in found:
        one.check_files()
    return found


@pytest.fixture(scope="module")
def alone(patched: TreeWorker, policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process publishes: before each of four steps, and at the end."""
    folder = tmp_path_factory.mktemp("alone")
    store = stores(policy, folder, mixed=True)
    argv = steps_on(policy, store, 4, *publishes(policy, folder))
    patched.run(train, 1, argv, timeout_s=120)
    return folder


def test_each_step_publishes_its_policy(alone: Path, policy: Policy) -> None:
    found = all_of(alone)
    assert [(one.version, one.iteration) for one in found] == [(v, v) for v in range(5)]
    assert len({one.digest for one in found}) == 5
    start, first = (
        {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
        for folder in (policy.hf, found[0].path)
    )
    assert start.keys() == first.keys()
    assert all(torch.equal(start[name], first[name]) for name in start)


def test_the_probe_is_what_transformers_computes(alone: Path) -> None:
    from published import probe_of

    found = all_of(alone)
    for one in found[::2]:
        shown = difference(one.probe, probe_of(one.path))
        assert shown.abs_dlogp < 0.1  # float32 in the trainer, bfloat16 there
        assert min(shown.agreement) > 0.9
    wrong = difference(found[0].probe, probe_of(found[4].path))
    assert wrong.abs_dlogp > 2 * difference(found[0].probe, probe_of(found[0].path)).abs_dlogp


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "TP2", "PP2xEP2"))
def test_every_layout_publishes_the_same_policy(patched, policy, tmp_path, alone, layout):
    ranks, more = LAYOUTS[layout]
    store = stores(policy, tmp_path, mixed=True)
    argv = steps_on(policy, store, 1, *publishes(policy, tmp_path), *more)
    patched.run(train, ranks, argv, timeout_s=180)
    want, found = all_of(alone)[0], all_of(tmp_path)
    assert len(found) == 2
    assert found[0].files == want.files
    shown = difference(want.probe, found[0].probe)
    assert shown.abs_dlogp < 2e-5
    assert min(shown.agreement) > 0.99
    assert found[1].files != want.files


@pytest.mark.slow
def test_a_resumed_training_compares_with_what_it_published(patched, policy, tmp_path):
    store = stores(policy, tmp_path, mixed=True)
    options = publishes(policy, tmp_path)
    saved = ["--save", str(tmp_path / "saved"), "--save-interval", "2"]
    half = [*steps_on(policy, store, 4, *options), *saved, "--exit-interval", "3"]
    patched.run(train, 1, half, timeout_s=120)
    assert len(all_of(tmp_path)) == 3
    # from the checkpoint of step 2: the policies 2 and 3 come again, and are the same
    patched.run(train, 1, resumed(policy, store, tmp_path / "saved", *options), timeout_s=120)
    before = all_of(tmp_path)
    assert len(before) == 5
    # and with other advantages they are not
    other = resumed(policy, store, tmp_path / "saved", *options)
    message = fails(patched, [*other, "--rollouts-advantages", "group-centred"])
    assert re.search("policy [34] was published before, with other bytes in model-00001", message)
    assert [one.files for one in all_of(tmp_path)] == [one.files for one in before]


def test_samples_in_the_place_of_iterations_publish_the_last_policy_too(
    patched: TreeWorker, policy: Policy, tmp_path: Path, alone: Path
) -> None:
    """Megatron works the iterations out when the model is made."""
    store = stores(policy, tmp_path, mixed=True)
    argv = steps_on(policy, store, 4, *publishes(policy, tmp_path))
    while "--train-iters" in argv:
        at = argv.index("--train-iters")
        del argv[at : at + 2]
    patched.run(train, 1, [*argv, "--train-samples", "16"], timeout_s=120)
    assert [one.files for one in all_of(tmp_path)] == [one.files for one in all_of(alone)[:3]]


def test_a_policy_of_another_training_in_the_folder_is_not_ones_own(
    patched: TreeWorker, policy: Policy, tmp_path: Path, alone: Path
) -> None:
    """The rollouts of version 3 are for whoever has made 3 steps, and not for the start."""
    source = RolloutStore([policy.store])
    rollouts = [source.rollout(i) for i in range(len(source))]
    for version in (0, 3):
        folder = alone / "policies" / version_name(version)
        stamped = router_fingerprint(folder, source.info.moe_layers)
        info = replace(source.info, router_fingerprint=stamped, policy_stamp="")
        of_it = [replace(r, policy_version=version) for r in rollouts]
        write_shard(tmp_path / str(version), info, of_it)
    shutil.copytree(alone / "policies", tmp_path / "policies")
    options = publishes(policy, tmp_path)
    told = fails(patched, steps_on(policy, tmp_path / "3", 1, *options))
    assert "sampled from another policy: the router of layer 1 has the digest" in told
    # control: the folder's own version 0, and a step that changes the weights as before or not
    argv = steps_on(policy, tmp_path / "0", 1, *options, "--lr", "0")
    told = fails(patched, argv)
    assert "policy 1 was published before, with other bytes" in told


def test_old_policies_go(patched: TreeWorker, policy: Policy, tmp_path: Path) -> None:
    store = stores(policy, tmp_path, mixed=True)
    argv = steps_on(policy, store, 4, *publishes(policy, tmp_path, "--rollouts-publish-keep", "2"))
    patched.run(train, 1, argv, timeout_s=120)
    assert [one.version for one in all_of(tmp_path)] == [3, 4]
    assert np.isfinite(all_of(tmp_path)[1].probe.logprobs_MN).all()


REFUSED = {
    "--rollouts-publish-keep 1: it must be 2 or more": ["--rollouts-publish-keep", "1"],
    "--rollouts-publish-interval 3: it must be a multiple of the 2": [
        *("--rollouts-publish-interval", "3", "--rollouts-mini-steps", "2")
    ],
    "/nowhere: no config.json": ["--rollouts-publish-like", "/nowhere"],
    "--rollouts-publish-interval 2: the training ends after 1 optimizer steps": [
        *("--rollouts-publish-interval", "2")
    ],
    "test_publish.py is a file: name another folder": ["--rollouts-publish", __file__],
    "not together with --moe-input-jitter-eps 0.1": ["--moe-input-jitter-eps", "0.1"],
}


def test_options_that_do_not_go_together(patched, policy, tmp_path):
    argv = steps_on(policy, stores(policy, tmp_path), 1, *publishes(policy, tmp_path))
    (said,) = patched.run(parse_all, 1, [[*argv, *more] for more in REFUSED.values()])
    for words, text in zip(REFUSED, said, strict=True):
        assert words in " ".join(text.split())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--moe-expert-capacity-factor", "1.0"], "no moe_expert_capacity_factor"),
        (["--rotary-seq-len-interpolation-factor", "2"], "no rotary_seq_len_interpolation_factor"),
    ],
)
def test_a_live_training_whose_model_no_sampler_has(patched, policy, tmp_path, more, words):
    """Nothing is published. Without these options the tests above publish the model."""
    argv = steps_on(policy, stores(policy, tmp_path), 1, *publishes(policy, tmp_path), *more)
    argv = [option for option in argv if not option.startswith("--moe-router-replay-verify")]
    argv.remove("--moe-router-replay")
    assert f"not a qwen3_moe model, which needs {words}" in fails(patched, argv)
    assert not list((tmp_path / "policies").glob("v*"))
