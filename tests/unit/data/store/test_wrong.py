"""Whole shards, with checksums that fit, that say what cannot be: one error with the file.

Shape suffixes (docs/glossary.md): K, L, N, T.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file
from stored import INFO, ROLLOUTS, header_of, opened, rewrite, rewrite_header, rewrite_layout

from megatron_r3.data.store import RolloutStore, StoreError, write_shard

SHARD = "shard-00000.safetensors"  # rollouts of 5 and 9 tokens: 14 tokens, 12 rows


WRONG = {
    "reward is F32 (1,); 2 rollouts with 14 tokens and 16 experts need F32 (2,)": {
        "reward": np.ones(1, np.float32)
    },
    "num_tokens is F64 (2,); 2 rollouts": {"num_tokens": np.array([5.0, 9.0])},
    "num_tokens has 2 dimensions, not 1": {"num_tokens": np.array([[5, 9]])},
    "reward is C64 (2,)": {"reward": np.ones(2, np.complex64)},
    "routes is I64 (3, 12, 4); 2 rollouts with 14 tokens and 16 experts need U8 (3, 12, 4): one "
    "row for every token of a rollout but its last": {"routes": np.zeros((3, 12, 4), np.int64)},
    "routes is C64 (3, 12, 4)": {"routes": np.zeros((3, 12, 4), np.complex64)},
    "turns is I32 (3,)": {"turns": np.zeros(3, np.int32)},
    "block_crc32 is U32 (2, 6)": {"block_crc32": np.zeros((2, 6), np.uint32)},
    "num_tokens: 1 of rollout 0; possible are 2 to 14": {"num_tokens": np.array([1, 13])},
    "num_tokens: -5 of rollout 0; possible are 2 to 14": {"num_tokens": np.array([-5, 19])},
    "num_tokens: the counts of its rollouts add up to 12; there are 14": {
        "num_tokens": np.array([5, 7])
    },
    "num_turns: -1 of rollout 0; possible are 0 to 2": {"num_turns": np.array([-1, 3])},
    "num_turns: the counts of its rollouts add up to 3; there are 2": {
        "num_turns": np.array([1, 2])
    },
    "rollout 1: reward inf: a reward is finite, in float32": {
        "reward": np.array([1, np.inf], np.float32)
    },
    "rollout 1: policy_version -3: a whole number from 0 on": {"policy_version": np.array([7, -3])},
    "rollout 0: sample -1: a whole number from 0 on": {"sample": np.array([-1, 0])},
    "rollout 1: prompt_digest must not be negative": {"prompt_digest": np.array([0, -1])},
    "rollout 0: recorded must be 0 or 1": {"recorded": np.full(12, 2, np.uint8)},
    "rollout 0: its `turns` and its `response` name different tokens": {
        "turns": np.array([2, 6, 3, 9], np.int32)
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_impossible_tensors(store_dir, message):
    path = store_dir / SHARD
    rewrite(path, **WRONG[message])
    with pytest.raises(StoreError) as refusal:
        opened(store_dir)
    assert str(refusal.value).startswith(f"{path}: {message}")


TOKENS = {  # tensor, element, value
    "rollout 1: token 3: its log-prob is nan, which is not finite": ("logprobs", 8, np.nan),
    "rollout 1: token 3: its log-prob is -9999, which vLLM sends": ("logprobs", 8, -9999),
    "rollout 1: token 3: its log-prob is -95, below -64": ("logprobs", 8, -95),
    "rollout 1: token 3: its log-prob is 5: a probability above 1": ("logprobs", 8, 5),
    "rollout 1: token 1: its log-prob is -1; it was not sampled, so 0": ("logprobs", 6, -1),
    "rollout 1: token 4 is id -7; the vocabulary has ids 0 to 2147483647": ("tokens", 9, -7),
    "rollout 1: its first token cannot be sampled": ("response", 5, 1),
}


@pytest.mark.parametrize("message", TOKENS)
def test_impossible_values_of_a_token(store_dir, message):
    path, (name, element, value) = store_dir / SHARD, TOKENS[message]
    tensor = load_file(path)[name]
    tensor[element] = value
    rewrite(path, **{name: tensor})
    with pytest.raises(StoreError) as refusal:
        opened(store_dir)
    assert str(refusal.value).startswith(f"{path}: {message}")


def test_values_at_the_bounds_are_accepted(store_dir):
    path = store_dir / SHARD
    tensors = load_file(path)
    tensors["logprobs"][8:10] = -64, 1e-5
    tensors["tokens"][3] = 2**31 - 1
    tensors["reward"][0] = np.finfo(np.float32).max
    del tensors["block_crc32"]
    rewrite(path, **tensors)
    opened(store_dir)


@pytest.mark.parametrize("name", ["num_turns", "num_tokens"])
def test_counts_that_wrap_around_are_refused_in_one_piece(tmp_path, name):
    """Four counts of 2**62 are 0 in int64: the sum fits, and numpy wrote 2**62 numbers.

    In a process of its own, so that a crash shows as a failure.
    """
    path = write_shard(tmp_path / "s", INFO, ROLLOUTS)
    total = {"num_turns": 5, "num_tokens": 33}[name]
    rewrite(path, **{name: np.array([2**62] * 4 + [total])})
    assert load_file(path)[name].sum() == total
    code = "import sys; from megatron_r3.cli import main; sys.exit(main(sys.argv[1:]))"
    for command in ("verify", "inspect"):
        done = subprocess.run(
            [sys.executable, "-c", code, "rollouts", command, str(tmp_path / "s")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1, done
        least = {"num_turns": 0, "num_tokens": 2}[name]
        assert done.stderr == (
            f"error: {path}: {name}: {2**62} of rollout 0; possible are {least} to {total}\n"
        )


HEADERS = {
    "the header: not JSON": lambda body: "no JSON",
    "the header: JSON with more than 64 brackets": lambda body: "[" * 100_000,
    "the header: not JSON (Exceeds the limit": lambda body: '{"x": ' + "9" * 5000 + "}",
    "the header is no JSON object": lambda body: [],
    "'other' version 3": lambda body: {**body, "format": "other"},
    "'megatron-r3 rollouts' version 1; this megatron-r3 reads 'megatron-r3 rollouts' versions 2 "
    "and 3": lambda body: {**body, "version": 1},
    "'megatron-r3 rollouts' version 4;": lambda body: {**body, "version": 4},
    "'megatron-r3 rollouts' version 3.0;": lambda body: {**body, "version": 3.0},
    "'megatron-r3 rollouts' version True;": lambda body: {**body, "version": True},
    "number None is not the number": lambda body: {**body, "number": None},
    "number -1 is not the number": lambda body: {**body, "number": -1},
    "number False is not the number": lambda body: {**body, "number": False},
    "must_know None is no list": lambda body: {k: v for k, v in body.items() if k != "must_know"},
    "needs [], which": lambda body: {**body, "must_know": [[]]},
    "info is no JSON object; got None": lambda body: {**body, "info": None},
    "info is no JSON object; got []": lambda body: {**body, "info": []},
    "crc32 is no JSON object; got 'x'": lambda body: {**body, "crc32": "x"},
    "crc32 of 'turns': 'x' is no CRC-32": lambda body: {
        **body,
        "crc32": {**body["crc32"], "turns": "x"},
    },
    "crc32 of 'turns': 4294967296 is no CRC-32": lambda body: {
        **body,
        "crc32": {**body["crc32"], "turns": 2**32},
    },
    "crc32 has no checksum of 'turns'": lambda body: {
        **body,
        "crc32": {k: v for k, v in body["crc32"].items() if k != "turns"},
    },
}


@pytest.mark.parametrize("message", HEADERS)
def test_headers_that_cannot_be(store_dir, message):
    path = store_dir / SHARD
    rewrite_header(path, HEADERS[message](header_of(path)))
    with pytest.raises(StoreError) as refusal:
        opened(store_dir)
    assert str(refusal.value).startswith(f"{path}: {message}")
    assert "\n" not in str(refusal.value)


FIELDS = {
    "topk must be a whole number from 1 to 16; got 4.0": {"topk": 4.0},
    "topk must be a whole number from 1 to 16; got True": {"topk": True},
    "num_experts must be a whole number from 1 to 32768; got 'x'": {"num_experts": "x"},
    "num_experts must be a whole number from 1 to 32768; got 0": {"num_experts": 0},
    "moe_layers must be the numbers of hidden layers, from 0 on, ascending; got 3": {
        "moe_layers": 3
    },
    "moe_layers must be the numbers of hidden layers, from 0 on, ascending; got [[1], 2, 5]": {
        "moe_layers": [[1], 2, 5]
    },
    "model must be a text; got dict": {"model": {}},
    "engine must be a text; got NoneType": {"engine": None},
    "engine must be a text without control characters": {"engine": "\x1b[2J"},
    "engine_version must be a text of at most 200 characters; got 5000000": {
        "engine_version": "1" * 5_000_000
    },
    "router_fingerprint must be 16 hex digits for each MoE layer, or empty; got [1, 2, 3]": {
        "router_fingerprint": [1, 2, 3]
    },
    "vocab_size must be a whole number from 0 to 2147483648; got 1.5": {"vocab_size": 1.5},
    "sampling is no JSON object; got []": {"sampling": []},
    "sampling.temperature must be a number from 0 to 10000; got True": {
        "sampling": {"temperature": True}
    },
    "sampling.top_p must be a number from 0 to 1; got '1'": {"sampling": {"top_p": "1"}},
}


@pytest.mark.parametrize("message", FIELDS)
def test_infos_that_cannot_be(store_dir, message):
    path = store_dir / SHARD
    body = header_of(path)
    rewrite_header(path, {**body, "info": {**body["info"], **FIELDS[message]}})
    with pytest.raises(StoreError) as refusal:
        opened(store_dir)
    assert str(refusal.value) == f"{path}: {message}"


@pytest.mark.parametrize("name", ["num_experts", "topk", "moe_layers", "engine", "engine_version"])
def test_an_info_without_a_field(store_dir, name):
    path = store_dir / SHARD
    body = header_of(path)
    del body["info"][name]
    rewrite_header(path, body)
    with pytest.raises(StoreError, match=f"{SHARD}: info has no {name}"):
        opened(store_dir)


def entry(name, **values):
    return lambda layout: {**layout, name: {**layout[name], **values}}


LAYOUTS = {
    "not a whole shard (its header is no JSON object)": lambda layout: [],
    "not a whole shard (its __metadata__ is no JSON object)": lambda layout: {
        **layout,
        "__metadata__": 1,
    },
    "a safetensors file, but not a rollout shard": lambda layout: {
        **layout,
        "__metadata__": {"megatron_r3": 1},
    },
    "not a whole shard (tensor 'group': None is": lambda layout: {**layout, "group": None},
    "not a whole shard (tensor 'reward': {": entry("reward", shape=[-2]),
    "not a whole shard (tensor 'sample': {": entry("sample", shape=[True, 2]),
    "not a whole shard (tensor 'turns': {": entry("turns", shape=[4.0]),
    "not a whole shard (tensor 'tokens': {": entry("tokens", shape=[2**62, 2**62]),
    "not a whole shard (tensor 'routes': {": entry("routes", data_offsets=[0]),
    "not a whole shard (tensor 'response': {": entry("response", data_offsets=[-14, 0]),
    "not a whole shard (tensor 'logprobs': {": entry("logprobs", dtype=32),
    "not a whole shard (tensor 'group' begins at byte": entry("group", data_offsets=[4, 20]),
    "not a whole shard (tensor 'num_tokens' begins at byte": lambda layout: {
        **layout,
        "extra": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
    },
    "tensors [": lambda layout: {("odd" if k == "turns" else k): v for k, v in layout.items()},
}


@pytest.mark.parametrize("message", LAYOUTS)
def test_layouts_that_cannot_be(store_dir, message):
    path = store_dir / SHARD
    rewrite_layout(path, LAYOUTS[message])
    with pytest.raises(StoreError) as refusal:
        opened(store_dir)
    assert str(refusal.value).startswith(f"{path}: {message}")


ODD = [None, True, -1, 0, 1.5, 2**70, "", "x\n", "\x1b", [], [[]], {}, {"x": 1}, [1, 2], "9" * 999]


def mutated(value, rng):
    """JSON with one value somewhere in it replaced, taken out, or put in twice."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.2:
        return ODD[int(rng.integers(len(ODD)))]
    keys = [*value] if isinstance(value, dict) else [*range(len(value))]
    key = keys[int(rng.integers(len(keys)))]
    if rng.random() < 0.2:
        if isinstance(value, dict):
            return {k: v for k, v in value.items() if k != key}
        return [*value[:key], *value[key + (rng.random() < 0.5) :], value[key]]
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[key] = mutated(value[key], rng)
    return changed


@pytest.mark.parametrize("seed", range(3))
def test_mutated_headers_are_the_same_or_one_line(store_dir, seed):
    path, rng = store_dir / SHARD, np.random.default_rng(seed)
    whole, body, errors = path.read_bytes(), header_of(path), []
    for attempt in range(300):
        path.write_bytes(whole)
        if attempt % 2:
            rewrite_header(path, mutated(body, rng))
        else:
            rewrite_layout(path, lambda layout: mutated(layout, rng))
        try:
            store = opened(store_dir)
        except StoreError as error:
            errors.append(str(error))
            continue
        for index, rollout in enumerate(ROLLOUTS):
            assert np.array_equal(store.rollout(index).tokens_N, rollout.tokens_N)
            assert np.array_equal(store.rollout(index).routes.ids_LTK, rollout.routes.ids_LTK)
    assert 150 < len(errors) < 300
    assert [e for e in errors if not e.startswith(str(store_dir)) or not e.isprintable()] == []


def test_an_unchanged_layout_is_accepted(store_dir):
    rewrite_layout(store_dir / SHARD, lambda layout: layout)
    rewrite_header(store_dir / SHARD, header_of(store_dir / SHARD))
    opened(store_dir)


def test_files_that_are_no_shards(store_dir):
    path = store_dir / SHARD
    whole = path.read_bytes()
    for data in (b"", b"1234567", b"\xff" * 8, b"\0" * 100, (2**62).to_bytes(8, "little") + b"{}"):
        path.write_bytes(data)
        with pytest.raises(StoreError, match=f"{SHARD}: not a whole shard"):
            RolloutStore([store_dir])
    for data in (whole + b"\0", whole[:-1], whole[: len(whole) // 2]):
        path.write_bytes(data)
        with pytest.raises(StoreError, match=f"{SHARD}: not a whole shard"):
            RolloutStore([store_dir])
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreError, match=f"{SHARD}: not a regular file, as every shard must be"):
        RolloutStore([store_dir])
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(
        StoreError, match=f"{SHARD}: not a regular file, as every shard must be"
    ):  # and it does not wait for one
        RolloutStore([store_dir])
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(StoreError, match=f"{SHARD}: cannot be opened \\(Too many levels"):
        RolloutStore([store_dir])
