"""How old a token and a rollout are, where several policies sampled one rollout.

Shape suffixes (docs/glossary.md): B, C, S, U.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from stored import INFO, make_rollout
from training_arguments import MODEL, options_of

from megatron_r3.collect.verify_store import verify_store
from megatron_r3.data.fingerprint import policy_stamp, router_digest
from megatron_r3.data.store import Rollout, RolloutStore, StoreInfo, write_shard
from megatron_r3.data.store.schema import SamplingSettings
from megatron_r3.train.dataset import PackedRollouts, RolloutDataset
from megatron_r3.train.losses.loss import LossOptions, update_of
from megatron_r3.train.losses.terms import LossTerms, Sequences
from megatron_r3.train.open_store import open_store, warnings
from megatron_r3.train.policy_check import PolicyCheck
from megatron_r3.train.schedule import SOURCES, Schedule, UseOfRollouts
from megatron_r3.train.update_metrics import UpdateMetrics

UNSTAMPED = replace(INFO, router_fingerprint=())
ROLLOUT, LIVE = SOURCES.index("rollout"), SOURCES.index("live")


def sampled_by(*versions: int, sample: int = 0, tokens: int = 6) -> Rollout:
    """A rollout whose tokens from 2 on were sampled, one by each version, the rest by the last."""
    rollout = make_rollout(tokens, seed=sample, sample=sample, reward=float(sample))
    spans_C2 = np.array([(2 + i, version) for i, version in enumerate(versions)], np.int64)
    return replace(
        rollout, policy_version=versions[0], versions_C2=spans_C2 if len(versions) > 1 else None
    )


def written(folder: Path, *shards: list[Rollout], info: object = UNSTAMPED) -> RolloutStore:
    for shard in shards:
        write_shard(folder, info, shard)
    return RolloutStore([folder])


# The newest span of all is version 5: inside of a rollout that began with 1, in the first shard.
SHARDS = [
    [sampled_by(1, 3, 5, sample=0), sampled_by(4, sample=1)],
    [sampled_by(3, 4, sample=2), sampled_by(2, sample=3)],
]


def test_a_token_has_the_version_of_its_own_span(tmp_path: Path) -> None:
    data = RolloutDataset(written(tmp_path, *SHARDS), UseOfRollouts(8, Schedule(4)))
    # position t predicts token t + 1; tokens 0 and 1 are the prompt; behind 5 positions is padding
    assert data[0]["version"].tolist() == [-1, 1, 3, 5, 5, -1, -1, -1]
    assert data[1]["version"].tolist() == [-1, 4, 4, 4, 4, -1, -1, -1]
    for i in range(4):
        assert torch.equal(data[i]["version"] >= 0, data[i]["loss_mask"] > 0)
        assert torch.equal(data[i]["turn"] >= 0, data[i]["loss_mask"] > 0)


def test_a_token_has_the_number_of_its_turn(tmp_path: Path) -> None:
    """Two turns that touch are two turns, though nothing in the response mask says so."""
    one = make_rollout(7, seed=0, sample=0)
    turns = replace(one, turns_U2=np.array([[2, 4], [4, 5], [5, 7]], np.int32))
    data = RolloutDataset(written(tmp_path, [turns]), UseOfRollouts(8, Schedule(1)))
    assert data[0]["turn"].tolist() == [-1, 0, 0, 1, 2, 2, -1, -1]


@pytest.mark.parametrize(
    ("max_lag", "sources"),
    [
        (None, [ROLLOUT] * 4),
        (4, [ROLLOUT] * 4),
        (3, [LIVE, ROLLOUT, ROLLOUT, ROLLOUT]),
        (1, [LIVE, ROLLOUT, LIVE, LIVE]),
        (0, [LIVE] * 4),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_rollout_is_as_old_as_its_first_span_and_has_one_source(
    tmp_path: Path, max_lag: int | None, sources: list[int], packed: bool
) -> None:
    """The newest version, 5, is in no rollout's `policy_version`: of those 4 is the newest."""
    use = UseOfRollouts(8, Schedule(4), replay_max_lag=max_lag)
    store = written(tmp_path, *SHARDS)
    data = PackedRollouts(store, use) if packed else RolloutDataset(store, use)
    found = [set(data[i]["source"][data[i]["rows"] >= 0].tolist()) for i in range(4)]
    assert found == [{source} for source in sources]


def test_what_comes_after_a_collection_makes_none_of_it_stale(tmp_path: Path) -> None:
    store = written(tmp_path, [sampled_by(0, sample=0)], [sampled_by(0, 7, sample=1)])
    for batch, source in ((1, ROLLOUT), (2, LIVE)):  # a collection of one rollout, and of both
        use = UseOfRollouts(8, Schedule(batch), replay_max_lag=1)
        assert set(RolloutDataset(store, use)[0]["source"][:5].tolist()) == {source}


def checked(store: RolloutStore, max_lag: int | None, rollouts: list[int]) -> None:
    options = options_of(rollouts_max_lag=max_lag)
    ledger = SimpleNamespace(used=lambda: 0)
    PolicyCheck(options, store, ledger, {}).check(rollouts)  # type: ignore[arg-type]


def test_a_rollout_that_is_too_old_is_named_with_its_token_and_versions(tmp_path, capsys):
    store = written(tmp_path, *SHARDS)
    for max_lag, taken in ((None, [0, 1, 2, 3]), (4, [0, 1, 2, 3]), (3, [1, 2, 3]), (1, [1])):
        checked(store, max_lag, taken)  # others of the shard, which are not used, do not matter
    for max_lag, refused, named, oldest in (
        (3, 0, "shard-00000.safetensors: rollout 0", 1),
        (1, 2, "shard-00001.safetensors: rollout 0", 3),
        (0, 1, "shard-00000.safetensors: rollout 1", 4),
    ):
        with pytest.raises(SystemExit):
            checked(store, max_lag, [1, refused])
        assert capsys.readouterr().err == (
            f"error: {tmp_path}/{named}: token 2 was sampled with policy version {oldest}, which "
            f"is more than --rollouts-max-lag {max_lag} behind version 5: sample again, or raise "
            "--rollouts-max-lag\n"
        )


def opened(folder: Path, **changes: object) -> RolloutStore:
    return open_store(options_of(**{**MODEL, "rollouts": [str(folder)], **changes}))


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (
            [sampled_by(3, sample=0), sampled_by(3, 4, 5, sample=1)],
            "rollout 1, from token 4 on: sampled with policy version 5, rollout 0 with version 3, ",
        ),
        (
            [sampled_by(4, sample=0), sampled_by(3, sample=1), sampled_by(4, sample=2)],
            "rollout 0: sampled with policy version 4, rollout 1 with version 3, ",
        ),
    ],
)
def test_one_policys_router_digests_do_not_stand_for_several_versions(tmp_path, shard, message):
    written(tmp_path / "stamped", shard, info=INFO)
    with pytest.raises(ValueError, match=f"shard-00000.safetensors: {message}") as refusal:
        opened(tmp_path / "stamped")
    assert "give --rollouts-policy any" in str(refusal.value)
    # what is taken: policies of any kind, rollouts of no known policy, one version in each shard
    opened(tmp_path / "stamped", rollouts_policy="any")
    written(tmp_path / "unstamped", shard)
    opened(tmp_path / "unstamped")
    written(tmp_path / "one", [sampled_by(3, sample=0)], [sampled_by(3, sample=1)], info=INFO)
    opened(tmp_path / "one")


STAMPED = replace(INFO, policy_stamp="a" * 16)
OTHERS: dict[str, tuple[StoreInfo, int]] = {
    "the same version": (STAMPED, 3),
    "another stamp, frozen routers": (replace(STAMPED, policy_stamp="b" * 16), 4),
    "the engine's own version is another one": (replace(STAMPED, engine_policy="v4"), 4),
}


@pytest.mark.parametrize("follow_s", [None, 0.0])
def test_one_stamp_does_not_stand_for_two_versions(tmp_path: Path, follow_s: float | None) -> None:
    """The sampler never got the weights of version 4."""
    shards = [[sampled_by(v, sample=v), sampled_by(v, sample=9 + v)] for v in (3, 4)]
    for name, info in {"stamped": STAMPED, "routers alone": INFO, "unstamped": UNSTAMPED}.items():
        written(tmp_path / name, *shards, info=info)
        arguments = {"rollouts_follow": follow_s}
        opened(tmp_path / name, rollouts_policy="any", **arguments)
        if name != "stamped":  # routers may be frozen, and stay the same from version to version
            opened(tmp_path / name, **arguments)
            continue
        message = "shard-00001.*: policy version 4 has the stamp of version 3 in .*shard-00000"
        with pytest.raises(ValueError, match=message) as refusal:
            opened(tmp_path / name, **arguments)
        assert "with --rollouts-policy any" in str(refusal.value)
        with pytest.raises(ValueError, match=message):
            verify_store(tmp_path / name)


@pytest.mark.parametrize("name", OTHERS)
def test_versions_whose_policies_differ_are_taken(tmp_path: Path, name: str) -> None:
    info, version = OTHERS[name]
    write_shard(tmp_path, STAMPED, [sampled_by(3, sample=0), sampled_by(3, sample=1)])
    write_shard(tmp_path, info, [sampled_by(version, sample=2)])
    opened(tmp_path, rollouts_follow=0.0)
    verify_store(tmp_path)


def publishing(tmp_path: Path, routers: float) -> dict[str, object]:
    """The arguments of a training that has published version 4 with these router weights."""
    folder = tmp_path / "policies" / "v000004"
    folder.mkdir(parents=True)
    (tmp_path / "config.json").write_text("{}")
    gates = {
        f"model.layers.{layer}.mlp.gate.weight": torch.full((16, 8), routers)
        for layer in INFO.moe_layers
    }
    save_file(gates, folder / "model.safetensors")
    return {
        "rollouts_publish": str(tmp_path / "policies"),
        "rollouts_publish_like": str(tmp_path),
        "rollouts_follow": 0.0,
    }


@pytest.mark.parametrize("weights", ["as published", "others", "removed", "not yet published"])
def test_an_update_that_changed_nothing_is_another_version(tmp_path: Path, weights: str) -> None:
    """A learning rate of 0 makes version 4 of the weights of version 3: this training knows it."""
    arguments = publishing(tmp_path, routers=1.0)
    folder = tmp_path / "policies" / "v000004"
    stamp = policy_stamp(folder) if weights != "others" else "c" * 16
    if weights == "removed":  # by --rollouts-publish-keep; version 5 is still there
        folder.rename(folder.with_name("v000005"))
    if weights == "not yet published":
        folder.rename(folder.with_name("v000002"))
    shards = [[sampled_by(v, sample=v), sampled_by(v, sample=9 + v)] for v in (3, 4)]
    written(tmp_path / "s", *shards, info=replace(INFO, policy_stamp=stamp))
    if weights in ("as published", "removed"):
        opened(tmp_path / "s", **arguments)
    else:
        with pytest.raises(ValueError, match="policy version 4 has the stamp of version 3"):
            opened(tmp_path / "s", **arguments)


def test_only_versions_that_a_training_has_come_by_are_its_own(tmp_path: Path) -> None:
    """Version 4 of the folder is of another training, as long as this one has made 7 steps."""
    arguments = publishing(tmp_path, routers=1.0)
    stamp = (router_digest(torch.full((16, 8), 1.0)),) * len(INFO.moe_layers)
    store = written(tmp_path / "s", [sampled_by(4)], info=replace(INFO, router_fingerprint=stamp))
    more = {**arguments, "rollouts_publish_interval": 2, "train_iters": 20}
    options = options_of(**MODEL, **more)
    for iteration, is_own in ((0, False), (7, False), (8, True), (20, True)):
        ledger = SimpleNamespace(progress=SimpleNamespace(iteration=iteration))
        check = PolicyCheck(options, store, ledger, {})  # type: ignore[arg-type]
        assert check._was_published(0, stamp) is is_own
        assert not check._was_published(0, ("0" * 16,) * len(INFO.moe_layers))


@pytest.mark.parametrize(
    "model", [{"num_experts": 8}, {"moe_router_topk": 2}, {"num_experts": None}]
)
def test_another_model_that_trains_live_is_taken_by_request(tmp_path, model):
    """No router could be compared; under `any` none is."""
    written(tmp_path, [sampled_by(3, sample=0), sampled_by(3, sample=1)], info=INFO)
    opened(tmp_path, moe_router_replay=False)
    with pytest.raises(
        ValueError, match=r"sampled from another model .*give --rollouts-policy any"
    ):
        opened(tmp_path, moe_router_replay=False, **model)
    opened(tmp_path, moe_router_replay=False, rollouts_policy="any", **model)


@pytest.mark.parametrize("advantages", ["group-normalised", "group-centred"])
def test_one_sample_a_prompt_has_no_advantage(tmp_path: Path, advantages: str) -> None:
    alone = [replace(sampled_by(3), group=g, advantage=1.0) for g in range(4)]
    written(tmp_path / "alone", alone, info=INFO)
    more = {"rollouts_advantages": advantages}
    message = f"only one of its prompt, so every advantage is 0 .*{advantages}"
    for follow in (None, 0.0):
        with pytest.raises(ValueError, match=message):
            opened(tmp_path / "alone", rollouts_follow=follow, **more)
    opened(tmp_path / "alone", rollouts_advantages="stored")
    written(tmp_path / "one group", [*alone, replace(alone[0], sample=1)], info=INFO)
    opened(tmp_path / "one group", **more)


@pytest.mark.parametrize(
    ("rewards", "advantages", "is_said"),
    [
        ([1.0, 1.0], "group-normalised", True),
        ([1.0, 0.0], "group-normalised", False),
        ([1.0, 0.0], "stored", True),  # rollouts have advantages of 0
    ],
)
def test_rewards_from_which_nothing_is_learned_are_said(tmp_path, rewards, advantages, is_said):
    pairs = enumerate(rewards)
    rollouts = [replace(sampled_by(3, sample=i), reward=r, advantage=0.0) for i, r in pairs]
    store = written(tmp_path, rollouts, info=INFO)
    lines = warnings(options_of(**MODEL, rollouts_advantages=advantages), store)
    assert any("every advantage is 0" in line for line in lines) is is_said


def test_settings_that_the_store_does_not_know_are_said(tmp_path: Path) -> None:
    options = options_of(**MODEL)
    rollouts = [sampled_by(3, sample=i) for i in range(2)]
    unsaid = replace(INFO, sampling=SamplingSettings(temperature=1.0, top_p=1.0))
    said = replace(INFO, sampling=SamplingSettings(1.0, 1.0, 0, 0.0))
    for name, info in (("unsaid", unsaid), ("said", said)):
        lines = warnings(options, written(tmp_path / name, rollouts, info=info))
        assert any("with which top_k, min_p it was sampled" in line for line in lines) is (
            name == "unsaid"
        )


def lags(*batches: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """What a step logs of its micro-batches."""
    metrics = UpdateMetrics()
    for items in batches:
        batch = torch.utils.data.default_collate(items)
        logprobs_BS = torch.full(batch["labels"].shape, -3.0)
        first_B1 = torch.arange(len(items))[:, None]
        terms = LossTerms(
            logprobs_BS,
            logprobs_BS,
            batch["sampled_logprobs"],
            batch["advantages"],
            batch["loss_mask"],
            Sequences(first_B1 + batch["document"], len(items), None),
        )
        options = LossOptions()
        metrics.add(update_of(terms, options), options.clip, None, batch, batch)
    values = metrics.values(torch.device("cpu"))
    return {name: value for name, value in values.items() if "lag" in name}


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("base", [0, 10**9])  # a version may be a time in seconds
def test_lags_that_are_logged_are_those_of_tokens(tmp_path: Path, base: int) -> None:
    old, new = (1, 3, 5), (4,)
    rollouts = [
        sampled_by(*(base + v for v in versions), sample=i) for i, versions in enumerate((old, new))
    ]
    data = RolloutDataset(written(tmp_path, rollouts), UseOfRollouts(8, Schedule(2)))
    # behind version 5: the four tokens of rollout 0 by 4 2 0 0, those of rollout 1 by 1 each
    want = {"policy lag": (4 + 2 + 0 + 0 + 4 * 1) / 8, "policy lag max": 4}
    assert lags([data[0], data[1]]) == pytest.approx(want, abs=1e-6)
    assert lags([data[0]], [data[1]]) == pytest.approx(want, abs=1e-6)  # two micro-batches
    prompt = {**data[1], "loss_mask": torch.zeros(8)}  # a rank of CP may hold a prompt alone
    alone = {"policy lag": 6 / 4, "policy lag max": 4}
    assert lags([data[0]], [prompt]) == pytest.approx(alone, abs=1e-6)
    assert lags([data[1]]) == {"policy lag": 0, "policy lag max": 0}
    # control: were a rollout's own version taken, its oldest one, all four tokens would be behind
    assert not math.isclose(want["policy lag"], (4 * 3) / 8)


@pytest.mark.usefixtures("_one_rank")
def test_a_step_without_response_tokens_logs_nothing(tmp_path: Path) -> None:
    data = RolloutDataset(written(tmp_path, SHARDS[0]), UseOfRollouts(8, Schedule(2)))
    assert lags([{**data[0], "loss_mask": torch.zeros(8)}]) == {}
