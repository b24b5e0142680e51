"""Shards of version 2, and shards of this version with what a later megatron-r3 adds.

Shape suffixes (docs/glossary.md): K, L, N, T, U.
"""

import json
import zlib
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from stored import INFO, ROLLOUTS, header_of, opened, rewrite_header

from megatron_r3.data.store import (
    RolloutStore,
    SamplingSettings,
    StoreError,
    StoreInfo,
    write_shard,
)

SHARD = "shard-00000.safetensors"
INFO_2 = {
    "num_experts": 16,
    "topk": 2,
    "moe_layers": [1, 3],
    "engine": "vllm",
    "engine_version": "0.30.0",
    "model": "tiny",
    "router_fingerprint": ["0123456789abcdef", "fedcba9876543210"],
}
# two rollouts of 3 and 4 tokens, so 2 and 3 rows; two layers, top-2
ROUTES_2 = [
    [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]],
    [[15, 0], [2, 1], [4, 3], [0, 0], [8, 7]],  # a row that the engine did not return
]
TENSORS_2 = [  # name, type, shape, bytes; in the order in which version 2 wrote them
    ("num_tokens", "I64", [2], np.array([3, 4], "<i8").tobytes()),
    ("num_turns", "I64", [2], np.array([1, 1], "<i8").tobytes()),
    ("group", "I64", [2], np.array([4, 5], "<i8").tobytes()),
    ("sample", "I64", [2], np.array([0, 1], "<i8").tobytes()),
    ("policy_version", "I64", [2], np.array([6, 6], "<i8").tobytes()),
    ("tokens", "I32", [7], np.array([1, 2, 3, 4, 5, 6, 7], "<i4").tobytes()),
    ("logprobs", "F32", [7], np.array([0, 0, -1, 0, -2, -3, -4], "<f4").tobytes()),
    ("turns", "I32", [4], np.array([2, 3, 1, 4], "<i4").tobytes()),
    ("reward", "F32", [2], np.array([0.5, 1.5], "<f4").tobytes()),
    ("routes", "U8", [2, 5, 2], np.array(ROUTES_2, "u1").tobytes()),
    ("recorded", "U8", [5], bytes([1, 1, 1, 0, 1])),
    ("response", "U8", [7], bytes([0, 0, 1, 0, 1, 1, 1])),
]


def version_2(path, version=2, **changed):
    """Write a shard as version 2 did, by hand."""
    tensors = [(n, dtype, shape, changed.get(n, data)) for n, dtype, shape, data in TENSORS_2]
    text = json.dumps(
        {
            "crc32": {name: zlib.crc32(data) for name, _, _, data in tensors},
            "format": "megatron-r3 rollouts",
            "info": INFO_2,
            "version": version,
        }
    )
    layout, end = (
        {"__metadata__": {"megatron_r3": text, "crc32": str(zlib.crc32(text.encode()))}},
        0,
    )
    for name, dtype, shape, data in tensors:
        layout[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    header = json.dumps(layout).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(
        len(header).to_bytes(8, "little") + header + b"".join(data for _, _, _, data in tensors)
    )


def test_version_2_is_read(tmp_path):
    version_2(tmp_path / "s" / SHARD)
    store = opened(tmp_path / "s")
    assert store.info == StoreInfo(
        **{k: tuple(v) if isinstance(v, list) else v for k, v in INFO_2.items()}
    )
    assert store.info.sampling == SamplingSettings()
    first, second = store.rollout(0), store.rollout(1)
    assert second.tokens_N.tolist() == [4, 5, 6, 7]
    assert second.response_N.tolist() == [False, True, True, True]
    assert second.logprobs_N.tolist() == [0, -2, -3, -4]
    assert second.routes.recorded_T.tolist() == [True, False, True]
    assert second.routes.ids_LTK.tolist() == [
        [[5, 6], [0, 0], [9, 10]],
        [[4, 3], [0, 0], [8, 7]],
    ]
    assert first.spans_U2.tolist() == [[2, 3]]
    assert (second.reward, second.group, second.sample, second.policy_version) == (1.5, 5, 1, 6)
    assert (first.prompt_digest, second.prompt_digest) == (0, 0)
    ids, recorded = store.routes(store.row_ids(1)[1:], [1])
    assert ids.tolist() == [[[0, 0], [8, 7]]]
    assert recorded.tolist() == [False, True]


def test_version_2_is_still_checked(tmp_path):
    path = tmp_path / "s" / SHARD
    version_2(path, logprobs=np.array([0, 0, -95, 0, -2, -3, -4], "<f4").tobytes())
    with pytest.raises(StoreError, match=r"rollout 0: token 2: its log-prob is -95, below -64"):
        opened(tmp_path / "s")
    version_2(path)
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(StoreError, match=SHARD):
            opened(tmp_path / "s")
    path.write_bytes(whole)
    opened(tmp_path / "s")
    store = RolloutStore([tmp_path / "s"])
    (tmp_path / "s" / "shard-00001.safetensors").write_bytes(whole)
    with pytest.raises(StoreError, match="is the same shard as"):
        RolloutStore([tmp_path / "s"])
    path.unlink()
    with pytest.raises(StoreError, match="was removed or replaced while it is in use"):
        store.rollout(0)


@pytest.mark.parametrize("version", [0, 1, 4])
def test_other_versions_are_refused(tmp_path, version):
    version_2(tmp_path / "s" / SHARD, version)
    with pytest.raises(StoreError, match=f"{SHARD}: 'megatron-r3 rollouts' version {version}; "):
        RolloutStore([tmp_path / "s"])


def test_version_2_has_no_other_tensors(tmp_path):
    path = tmp_path / "s" / SHARD
    version_2(path)
    text = header_of(path)
    save_file({**load_file(path), "spans": np.zeros(3, np.int32)}, path)
    metadata = json.dumps(text)
    save_file(
        load_file(path),
        path,
        {"megatron_r3": metadata, "crc32": str(zlib.crc32(metadata.encode()))},
    )
    with pytest.raises(StoreError, match="a shard of version 2 has"):
        RolloutStore([tmp_path / "s"])


def newer(path, must_know=(), name="version_spans", damage=False):
    """A shard of this version from a later megatron-r3: one tensor and two settings more."""
    spans = np.arange(12, dtype=np.int32).reshape(3, 4)
    body = header_of(path)
    body["crc32"][name] = zlib.crc32(spans.tobytes())
    body["info"]["kept_set"] = {"top_n_sigma": 1.5}
    body["info"]["sampling"]["typical_p"] = 0.9
    body["must_know"] = [*must_know]
    save_file({**load_file(path), name: spans + damage}, path, {"megatron_r3": "", "crc32": ""})
    rewrite_header(path, body)


def test_what_a_later_version_adds_is_ignored(store_dir):
    newer(store_dir / SHARD, must_know=["routes", "prompt_digest", "temperature"])
    store = opened(store_dir)
    assert store.info == INFO
    for index, rollout in enumerate(ROLLOUTS):
        assert np.array_equal(store.rollout(index).routes.ids_LTK, rollout.routes.ids_LTK)


def test_but_its_bytes_are_verified(store_dir):
    newer(store_dir / SHARD, damage=True)
    store = RolloutStore([store_dir])
    with pytest.raises(StoreError, match=f"{SHARD}: checksum of 'version_spans' differs"):
        store.verify()


@pytest.mark.parametrize("name", ["version_spans", "typical_p", "x\x1b[2J"])
def test_what_must_be_known_is_refused(store_dir, name):
    newer(store_dir / SHARD, must_know=["routes", name])
    with pytest.raises(StoreError) as refusal:
        RolloutStore([store_dir])
    assert str(refusal.value) == (
        f"{store_dir / SHARD}: needs {name!r}, which this megatron-r3 does not know: "
        "update megatron-r3"
    )


def test_prompt_digests_and_settings_are_kept(tmp_path):
    info = replace(
        INFO,
        policy_stamp="0011",
        engine_policy="step 7",
        vocab_size=64,
        sampling=SamplingSettings(1.0, 1.0, 0, 0.0, 512),
    )
    rollouts = [replace(rollout, prompt_digest=2**62 + rollout.group) for rollout in ROLLOUTS]
    write_shard(tmp_path / "s", info, rollouts)
    store = opened(tmp_path / "s")
    assert store.info == info
    assert [store.rollout(i).prompt_digest for i in range(5)] == [r.prompt_digest for r in rollouts]
    assert store.column("prompt_digest").tolist() == [r.prompt_digest for r in rollouts]
