"""The embedded sampler is made less exact for samples, and stays exact for a probe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from published import save_model

from megatron_r3.loop.embedded import EmbeddedSampler
from proof.comparison.degrade import fp8, noise, rounded


def routes_of(sampler: EmbeddedSampler, temperature: float) -> str:
    params = {"max_new_tokens": 1, "temperature": temperature, "sampling_seed": 3}
    body = {"input_ids": list(range(1, 30)), "sampling_params": params}
    answer = sampler.generate(body)
    assert isinstance(answer, dict)
    return str(answer["meta_info"]["routed_experts"])


@pytest.mark.parametrize("degrade", [noise, fp8])
def test_what_a_sample_and_a_probe_see(tmp_path: Path, degrade: object) -> None:
    save_model(tmp_path)
    plain, less_exact = EmbeddedSampler(), EmbeddedSampler(degrade)  # type: ignore[arg-type]
    for sampler in (plain, less_exact):
        sampler.load(tmp_path, "v0")
    assert routes_of(less_exact, 1.0) == routes_of(less_exact, 1.0)  # a seed repeats its noise
    assert routes_of(less_exact, 1.0) != routes_of(plain, 1.0)
    # a probe has temperature 0: no noise, but the weights stay rounded
    assert (routes_of(less_exact, 0.0) == routes_of(plain, 0.0)) == (degrade is noise)


def test_rounding_to_float8_scales_each_row() -> None:
    values = torch.tensor([[1.0, 448.0], [0.001, 0.448]])
    assert torch.allclose(rounded(values)[:, 1], values[:, 1])
    assert rounded(torch.tensor([[448.0, 1.06]])).tolist() == [[448.0, 1.0]]
