"""What is said of a store, and which stores are refused, with the place that is wrong.

Shape suffixes (docs/glossary.md): K, L, N, T.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file as save_torch
from stored import INFO, make_rollout, rewrite

from megatron_r3.cli import main
from megatron_r3.collect.inspect import inspect_store, text_of
from megatron_r3.collect.prompt_plan import read_model
from megatron_r3.data.store import Rollout, RolloutStore, write_shard
from megatron_r3.data.store.schema import SamplingSettings
from megatron_r3.replay.routes import Routes

CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 6,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0, 3, 4],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 50,
}
ROLLOUTS = [
    replace(make_rollout(n, seed=n, group=i // 2, reward=float(i % 3)), sample=i % 2)
    for i, n in enumerate((5, 9, 3, 12, 4, 7))
]


def stuck(rollout):
    """Its first row again and again."""
    ids = np.repeat(rollout.routes.ids_LTK[:, :1], rollout.routes.num_rows, axis=1)
    return replace(rollout, routes=Routes.from_array(ids, 16))


def save_routers(folder, **seeds):
    """The weights of the routers, made from seeds: by default the layer's number."""
    weights = {}
    for i in INFO.moe_layers:
        generator = torch.Generator().manual_seed(seeds.get(f"layer_{i}", i))
        weights[f"model.layers.{i}.mlp.gate.weight"] = torch.randn(16, 8, generator=generator)
    save_torch(weights, folder / "model.safetensors")


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_routers(folder)
    return folder


@pytest.fixture
def store(tmp_path, model):
    info = replace(INFO, router_fingerprint=read_model(model).router_fingerprint)
    write_shard(tmp_path / "s", info, ROLLOUTS[:4])
    write_shard(tmp_path / "s", info, ROLLOUTS[4:])
    return tmp_path / "s"


def test_numbers(store):
    stats = inspect_store(store)
    tokens = [len(r.tokens_N) for r in ROLLOUTS]
    sampled = [n - 2 for n in tokens]
    assert (stats["rollouts"], stats["shards"], stats["tokens"]) == (6, 2, sum(tokens))
    assert (stats["prompts"], stats["rollouts_per_prompt"]) == (3, [2, 2])
    assert stats["prompts_of_one_reward"] == 0
    assert stats["policy_versions"] == {"7": 6}
    assert stats["reward"]["mean"] == 1
    assert stats["reward"]["std"] == pytest.approx(np.std([0, 1, 2]))
    assert stats["response_tokens"] == sum(sampled)
    assert stats["response_length"]["median"] == np.median(sampled)
    total = sum(float(r.logprobs_N.sum()) for r in ROLLOUTS)
    assert stats["logprob_mean"] == pytest.approx(total / sum(sampled))
    assert stats["bytes"] == sum(p.stat().st_size for p in store.iterdir())
    assert (stats["missing_rows"], stats["repeated_rows"]) == (0, 0)
    for layer in range(3):
        ids = np.concatenate([r.routes.ids_LTK[layer].ravel() for r in ROLLOUTS])
        counts = np.bincount(ids, minlength=16)
        got = stats["layers"][layer]
        assert got["layer"] == INFO.moe_layers[layer]
        assert got["experts"] == counts.tolist()
        assert got["uneven"] == pytest.approx(counts.max() / counts.mean())
        assert got["unused"] == (counts == 0).sum()
    assert (
        stats["all_layers"]["experts"]
        == np.sum([layer["experts"] for layer in stats["layers"]], axis=0).tolist()
    )


def test_a_stuck_capture_and_missing_rows_show(tmp_path, capsys):
    recorded = np.ones(11, bool)
    recorded[[4, 5]] = False
    ids = ROLLOUTS[3].routes.ids_LTK
    missing = replace(ROLLOUTS[3], routes=Routes.from_array(ids, 16, recorded))
    write_shard(tmp_path / "s", INFO, [stuck(ROLLOUTS[1]), missing])
    stats = inspect_store(tmp_path / "s")
    assert stats["missing_rows"] == 2 / (8 + 11)
    assert stats["repeated_rows"] == 7 / (7 + 10 - 3)  # pairs of which a row is missing are none
    assert [layer["repeated_rows"] for layer in stats["layers"]] == [0.5] * 3
    assert main(["rollouts", "inspect", str(tmp_path / "s")]) == 0
    assert "\nrepeated rows             0.5\n" in capsys.readouterr().out


def test_stores_side_by_side_and_for_programs(store, tmp_path, capsys):
    said = SamplingSettings(1.0, 0.95, 0, 0.0, 64)
    info = replace(INFO, policy_stamp="ab12", engine_policy="v7", vocab_size=512, sampling=said)
    write_shard(tmp_path / "other", info, ROLLOUTS[:1])
    arguments = ["rollouts", "inspect", str(store), str(tmp_path / "other")]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:26].strip(): line[26:].split() for line in lines}
    assert rows["rollouts"] == ["6", "1"]
    assert rows["sampling top p"] == ["-", "0.95"]
    assert rows["policy stamps"] == ["-", "ab12"]
    assert rows["engine policies"] == ["-", "v7"]
    assert main([*arguments, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["rollouts"], second["rollouts"]) == (6, 1)
    assert second["sampling"] == vars(said)
    assert first["sampling"] == dict.fromkeys(vars(said))
    assert (first["policy_stamps"], second["policy_stamps"]) == ([], ["ab12"])


def test_texts_of_a_store_do_not_reach_the_terminal_as_they_are(store, tmp_path, capsys):
    """A folder's name is anything but / and NUL; the other texts are whoever's wrote the shard."""
    folder = tmp_path / "\x1b[31mred\nand more\u202e"
    store.rename(folder)
    assert main(["rollouts", "inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "red and more\\u202e" in out
    assert main(["rollouts", "verify", str(folder)]) == 0
    out += capsys.readouterr().out
    assert all(line.isprintable() for line in out.splitlines())
    stats = inspect_store(folder)
    for name in ("engine", "engine_version", "model"):
        wrong = {**stats, name: "\x1b]0;title\x07" + "x" * 10**6}
        text = text_of([wrong])
        assert all(line.isprintable() for line in text.splitlines())
        assert len(text) < 20_000
    wrong = {**stats, "policy_stamps": ["\x1b[2J"], "router_fingerprints": [["\x1b[2J"]]}
    assert text_of([wrong]).count("\\x1b[2J") == 2
    many = {**stats, "policy_stamps": [f"s{n}" for n in range(16)]}
    assert "16 values, see --json" in text_of([many])
    row = {"rollouts": 1, "reward": 0.0, "response_length": 1.0, "policies": ["\x1b[2J"]}
    text = text_of([{**stats, "by_version": {"0": row, "1": row}}])
    assert all(line.isprintable() for line in text.splitlines())
    assert main(["rollouts", "inspect", str(folder), "--json"]) == 0
    assert capsys.readouterr().out[:-1].isprintable()


def test_impossible_logprobs_are_warned_of(tmp_path, capsys, monkeypatch):
    wrong = [replace(one, logprobs_N=one.logprobs_N.copy()) for one in ROLLOUTS[:3]]
    wrong[1].logprobs_N[5] = -9999
    wrong[2].logprobs_N[2] = 5
    # as a writer does that asks nobody
    monkeypatch.setattr(Rollout, "check", lambda *given: None)
    write_shard(tmp_path / "s", INFO, wrong)
    monkeypatch.undo()
    stats = inspect_store(tmp_path / "s")
    path = tmp_path / "s" / "shard-00000.safetensors"
    assert stats["impossible_logprobs"][0].startswith(
        f"{path}: rollout 1: the log-prob of token 5 is -9999"
    )
    assert len(stats["impossible_logprobs"]) == 2
    assert main(["rollouts", "inspect", str(tmp_path / "s")]) == 0
    output = capsys.readouterr()
    assert output.err.startswith(f"warning: {path}: rollout 1: the log-prob of token 5 is -9999")
    assert output.err.endswith("(and in 1 other rollouts); training refuses such a log-prob\n")
    assert output.err.count("\n") == 1


def test_verify_says_what_it_checked(store, model, capsys):
    assert main(["rollouts", "verify", str(store)]) == 0
    assert capsys.readouterr().out == f"{store}: 6 rollouts in 2 shards, every byte and id\n"
    assert main(["rollouts", "verify", str(store), "--model", str(model)]) == 0
    assert capsys.readouterr().out.endswith(", model's shape and router weights\n")
    config = str(model / "config.json")
    assert main(["rollouts", "verify", str(store), "--model", config]) == 0
    output = capsys.readouterr()
    assert output.out.endswith(", model's shape\n")
    assert "router weights not compared" in output.err


def refused(capsys, *arguments) -> str:
    assert main(["rollouts", "verify", *map(str, arguments)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_verify_names_what_is_wrong(store, model, capsys):
    path = store / "shard-00001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert str(path) in refused(capsys, store)
    path.write_bytes(whole)
    tensors = load_file(path)
    info = RolloutStore([store]).info
    routes = tensors["routes"].copy()
    routes[1, 3 + 2, 0] = 99
    rewrite(path, routes=routes)
    error = refused(capsys, store)
    assert f"{path}: rollout 1: " in error
    assert "at MoE layer 1, token 2" in error
    assert main(["rollouts", "inspect", str(store)]) == 1
    assert "rollouts verify says where" in capsys.readouterr().err
    path.write_bytes(whole)
    write_shard(store, info, ROLLOUTS[1:2])
    error = refused(capsys, store)
    assert (
        "00002.safetensors: rollout 0 is sample 1 of group 0, policy version 7: the same as"
        in error
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_only_layers": [0, 1, 3, 4]}, "MoE layers [1, 2, 5], and model has [2, 5]"),
        ({"num_experts": 32}, "experts 16, and model has 32"),
        ({"num_experts_per_tok": 2}, "top-k 4, and model has 2: give --model the model that"),
        ({"vocab_size": 40}, "ids go from 0 to 39"),
    ],
)
def test_another_model_is_refused(store, model, capsys, change, message):
    (model / "config.json").write_text(json.dumps({**CONFIG, **change}))
    assert message in refused(capsys, store, "--model", model)


def test_other_router_weights_are_refused(store, model, capsys):
    save_routers(model, layer_2=9)
    error = refused(capsys, store, "--model", model)
    assert "in 1 of 3 MoE layers, the first is hidden layer 2" in error
    save_torch({"x": torch.zeros(1)}, model / "model.safetensors")
    assert "to store no digests of the weights" in refused(capsys, store, "--model", model)


def test_other_weights_are_refused_where_the_routers_are_the_same(tmp_path, model, capsys):
    weights = read_model(model)
    info = replace(
        INFO, router_fingerprint=weights.router_fingerprint, policy_stamp=weights.policy_stamp
    )
    write_shard(tmp_path / "same", info, ROLLOUTS)
    assert main(["rollouts", "verify", str(tmp_path / "same"), "--model", str(model)]) == 0
    assert "model's shape and weights" in capsys.readouterr().out
    write_shard(tmp_path / "other", replace(info, policy_stamp="0" * 16), ROLLOUTS)
    error = refused(capsys, tmp_path / "other", "--model", model)
    assert "sampled by other weights than model's, but by the same routers: the shard's" in error
    assert "stamp is 000" in error


def policies(folder, seeds):
    """A folder of published policies, with router weights of these seeds, and their headers."""
    infos = []
    for version, seed in enumerate(seeds):
        path = folder / f"v{version:06d}"
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(CONFIG))
        save_routers(path, **{f"layer_{i}": 10 * seed + i for i in INFO.moe_layers})
        made = read_model(path)
        fields = {"router_fingerprint": made.router_fingerprint, "policy_stamp": made.policy_stamp}
        infos.append(replace(INFO, **fields))
    return infos


def of_version(version):
    return [replace(one, policy_version=version) for one in ROLLOUTS]


def test_each_rollout_is_checked_with_its_own_policy(tmp_path, capsys):
    folder = tmp_path / "policies"
    infos = policies(folder, (0, 1, 2))
    for version, info in enumerate(infos):
        write_shard(tmp_path / "s", info, of_version(version))
    argv = ["rollouts", "verify", str(tmp_path / "s"), "--model", str(folder)]
    assert main(argv) == 0
    said = f"{tmp_path}/s: 18 rollouts in 3 shards, every byte and id, "
    of_all = "the shape and weights of 3 policies\n"
    assert capsys.readouterr() == (said + of_all, "")
    # a version whose folder is gone is named
    (folder / "v000001").rename(tmp_path / "gone")
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert out == said + of_all.replace("3", "2")
    reason = "1 of 3 shards not compared, the first is shard-00001.safetensors: their policy "
    assert err.startswith(f"{tmp_path}/s: {reason}")
    # controls: one policy alone is not that of all shards; a shard of another version's policy
    assert "sampled by other router weights than v000002's" in refused(
        capsys, tmp_path / "s", "--model", folder / "v000002"
    )
    write_shard(tmp_path / "swapped", infos[2], of_version(0))
    error = refused(capsys, tmp_path / "swapped", "--model", folder)
    assert "sampled by other router weights than v000000's in 3 of 3 MoE layers" in error


def test_a_shard_of_several_versions_is_named(tmp_path, capsys):
    info, _ = policies(tmp_path / "policies", (0, 1))
    write_shard(tmp_path / "s", info, [*of_version(0)[:3], *of_version(1)[3:]])
    argv = ["rollouts", "verify", str(tmp_path / "s"), "--model", str(tmp_path / "policies")]
    assert main(argv) == 0
    reason = "1 of 1 shards not compared, the first is shard-00000.safetensors"
    assert reason in capsys.readouterr().err
