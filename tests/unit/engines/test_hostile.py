"""Configs and files of samples that somebody else made: an EngineError, little memory, no crash."""

from __future__ import annotations

import copy
import io
import json
import random
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_mutations import mutated_json

from megatron_r3.engines.conversation import read_samples, read_source, write_samples
from megatron_r3.engines.shape import EngineError, ModelShape
from tests.unit.engines.test_sample import sample
from tests.unit.engines.test_shape import DEEPSEEK, QWEN3

ROUNDS = 1500
CONFIGS = {
    "qwen3_moe": {
        **QWEN3,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0, 3],
        "vocab_size": 512,
        "rope_scaling": {"type": "yarn", "factor": 4.0},
    },
    "deepseek_v3": {**DEEPSEEK, "moe_layer_freq": 1, "vocab_size": 512},
    "deepseek_v3, a list": {**DEEPSEEK, "moe_layer_freq": [0, 1, 1, 1, 0, 1]},
    "by names": {**QWEN3, "mlp_layer_types": ["dense", *["sparse"] * 5], "vocab_size": 512},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_mutated_configs(tmp_path, name):
    rng, path = random.Random(f"configs {name}"), tmp_path / "config.json"
    expected = ModelShape.from_hf_config(CONFIGS[name])
    refused, same = [], 0
    tracemalloc.start()
    for round_ in range(ROUNDS):
        config = mutated_json(CONFIGS[name], rng)
        text = json.dumps(config)
        path.write_text(text[: rng.randrange(len(text))] if rng.random() < 0.02 else text)
        try:
            shape = ModelShape.from_hf_config(path)
        except EngineError as error:
            refused.append(str(error))
            continue
        same += shape == expected
        assert 1 <= shape.topk <= shape.num_experts <= 32768, round_
        assert 0 <= shape.moe_layers[0] <= shape.moe_layers[-1] < shape.num_hidden_layers, round_
        assert shape.num_hidden_layers <= 10_000, round_
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(m.startswith(str(path)) and m.isprintable() and len(m) < 900 for m in refused)
    assert ROUNDS // 4 < len(refused) < ROUNDS
    assert same  # what was changed is not always looked at
    assert peak < 16 << 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 4_000_000_000}, "`num_hidden_layers` is 4000000000; possible are"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0; possible are 1 to 10000"),
        ({"num_experts": 32769}, "`num_experts` is 32769; possible are 1 to 32768"),
        ({"num_experts": [16]}, "`num_experts` is a whole number; got [16]"),
        ({"num_experts": 16.0}, "`num_experts` is a whole number; got 16.0"),
        ({"num_local_experts": {}}, "`num_local_experts` is a whole number; got {}"),
        ({"num_experts_per_tok": 10**6}, "`num_experts_per_tok` is 1000000; possible are 1 to"),
        ({"vocab_size": 0}, "`vocab_size` is 0; possible are 1 to 2147483648"),
        ({"vocab_size": "512"}, "`vocab_size` is a whole number; got '512'"),
        ({"decoder_sparse_step": -1}, "`decoder_sparse_step` is -1"),
        ({"mlp_only_layers": 3}, "`mlp_only_layers` is a list of hidden layers; got 3"),
        ({"mlp_only_layers": ["0"]}, "`mlp_only_layers` is a list of hidden layers; got ['0']"),
        ({"mlp_only_layers": {"0": 1}}, "`mlp_only_layers` is a list of hidden layers"),
        ({"mlp_layer_types": 3}, "`mlp_layer_types` names each of 6 layers dense or sparse; got 3"),
        ({"mlp_layer_types": [["sparse"]] * 6}, "`mlp_layer_types` names each of 6 layers"),
        ({"mlp_layer_types": {"sparse": 1}}, "`mlp_layer_types` names each of 6 layers"),
        ({"model_type": ["qwen3_moe"]}, "model type ['qwen3_moe'] is unknown"),
        ({"model_type": "\x1b[2J" + "x" * 10**5}, "model type '\\x1b[2Jxxx"),
    ],
)
def test_fields_that_no_model_has(tmp_path, change, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**QWEN3, **change}))
    with pytest.raises(EngineError) as caught:
        ModelShape.from_hf_config(path)
    error = str(caught.value)
    assert error.startswith(f"{path}: {message}")
    assert error.isprintable()
    assert len(error) < 900


@pytest.mark.parametrize(
    "wrong", [[0, 1, 0, 1, 1, "0"], [0, 1, 0, 1, 1, 2], [[1]] * 6, "1", -1, {}]
)
def test_frequencies_that_no_model_has(wrong):
    with pytest.raises(EngineError, match="`moe_layer_freq` is"):
        ModelShape.from_hf_config({**DEEPSEEK, "moe_layer_freq": wrong})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000 + "]" * 100_000, "more than 64 brackets"),
        ('{"a": ' * 5000 + "1" + "}" * 5000, "more than 64 brackets"),
        ('{"num_experts": ' + "9" * 5000 + "}", "not JSON"),
        (" " * (1 << 23), "bytes of JSON; at most"),
        ("\ufeff{}", "not JSON"),
        ("3", "is a JSON object; got 3"),
    ],
)
def test_texts_that_are_no_config(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(EngineError) as caught:
        ModelShape.from_hf_config(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_a_config_without_end_is_not_read_to_it():
    with pytest.raises(EngineError, match="/dev/zero: 4194305 bytes of JSON; at most"):
        ModelShape.from_hf_config("/dev/zero")


def test_the_vocabulary_is_the_configs():
    assert ModelShape.from_hf_config(QWEN3).vocab_size is None
    assert ModelShape.from_hf_config({**QWEN3, "vocab_size": 151936}).vocab_size == 151936


@pytest.fixture
def good(tmp_path):
    write_samples(tmp_path / "good.npz", [sample(5, 4), sample(3, 2)], (1, 2, 3), "vllm", "0.30.0")
    with np.load(tmp_path / "good.npz") as archive:
        return dict(archive)


WRAPS = np.array([2**62] * 4 + [14], np.int64)  # as an int64 sum: 14
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "lengths that wrap": (
        {"lengths": WRAPS, "num_turns": np.array([1, 1, 0, 0, 0]), "group": np.zeros(5, np.int64)},
        "lengths count 14 tokens: 4611686018427387904 of sample 0",
    ),
    "turns that wrap": (
        {"num_turns": WRAPS[[0, 1, 2, 3, 4]] - 12 * (WRAPS == 14), "lengths": np.array([2] * 5)}
        | {"group": np.zeros(5, np.int64), "tokens": np.zeros(10, np.int32)},
        "num_turns count 2 turns: 4611686018427387904 of sample 0",
    ),
    "negative lengths": ({"lengths": np.array([16, -2])}, "lengths count 14 tokens: 16 of sample"),
    "spans that wrap": (
        {"turns": np.array([[-(2**31), 2**31 - 1], [3, 5]], np.int32)},
        "turns count 6 logprobs: 4294967295 of turn 0",
    ),
    "a turn before its sample": (
        {"turns": np.array([[-1, 3], [3, 5]], np.int32)},
        "sample 0: -1 prompt tokens of 9",
    ),
    "no samples": (
        {"lengths": np.zeros(0, np.int64), "num_turns": np.zeros(0, np.int64)},
        "turns are int32 [U, 2], at least one",
    ),
    "objects": ({"group": np.array([{}, {}], dtype=object)}, "group: dtypes of kind"),
    "counts of another kind": ({"lengths": np.array([9.0, 5.0])}, "lengths are int64 of 1 axes"),
    "a number of experts that is an array": (
        {"num_experts": np.array([16])},
        "num_experts are int64 of 0 axes",
    ),
    "too many experts": ({"num_experts": np.int64(2**40)}, "1099511627776 experts"),
    "layers twice": ({"moe_layers": np.array([1, 1, 2])}, "moe_layers [1, 1, 2] are not ascending"),
    "one text": ({"engine": np.array(["vllm"])}, "engine has 1 texts"),
    "an escape": ({"engine": np.array(["\x1b[2J", "1"])}, "engine is a text without control"),
    "no characters": (
        {"engine": np.frombuffer(b"\xff\xff\xff\x7f" * 2, "<U1")},
        "engine: ",
    ),
    "impossible log-probs": (
        {"logprobs": np.full(6, -9999, np.float32)},
        "sample 0: the log-prob of token 5 is -9999",
    ),
    "a negative token": ({"tokens": np.full(14, -5, np.int32)}, "sample 0: token 0 is id -5"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files_of_samples(tmp_path, good, what):
    """In a process of its own: a crash there is a failure here."""
    change, message = HOSTILE[what]
    path = tmp_path / "wrong.npz"
    np.savez(path, **{**good, **change})
    code = (
        "import sys\n"
        "from megatron_r3.engines.conversation import EngineError, read_samples\n"
        "try:\n    read_samples(sys.argv[1])\n"
        "except EngineError as error:\n    print(error)\n    sys.exit(7)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith(f"{path}: ")
    assert message in done.stdout
    assert done.stdout.count("\n") == 1


def rewritten(path: Path, change: Callable[[str, bytes], bytes], compress: int) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compress) as archive:
        for name, data in members.items():
            archive.writestr(name, change(name, data))


def claiming(shape: str) -> Callable[[str, bytes], bytes]:
    """The routes' header with another shape, the data as it was."""

    def change(name: str, data: bytes) -> bytes:
        if name != "routes.npy":
            return data
        stream = io.BytesIO()
        np.save(stream, np.zeros((3, 12, 4), np.uint8))
        header = stream.getvalue()[: -3 * 12 * 4]
        return header.replace(b"(3, 12, 4), }", f"({shape}), }}".encode()) + data[-144:]

    return change


@pytest.mark.parametrize("shape", ["3, 1099511627776, 4", "-3, -12, 4", "0, 1099511627776, 0"])
def test_shapes_that_a_file_claims_take_no_memory(tmp_path, good, shape):
    path = tmp_path / "good.npz"
    rewritten(path, claiming(shape), zipfile.ZIP_STORED)
    tracemalloc.start()
    with pytest.raises(EngineError, match=r"good.npz: "):
        read_samples(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_compressed_files_are_not_unpacked(tmp_path, good):
    path = tmp_path / "good.npz"
    rewritten(path, lambda name, data: data, zipfile.ZIP_STORED)
    assert len(read_samples(path)) == 2  # the control: rewritten and whole
    bomb = bytes(1 << 26)
    rewritten(path, lambda name, data: data + bomb * (name == "tokens.npy"), zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 18
    tracemalloc.start()
    with pytest.raises(EngineError, match="tokens is compressed; samples are stored as they are"):
        read_source(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_mutated_files_of_samples(tmp_path, good):
    path, rng = tmp_path / "good.npz", random.Random("samples")
    whole = path.read_bytes()
    control = [one.tokens_N.tolist() for one in read_samples(path)]
    refused = []
    for round_ in range(1500):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 3))):
            where = rng.randrange(len(data))
            kind = rng.randrange(3)
            if kind == 0:
                data[where] = rng.randrange(256)
            elif kind == 1:
                del data[where : where + rng.choice((1, 8, 300))]
            else:
                data[where : where + 8] = rng.choice((b"\xff" * 8, bytes(8), bytes(7) + b"\x40"))
        path.write_bytes(data)
        try:
            samples = read_samples(path)
        except EngineError as error:
            refused.append(str(error))
        else:  # the change was to what nobody reads: times, attributes
            assert [one.tokens_N.tolist() for one in samples] == control, round_
    assert all(message.startswith(str(path)) and message.isprintable() for message in refused)
    assert 500 < len(refused) < 1500


def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"file/a.npz: cannot be written \(Not a directory\)"):
        write_samples(tmp_path / "file" / "a.npz", [sample(5, 4)], (1, 2, 3), "vllm", "1")
    code = (
        "import resource, sys\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from tests.unit.engines.test_sample import sample\n"
        "from megatron_r3.engines.conversation import EngineError, write_samples\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n    write_samples(sys.argv[1], [sample(5, 4)], (1, 2, 3), 'vllm', '1')\n"
        "except EngineError as error:\n    print(error)\n    sys.exit(7)\n"
    )
    arguments = [str(tmp_path / "b.npz"), str(Path(__file__).parents[3])]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout == f"{tmp_path / 'b.npz'}: cannot be written (File too large)\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_mutations_leave_what_they_are_given_alone():
    before = copy.deepcopy(CONFIGS)
    mutated_json(CONFIGS["qwen3_moe"], random.Random(1))
    assert before == CONFIGS
