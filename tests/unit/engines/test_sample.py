"""Samples and the file that carries them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_r3.engines.conversation import (
    EngineError,
    Sample,
    Source,
    read_samples,
    read_source,
    write_samples,
)
from megatron_r3.routes import Routes


def turns_of(*spans: tuple[int, int]) -> np.ndarray:
    return np.array(spans, np.int32)


def sample(prompt: int, response: int, group: int = 0, num_experts: int = 16) -> Sample:
    rng = np.random.default_rng(prompt * 100 + response)
    ids = rng.random((3, prompt + response - 1, num_experts)).argsort(-1)[..., :4]
    return Sample(
        rng.integers(0, 500, prompt + response).astype(np.int32),
        prompt,
        -rng.random(response).astype(np.float32),
        Routes.from_array(ids, num_experts),
        group,
    )


@pytest.mark.parametrize("num_experts", [16, 256, 300])
def test_what_is_written_is_read(tmp_path, num_experts):
    path = tmp_path / "samples.npz"
    samples = [sample(*each, num_experts) for each in ((5, 1, 3), (1, 7, 3), (4, 4, 9))]
    write_samples(path, samples, (1, 2, 3), "vllm", "0.30.0")
    assert read_source(path) == Source("vllm", "0.30.0", (1, 2, 3), num_experts, 4)
    for wrote, read in zip(samples, read_samples(path), strict=True):
        assert (wrote.tokens_N == read.tokens_N).all()
        assert read.tokens_N.dtype == np.int32
        assert (wrote.logprobs_G == read.logprobs_G).all()
        assert (wrote.routes.ids_LTK == read.routes.ids_LTK).all()
        assert read.routes.ids_LTK.dtype == (np.uint8 if num_experts <= 256 else np.uint16)
        assert (wrote.prompt_length, wrote.group) == (read.prompt_length, read.group)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_length": 0}, "0 prompt tokens of 9"),
        ({"prompt_length": 9}, "9 prompt tokens of 9"),
        ({"logprobs_G": np.zeros(3, np.float32)}, "3 log-probs for 4 response tokens"),
        ({"logprobs_G": np.array([0, 0, np.nan, 0])}, "token 7 is .*not finite"),
        ({"tokens_N": np.arange(10), "prompt_length": 6}, "8 rows of routes for 10 tokens"),
        ({"turns": turns_of((5, 7), (6, 8))}, "turns"),
        ({"turns": turns_of((6, 9), (8, 9))}, "turns"),
        ({"turns": turns_of((5, 5), (5, 9))}, "turns"),
        ({"turns": turns_of((5, 6), (7, 10))}, "turns"),
        ({"turns": turns_of((4, 8))}, "turns"),
    ],
)
def test_parts_that_do_not_belong_together(change, message):
    good = sample(5, 4)
    good.check("here")
    with pytest.raises(EngineError, match=message):
        dataclasses.replace(good, **change).check("here")


def test_turns_say_what_was_sampled(tmp_path):
    one = sample(5, 4)
    assert one.turns.tolist() == [[5, 9]]
    assert one.turns.dtype == np.int32
    assert one.response_N.tolist() == [False] * 5 + [True] * 4
    two = dataclasses.replace(
        one, turns=turns_of((5, 6), (7, 9)), logprobs_G=np.array([-1, -2, -3], np.float32)
    )
    two.check("here")
    assert two.response_length == 3
    assert two.logprobs_N.tolist() == [0, 0, 0, 0, 0, -1, 0, -2, -3]
    nan = dataclasses.replace(two, logprobs_G=np.array([-1, np.nan, -3], np.float32))
    with pytest.raises(EngineError, match="token 7 is nan, which is not finite"):
        nan.check("here")
    touching = dataclasses.replace(one, turns=turns_of((5, 6), (6, 9)))
    touching.check("here")
    assert touching.response_N.tolist() == one.response_N.tolist()
    write_samples(tmp_path / "a.npz", [one, two, touching], (1, 2, 3), "vllm", "0.30.0")
    for wrote, read in zip([one, two, touching], read_samples(tmp_path / "a.npz"), strict=True):
        assert read.turns.tolist() == wrote.turns.tolist()
        assert read.logprobs_G.tolist() == wrote.logprobs_G.tolist()


def test_samples_of_different_models_are_not_written(tmp_path):
    path = tmp_path / "samples.npz"
    with pytest.raises(EngineError, match="no samples"):
        write_samples(path, [], (1, 2, 3), "vllm", "0.30.0")
    with pytest.raises(EngineError, match="sample 1: layers, experts"):
        write_samples(path, [sample(5, 4), sample(5, 4, 0, 32)], (1, 2, 3), "vllm", "0.30.0")
    with pytest.raises(EngineError, match="sample 0: layers, experts"):
        write_samples(path, [sample(5, 4)], (1, 2), "vllm", "0.30.0")
    routes = sample(5, 4).routes
    recorded = np.ones(8, bool)
    recorded[2] = False
    holed = dataclasses.replace(routes, recorded_T=recorded)
    with pytest.raises(EngineError, match="missing"):
        write_samples(
            path, [dataclasses.replace(sample(5, 4), routes=holed)], (1, 2, 3), "vllm", "0.30.0"
        )


@pytest.fixture
def arrays(tmp_path):
    write_samples(tmp_path / "good.npz", [sample(5, 4), sample(3, 2)], (1, 2, 3), "vllm", "0.30.0")
    with np.load(tmp_path / "good.npz") as archive:
        return dict(archive)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokens", lambda a: a[:-1], "lengths count 13 tokens: .* add up to 14; there are 13"),
        ("logprobs", lambda a: a[1:], "turns count 5 logprobs: .* its turns add up to 6"),
        ("group", lambda a: a[1:], "1 group; expected 2"),
        ("routes", lambda a: a[:, 1:], "for 12 rows"),
        ("routes", lambda a: a[1:], "for 12 rows"),
        ("routes", lambda a: a.astype(np.int32), "routes are uint8 or uint16 of 3 axes; got int32"),
        ("routes", lambda a: np.full_like(a, 3), "sample 0: an expert twice"),
        ("turns", lambda a: a + np.array([4, 0]) * [[1], [-1]], "turns are int32"),
        ("turns", lambda a: a[:, :1], "turns are int32"),
        ("turns", lambda a: a[:1], "num_turns count 1 turns: .* add up to 2"),
        ("turns", lambda a: a + np.array([[1, 1], [0, 0]], a.dtype), "sample 0: turns"),
        ("num_turns", lambda a: a * 0, "0 of sample 0; possible are 1 to 2"),
        ("num_turns", lambda a: a + 1, "its samples add up to 4; there are 2"),
    ],
)
def test_wrong_files_are_refused(tmp_path, arrays, name, change, message):
    arrays[name] = change(arrays[name])
    np.savez(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(EngineError, match=f"wrong.npz.*{message}"):
        read_samples(tmp_path / "wrong.npz")


def test_what_is_no_file_of_samples_is_refused(tmp_path, arrays):
    path = tmp_path / "wrong.npz"
    with pytest.raises(EngineError, match="not a readable file of samples"):
        read_samples(path)
    np.savez(path, tokens=arrays["tokens"])
    with pytest.raises(EngineError, match="missing"):
        read_samples(path)
    np.savez(path, **{**arrays, "group": np.array([{}, {}], dtype=object)})
    with pytest.raises(EngineError, match="not a readable file of samples"):
        read_samples(path)
    whole = (tmp_path / "good.npz").read_bytes()
    for data in (b"", b"hello", whole[: len(whole) // 2]):
        path.write_bytes(data)
        with pytest.raises(EngineError, match="not a readable file of samples"):
            read_samples(path)
    with (path).open("wb") as file:
        np.save(file, arrays["tokens"])
    with pytest.raises(EngineError, match="not a readable file of samples"):
        read_samples(path)
