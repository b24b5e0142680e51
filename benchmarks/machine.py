"""What a recorded run says of its machine."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["device_of", "machine_of"]


def machine_of() -> dict[str, str]:
    """Architecture, processor and Python."""
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "python": platform.python_version(),
    }


def device_of(device: str) -> dict[str, Any]:
    """The device ("cuda" or "cpu"), and the packages that drive it."""
    import torch

    found: dict[str, Any] = {"device": device, "torch": torch.__version__}
    for package in ("triton", "transformer_engine"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        found["driver"] = _driver()
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _driver() -> str | None:
    argv = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.split("\n")[0].strip()
