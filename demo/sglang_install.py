"""Installs SGLang beside vLLM, into build/sglang, if it is not there.

SGLang has no release for the CPU. Its wheel on PyPI is installed without its requirements, most of
which are for CUDA. vLLM's environment for the CPU (demo/vllm_install.py) has most of the others,
and sglang.lock the rest. So vLLM's Python runs SGLang, with build/sglang on PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path

from demo import vllm_install
from demo.installation import BUILD, compile_all, is_installed, pip_install, run_steps

VERSION = "0.5.23"
LOCK = Path(__file__).with_name("sglang.lock")


def install(build: Path = BUILD) -> tuple[Path, Path]:
    """Install SGLang into `build`/sglang, and vLLM's environment, unless they are there.

    Returns:
        The python of vLLM's environment, and the folder with SGLang.

    Raises:
        ServerError: this Python is too old or too new, or pip failed; the message says which.
    """
    python, home = vllm_install.install(build), build / "sglang"
    # The packages fit vLLM's environment, so a change of its pins makes this folder anew.
    vllm = (build / "vllm" / "installed").read_text()
    pins = f"{VERSION} {vllm}\n{LOCK.read_text()}"
    if not is_installed(home, pins):
        pip = [*pip_install(python), "--no-deps", "--target", str(home)]
        wheel = f"sglang=={VERSION}"
        steps = [(wheel, [*pip, "-r", str(LOCK), wheel]), *compile_all(python, home)]
        run_steps("SGLang", home, pins, steps)
    return python, home
