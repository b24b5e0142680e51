"""Kept sets, version spans and advantages through `rollouts convert` and `rollouts inspect`.

Shape suffixes (docs/glossary.md): C, N, V.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_r3.cli import main
from megatron_r3.data.store import RolloutStore, write_shard
from tests.unit.data.store.test_extras import ALL, CUT

DATA = Path(__file__).parents[2] / "data/sglang/sglang-0.5.23-qwen3moe-fp32"
RECORDED = json.loads((DATA / "kept_and_versions.json").read_text())


@pytest.fixture
def store(folder):
    write_shard(folder / "store", CUT, ALL[:3])
    write_shard(folder / "store", CUT, ALL[3:])
    return folder / "store"


def convert(lines: list[dict], *more: str) -> int:
    Path("r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = "rollouts convert responses r.jsonl --engine sglang --model config.json --out new"
    return main([*arguments.split(), *more])


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


# -- responses


def test_a_recorded_response_keeps_its_sets_and_versions(folder):
    assert convert([{**RECORDED, "reward": 1.0}]) == 0
    store = RolloutStore(["new"])
    store.verify()
    assert store.info.sampling.logprobs_of == "processed"
    assert store.column("policy_version").tolist() == [3]
    assert store.versions(0).tolist() == [-1] * 4 + [3] + [4] * 39
    masks = RECORDED["response"]["meta_info"]["output_token_sampling_mask"]
    kept = store.kept(0)
    assert [kept.of(4 + i).tolist() for i in range(40)] == [sorted(mask) for mask in masks]


def test_another_policy_version_than_the_engines_is_refused(folder, capsys):
    line = {**RECORDED, "reward": 1.0}
    assert convert([line], "--policy-version", "7") == 1
    assert error_of(capsys).endswith(
        "r.jsonl, line 1, choice 0: the engine's versions [3, 4] sampled it, and --policy-version "
        "says 7: leave --policy-version out to store the engine's versions"
    )
    assert not Path("new").exists()
    assert convert([line], "--policy-version", "3") == 0


def of_version(version: str) -> dict:
    line = json.loads(json.dumps({**RECORDED, "reward": 1.0}))
    meta = line["response"]["meta_info"]
    meta |= {"weight_version": version, "weight_versions": None}
    return line


def test_one_version_names_the_policy_if_it_is_a_number(folder):
    assert convert([of_version("4"), of_version("default"), {**RECORDED, "reward": 0.0}]) == 0
    store = RolloutStore(["new"], mixed_policies=True)
    assert store.column("policy_version").tolist() == [4, 0, 3]


def test_responses_with_and_without_masks_are_not_one_store(folder, capsys):
    bare = of_version("4")
    del bare["response"]["meta_info"]["output_token_sampling_mask"]
    assert convert([{**RECORDED, "reward": 1.0}, bare]) == 1
    assert "logprobs_of is not given here and 'processed' in r.jsonl, line 1" in error_of(capsys)


# -- tables


def test_a_table_has_them_and_a_plain_store_has_no_such_columns(store, folder):
    assert main("rollouts convert to-parquet store --out t.parquet".split()) == 0
    table = pq.read_table("t.parquet").to_pylist()
    for row, rollout in zip(table, ALL, strict=True):
        assert row["advantage"] == rollout.advantage
        if rollout.kept is None:
            assert (row["kept_sizes"], row["kept_ids"], row["versions"]) == (None, None, None)
            continue
        assert row["kept_sizes"] == rollout.kept.sizes_N.tolist()
        assert row["kept_ids"] == rollout.kept.ids_V.tolist()
        assert row["versions"] == rollout.versions_C2.tolist()
    plain = [replace(r, kept=None, versions_C2=None, advantage=None) for r in ALL]
    write_shard(folder / "plain", CUT, plain)
    assert main("rollouts convert to-parquet plain --out p.parquet".split()) == 0
    names = pq.read_schema("p.parquet").names
    assert not {"advantage", "kept_sizes", "kept_ids", "versions"} & {*names}


def back(table: pa.Table) -> int:
    pq.write_table(table, "n.parquet")
    return main("rollouts convert from-parquet n.parquet --store store --out new".split())


def test_new_rewards_come_with_new_advantages(store, capsys):
    assert main("rollouts convert to-parquet store --out t.parquet".split()) == 0
    table = pq.read_table("t.parquet")
    new = [0.5, None, 0.25, -1.0, 2.0]
    column = table.schema.get_field_index("advantage")
    assert back(table.set_column(column, "advantage", pa.array(new, pa.float64()))) == 0
    got, old = RolloutStore(["new"]), RolloutStore(["store"])
    got.verify()
    for index, advantage in enumerate(new):
        rollout, before = got.rollout(index), old.rollout(index)
        assert rollout.advantage == advantage
        assert (rollout.kept is None) == (before.kept is None)
        if before.kept is not None:
            assert np.array_equal(rollout.kept.ids_V, before.kept.ids_V)
            assert np.array_equal(rollout.versions_C2, before.versions_C2)
    capsys.readouterr()


def test_old_advantages_beside_new_rewards_are_refused(store, capsys):
    assert main("rollouts convert to-parquet store --out t.parquet".split()) == 0
    table = pq.read_table("t.parquet")
    assert back(table.drop_columns(["advantage"])) == 1
    assert "no column advantage: the store's advantages belong to the old rew" in error_of(capsys)
    column = table.schema.get_field_index("advantage")
    infinite = pa.array([float("inf")] * 5)
    assert back(table.set_column(column, "advantage", infinite)) == 1
    assert "has advantage inf; a reward is finite, in float32" in error_of(capsys)
    reward = table.schema.get_field_index("reward")
    scored = table.set_column(reward, "reward", pa.array([3.0 + i for i in range(5)]))
    assert back(scored) == 1
    assert "changed and none of their advantages, which belong to the old" in error_of(capsys)
    assert not Path("new").exists()
    # a new advantage in one group says nothing of the others
    old, groups = (table.column(name).to_pylist() for name in ("advantage", "group"))
    stale = [9.0 if group == groups[-1] else a for a, group in zip(old, groups, strict=True)]
    assert back(scored.set_column(column, "advantage", pa.array(stale, pa.float64()))) == 1
    assert f", group {groups[0]} changed and none of their" in error_of(capsys)
    # what is taken: another advantage in each group, none at all, or the old rewards
    for number, column_of in enumerate(([9.0] * 5, [None] * 5)):
        taken = scored.set_column(column, "advantage", pa.array(column_of, pa.float64()))
        pq.write_table(taken, "n.parquet")
        out = f"taken-{number}"
        assert (
            main(f"rollouts convert from-parquet n.parquet --store store --out {out}".split()) == 0
        )
    assert back(table) == 0


@pytest.mark.parametrize(
    ("advantages", "rewards", "refused"),
    [
        ([2.0, -2.0], [3.0, 4.0], True),
        ([0.0, 0.0], [3.0, 4.0], True),
        ([0.0, 0.0], [3.0, 3.0], False),  # advantages of equal rewards are 0
    ],
)
def test_new_advantages_in_another_version_of_the_group(
    folder, capsys, advantages, rewards, refused
):
    plain = replace(ALL[0], group=1, reward=1.0, versions_C2=None)
    old = [
        replace(plain, sample=i, advantage=given, policy_version=version)
        for version, both in ((7, advantages), (8, [1.0, 1.0]))
        for i, given in enumerate(both)
    ]
    write_shard(folder / "store", CUT, old)
    assert main("rollouts convert to-parquet store --out t.parquet".split()) == 0
    table = pq.read_table("t.parquet")
    for name, new in (("reward", [*rewards, 3.0, 4.0]), ("advantage", [*advantages, 5.0, 6.0])):
        column = table.schema.get_field_index(name)
        table = table.set_column(column, name, pa.array(new, pa.float64()))
    assert back(table) == refused
    if refused:
        assert "2 rewards of policy version 7, group 1 changed and none" in error_of(capsys)


# -- inspect


def test_inspect_shows_them(store, capsys):
    assert main(["rollouts", "inspect", "store"]) == 0
    shown = capsys.readouterr().out
    sampled = sum(int(rollout.response_N.sum()) for rollout in ALL)
    kept = sum(int(rollout.response_N.sum()) for rollout in ALL if rollout.kept)
    ids = sum(len(rollout.kept.ids_V) for rollout in ALL if rollout.kept)
    newer = sum(int((RolloutStore(["store"]).versions(i) == 9).sum()) for i in range(5))
    for version, share in ((7, 1 - newer / sampled), (9, newer / sampled)):
        assert re.search(rf"^{version} .* {share:.4g} ", shown, re.MULTILINE)
    rows = dict(line.rsplit(maxsplit=1) for line in shown.splitlines() if line.count("  "))
    assert rows["kept share"] == f"{kept / sampled:.4g}"
    assert rows["kept size"] == f"{ids / kept:.4g}"
    assert rows["advantages"] == "0.8"
    assert rows["sampling logprobs of"] == "processed"
