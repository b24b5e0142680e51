"""What demo/sglang_cpu puts in the place of packages without a build for the CPU.

SGLang itself runs with it in CI (make demo SAMPLER=sglang). Here made-up modules show what SGLang
would meet if it called a stand-in, or if its pinning function had moved.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo import sglang_server
from demo.installation import ServerError, is_installed, run_steps

PINNING = Path("sglang/srt/mem_cache/pool_host/common.py")


def python(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """Run the code as SGLang's processes are run; `folders` come first on its path."""
    path = os.pathsep.join(map(str, [*folders, sglang_server.CPU]))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_stand_in_is_imported_looked_into_and_derived_from():
    done = python("""
import importlib.util, sgl_kernel, torchvision.transforms.v2
from sgl_kernel.scalar_type import ScalarType, scalar_types
from torchvision.transforms import InterpolationMode
assert importlib.util.find_spec("sgl_kernel")
class Derived(ScalarType): pass
def annotated(x: ScalarType | None) -> InterpolationMode.NEAREST: ...
assert not isinstance(1, ScalarType) and not hasattr(sgl_kernel, "__file__")
assert {scalar_types.uint4: 1} and sgl_kernel.a is sgl_kernel.a
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("sgl_kernel.topk_softmax(1)", "sgl_kernel.topk_softmax"),
        ("sgl_kernel.scalar_type.ScalarType()", "sgl_kernel.scalar_type.ScalarType"),
        ("torchvision.io.read_image('a')", "torchvision.io.read_image"),
        ("type('Mine', (sgl_kernel.Base,), {})()", "Mine"),
        ("sgl_kernel.jit(lambda: 0)", "sgl_kernel.jit"),
    ],
)
def test_a_stand_in_that_is_called_raises(called, name):
    done = python(f"import sgl_kernel, torchvision\n{called}")
    assert done.returncode == 1
    assert f"RuntimeError: {name} was called, a stand-in" in done.stderr


def test_a_package_that_is_installed_counts(tmp_path):
    (tmp_path / "sgl_kernel.py").write_text("real = 3\n")
    done = python("import sgl_kernel, torch_is_not_answered_for", tmp_path)
    assert "ModuleNotFoundError: No module named 'torch_is_not_answered_for'" in done.stderr
    assert python("import sgl_kernel\nassert sgl_kernel.real == 3", tmp_path).returncode == 0


def pinning_module(folder: Path, function: str) -> None:
    path = folder / PINNING
    path.parent.mkdir(parents=True)
    path.write_text(f"def {function}(buffer, size=None):\n    raise OSError('no CUDA')\n")


SPAWNED = """
import multiprocessing

def pin():
    from sglang.srt.mem_cache.pool_host.common import _cuda_host_register
    _cuda_host_register([1], 2)

if __name__ == "__main__":
    pin()
    child = multiprocessing.get_context("spawn").Process(target=pin)
    child.start()
    child.join()
    assert child.exitcode == 0
"""


def test_nothing_is_pinned_also_in_a_spawned_process(tmp_path):
    pinning_module(tmp_path, "_cuda_host_register")
    script = tmp_path / "script.py"  # a spawned process imports it again
    script.write_text(SPAWNED)
    run = [sys.executable, str(script)]
    for path, status in ((f"{tmp_path}:{sglang_server.CPU}", 0), (str(tmp_path), 1)):
        env = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(run, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
    assert "no CUDA" in done.stderr  # without sitecustomize


def test_a_pinning_function_of_another_name_is_told(tmp_path):
    pinning_module(tmp_path, "_host_register")
    done = python("import sglang.srt.mem_cache.pool_host.common", tmp_path)
    assert done.returncode == 1
    assert "has no _cuda_host_register; is this SGLang 0.5.23?" in done.stderr


def test_an_installation_is_made_once_and_whole(tmp_path, capsys):
    home = tmp_path / "engine"
    write = [sys.executable, "-c", f"import os; os.makedirs({str(home)!r})"]
    fail = [sys.executable, "-c", "raise SystemExit('Error: no such release')"]
    with pytest.raises(ServerError, match=r"2/2 second failed; from .*engine-install.log:\n") as e:
        run_steps("Engine", home, "1", [("first", write), ("second", fail)])
    assert "Error: no such release" in str(e.value)
    assert home.exists()
    assert not is_installed(home, "1")
    run_steps("Engine", home, "1", [("first", write)])
    assert is_installed(home, "1")
    assert not is_installed(home, "2")
