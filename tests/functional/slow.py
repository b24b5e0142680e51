"""What `make test` leaves to `make test-all`: files, and values of parametrized tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

# What `make test` leaves to `make test-all`, beside tests that are marked one by one: the tools
# around R3, real engines, and runs of whole commands.
SLOW = (
    "clients/",
    "functional/test_check.py",
    "functional/test_cpu_",
    "functional/test_demo.py",
    "functional/test_docs_example.py",
    "functional/test_engine_push.py",
    "functional/test_families.py",
    "functional/test_hf_refused.py",
    "functional/test_make.py",
    "functional/test_matrix.py",
    "functional/test_pretrain.py",
    "functional/test_publish_weights.py",
    "functional/test_rl_loop.py",
    "functional/test_rl_run.py",
    "functional/test_sampling_routes.py",
    "functional/test_serve.py",
    "functional/test_update_examples.py",
    "unit/benchmarks/",
    "unit/comparison/",
    "unit/cpu/",
    "unit/data/store/test_file_systems.py",
    "unit/demo/",
    "unit/docker/",
    "unit/fuzz/",
    "unit/gpu/",
    "unit/keepers/",
    "unit/launch/",
    "unit/loop/test_report.py",
)


def slow_except(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values, of which those in `quick` are the ones that `make test` tries.

    Raises:
        ValueError: one of `quick` is no value.
    """
    values = [*values]
    if unknown := [value for value in quick if value not in values]:
        raise ValueError(f"{unknown} are not among {values}")
    return [v if v in quick else slow(v) for v in values]


def slow(*values: Any) -> Any:
    """The values of one case, which `make test` leaves to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)
