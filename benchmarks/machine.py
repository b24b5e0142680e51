"""What a recorded run says of its machine."""

from __future__ import annotations

import datetime
import json
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any


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


def write_results(out: Path, bench: str, found: dict[str, Any]) -> Path:
    """Write what a bench found to the file `out`; returns where it is.

    A folder gets one file for each GPU and day, in it each bench by its name.
    """
    if out.is_dir():
        gpu = re.sub(r"\W+", "-", str(found.get("gpu", "cpu"))).strip("-").lower()
        out = out / f"{gpu}-{datetime.date.today()}.json"
        found = {**(json.loads(out.read_text()) if out.exists() else {}), bench: found}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    return out


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
