"""The names that `megatron_r3` exports: they come when they are asked for, and not before."""

from __future__ import annotations

import subprocess
import sys

import pytest

import megatron_r3


def test_each_name_is_that_of_its_module() -> None:
    for name in megatron_r3.__all__:
        assert getattr(megatron_r3, name).__module__.startswith("megatron_r3.replay."), name


def test_another_name_is_none_of_them() -> None:
    with pytest.raises(AttributeError, match="module 'megatron_r3' has no attribute 'replayed'"):
        megatron_r3.replayed  # noqa: B018


@pytest.mark.parametrize("name", ["__version__", "replaying"])
def test_torch_is_imported_with_the_first_name(name: str) -> None:
    program = f"import sys, megatron_r3; megatron_r3.{name}; print('torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert output.stdout == f"{name == 'replaying'}\n", output.stderr
