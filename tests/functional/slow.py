"""The values of a parametrized test: a few for `make test`, all for `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values, of which those in `quick` are the ones that `make test` tries.

    Raises:
        ValueError: one of `quick` is no value.
    """
    values = [*values]
    if unknown := [value for value in quick if value not in values]:
        raise ValueError(f"{unknown} are not among {values}")
    slow = pytest.mark.slow
    return [v if v in quick else pytest.param(v, marks=slow) for v in values]
