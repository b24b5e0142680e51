"""A collection goes on with the same prompts alone: token ids, texts and chats."""

import json
from dataclasses import replace

import numpy as np
import pytest
from engine_server import CHAT, PROMPTS, command, engine, write_inputs
from stored import INFO, ROLLOUTS

from megatron_r3.cli import main
from megatron_r3.collect.prompts import Prompt
from megatron_r3.collect.resume import stored_samples
from megatron_r3.data.store import RolloutStore, StoreError, write_shard


@pytest.fixture
def folder(empty_folder):
    write_inputs(empty_folder, 1)
    return empty_folder


def chat(text):
    message = CHAT["request"]["messages"][0]
    return {"messages": [{**message, "content": text}]}


OF_KIND = {
    "ids": [{"prompt": list(prompt)} for prompt in PROMPTS[:4]],
    "text": [{"prompt": f"question {i}"} for i in range(4)],
    "chat": [chat(f"question {i}") for i in range(4)],
}


def write_prompts(folder, lines):
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("kind", OF_KIND)
def test_other_prompts_are_refused_and_nothing_is_sampled(folder, capsys, kind):
    lines = OF_KIND[kind]
    write_prompts(folder, lines[:3])
    with engine() as server:
        assert main(command(server.url, 2)) == 0
        asked = server.asked.total()
        capsys.readouterr()
        write_prompts(folder, [lines[3], *lines[1:3]])
        assert main(command(server.url, 2)) == 1
        assert capsys.readouterr().err.splitlines()[1:] == [
            "error: prompts.jsonl, line 1: store/shard-00000.safetensors: rollout 0 of this line's "
            "group 0 was sampled from another prompt: give the new prompts another --out, "
            "or a `group` of their own"
        ]
        write_prompts(folder, [lines[3], *lines[:3]])  # a line more in front: all groups shift
        assert main(command(server.url, 4)) == 1
        assert "line 1: " in capsys.readouterr().err
        assert server.asked.total() == asked
        write_prompts(folder, [*lines[:3], lines[3]])
        assert main(command(server.url, 3)) == 0
        assert main(command(server.url, 3, "--policy-version", "1")) == 0
        write_prompts(folder, [lines[3]])  # another policy version is another matter
        assert main(command(server.url, 1, "--policy-version", "2")) == 0
    store = RolloutStore([folder / "store"], mixed_policies=True)
    assert np.bincount(store.column("policy_version")).tolist() == [12, 12, 1]


STAMPED = replace(INFO, policy_stamp="a" * 16)


@pytest.mark.parametrize(
    ("info", "version", "pushed"),
    [
        (STAMPED, 7, False),
        (replace(STAMPED, policy_stamp="b" * 16), 8, False),
        (replace(STAMPED, engine_policy="v8"), 8, False),
        (STAMPED, 8, True),  # the loop has given the engine version 8, which has the same weights
        (replace(STAMPED, policy_stamp="", router_fingerprint=()), 8, False),
    ],
)
def test_another_version_has_other_weights(tmp_path, info, version, pushed):
    prompts = [Prompt("line 1", 10**6, [1, 2], {})]
    write_shard(tmp_path / "s", STAMPED, ROLLOUTS)
    stored = stored_samples(tmp_path / "s", info, version, prompts, pushed)
    assert len(stored.samples) == (5 if version == 7 else 0)
    message = (
        "shard-00000.*policy version 7 were sampled by the weights of --model, which are --pol"
    )
    with pytest.raises(StoreError, match=message):
        stored_samples(tmp_path / "s", STAMPED, 8, prompts)
    # an engine that names its version in responses alone
    write_shard(tmp_path / "v7", replace(STAMPED, engine_policy="v7"), ROLLOUTS)
    with pytest.raises(StoreError, match=message):
        stored_samples(tmp_path / "v7", STAMPED, 8, prompts)
    assert stored_samples(tmp_path / "v7", STAMPED, 7, prompts).engine_policy == "v7"


OTHER = "was sampled from another prompt: give the new prompts another --out"
NONE = "the store has no digest of the rollout's prompt, so the prompts cannot be compared"


@pytest.mark.parametrize("content", [[1, 2], "text", [{"role": "user", "content": "text"}]])
@pytest.mark.parametrize("rollout", range(3))
def test_every_rollout_of_a_group_is_compared(tmp_path, content, rollout):
    """Not only the first of its group: one that another run added may have another prompt."""
    prompts = [Prompt("line 1", 4, content, {}), Prompt("line 2", 9, [7], {})]
    digest = prompts[0].digest
    for out, changed, message in (("a", digest, ""), ("b", digest ^ 4, OTHER), ("c", 0, NONE)):
        made = [replace(one, prompt_digest=digest, group=4, sample=i)
                for i, one in enumerate(ROLLOUTS[:3])]  # fmt: skip
        made[rollout] = replace(made[rollout], prompt_digest=changed)
        write_shard(tmp_path / out, INFO, made)
        if not message:
            assert len(stored_samples(tmp_path / out, INFO, 7, prompts).samples) == 3
            continue
        name = f"^line 1: .*: rollout {rollout} of this line's group 4.* {message}"
        with pytest.raises(StoreError, match=name):
            stored_samples(tmp_path / out, INFO, 7, prompts)


def test_only_what_differs_is_said(folder, capsys):
    write_prompts(folder, OF_KIND["ids"])
    config = json.loads((folder / "config.json").read_text())
    with engine() as server:
        assert main(command(server.url, 1)) == 0
        capsys.readouterr()
        for changed, more, field in (
            ({"vocab_size": 513}, [], "vocab_size"),
            ({}, ["--max-tokens", "512"], "max_tokens"),
        ):
            (folder / "config.json").write_text(json.dumps({**config, **changed}))
            assert main(command(server.url, 2, *more)) == 1
            error = capsys.readouterr().err.splitlines()[-1]
            assert "shard-00000.safetensors: its rollouts were not collected as this" in error
            assert field in error
            for other in ("num_experts", "moe_layers", "StoreInfo", "router_fingerprint"):
                assert other not in error
            assert error.endswith("give another --out")
            assert len(error) < 300


def test_digests():
    def digest(content):
        return Prompt("line 1", 0, content, {}).digest

    contents = [[1, 2], [12], "[1,2]", "a", "ä", [{"a": "x", "b": 1}], [{"a": "x", "b": "1"}]]
    digests = [digest(content) for content in contents]
    assert len({*digests}) == len(contents)
    assert all(0 < one < 2**63 for one in digests)
    assert digest([{"b": 1, "a": "x"}]) == digests[5]  # the order of keys says nothing
    # written down, so that stores of today are known tomorrow
    assert digest([1, 2]) == 0x60093425FA1B8BB
