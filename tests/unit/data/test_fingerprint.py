"""Digests of weights."""

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from megatron_r3.data.fingerprint import policy_stamp, router_digest, router_fingerprint

NAMES = [f"model.layers.{layer}.mlp.gate.weight" for layer in range(3)]


def weights(dtype=torch.bfloat16):
    random = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(16, 32, generator=random).to(dtype) for name in NAMES}
    tensors["lm_head.weight"] = torch.randn(512, 32, generator=random).to(torch.bfloat16)
    return tensors


def write(folder, *files):
    folder.mkdir()
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{number}.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_router_digests_are_those_of_torch(tmp_path, dtype):
    tensors = weights(dtype)
    folder = write(tmp_path / "m", tensors)
    expected = tuple(router_digest(tensors[name]) for name in NAMES)
    assert router_fingerprint(folder, (0, 1, 2)) == expected
    assert len({*expected}) == 3
    assert router_fingerprint(folder, (2, 0)) == (expected[2], expected[0])
    # a policy that was published in bfloat16 has the digests of the trainer's wider weights
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    assert router_fingerprint(write(tmp_path / "rounded", rounded), (0, 1, 2)) == expected
    # 1 and -2 have the bfloat16 bytes 80 3f and 00 c0; the digest is that of these bytes
    ones = torch.tensor([[1.0, -2.0]], dtype=dtype)
    assert router_digest(ones) == hashlib.sha256(bytes.fromhex("803f00c0")).hexdigest()[:16]


def test_missing_and_strange_routers_are_named(tmp_path):
    folder = write(tmp_path / "m", weights())
    with pytest.raises(ValueError, match=r"m: no tensor model\.layers\.3\.mlp\.gate\.weight"):
        router_fingerprint(folder, (0, 3))
    whole = {name: torch.ones(2, 2, dtype=torch.int32) for name in NAMES}
    folder = write(tmp_path / "n", whole)
    with pytest.raises(ValueError, match=r"gate\.weight is I32; router weights are"):
        router_fingerprint(folder, (0,))


def test_the_stamp_is_that_of_the_weights_not_of_their_files(tmp_path):
    tensors = weights()
    one = write(tmp_path / "one", tensors)
    first, *rest = tensors
    two = write(tmp_path / "two", {name: tensors[name] for name in rest}, {first: tensors[first]})
    stamp = policy_stamp(one)
    assert policy_stamp(two) == stamp
    assert len(stamp) == 16
    assert int(stamp, 16) >= 0
    two.joinpath("config.json").write_text("{}")
    assert policy_stamp(two) == stamp


def changed_byte(tensors):
    tensors["lm_head.weight"].view(torch.uint8)[-1, -1] ^= 1


def swapped(tensors):
    tensors[NAMES[0]], tensors[NAMES[1]] = tensors[NAMES[1]], tensors[NAMES[0]]


def reshaped(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].reshape(256, 64)


def as_other_dtype(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].view(torch.int16)


def renamed(tensors):
    tensors["other.weight"] = tensors.pop("lm_head.weight")


@pytest.mark.parametrize("change", [changed_byte, swapped, reshaped, as_other_dtype, renamed])
def test_every_change_changes_the_stamp(tmp_path, change):
    tensors = weights()
    before = policy_stamp(write(tmp_path / "before", tensors))
    change(tensors)
    assert policy_stamp(write(tmp_path / "after", tensors)) != before


def test_an_adapter_counts_and_so_do_its_settings(tmp_path):
    tensors = weights()
    folder = write(tmp_path / "m", tensors)
    stamps = {policy_stamp(folder)}
    save_file({NAMES[0]: tensors[NAMES[0]]}, folder / "adapter_model.safetensors")
    stamps.add(policy_stamp(folder))
    for scale in (8, 16):
        folder.joinpath("adapter_config.json").write_text(json.dumps({"lora_alpha": scale}))
        stamps.add(policy_stamp(folder))
    assert len(stamps) == 4


def test_what_cannot_be_stamped_is_named(tmp_path):
    tensors = weights()
    folder = write(tmp_path / "m", tensors, tensors)
    with pytest.raises(ValueError, match=r"model-0\.safetensors and model-1\.safetensors both"):
        policy_stamp(folder)
    shutil.copy(folder / "model-0.safetensors", tmp_path / "whole")
    for data in (b"", (tmp_path / "whole").read_bytes()[:-1], b"\xff" * 64):
        folder.joinpath("model-1.safetensors").write_bytes(data)
        with pytest.raises(ValueError, match=r"model-1\.safetensors: cannot be read as"):
            policy_stamp(folder)
