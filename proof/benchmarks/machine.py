"""What a record of a benchmark says of the machine, and the file that gets the record."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

RECORD_SUFFIX = "MEGATRON_R3_RECORD_SUFFIX"


def machine_of() -> dict[str, str]:
    """Architecture, processor and Python."""
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "python": platform.python_version(),
    }


def machine_at_start() -> dict[str, Any]:
    """What `machine_of` returns, the cores that this process may use, and the load at the start.

    Returns:
        Among others "load": the mean number of processes that ran or waited for a core in the last
        minute. If the load is near the number of cores, other programs make wall times longer.
    """
    cores = len(os.sched_getaffinity(0))
    return {**machine_of(), "cores": cores, "load": round(os.getloadavg()[0], 2)}


def device_of(device: str) -> dict[str, Any]:
    """The device ("cuda" or "cpu"), and the packages that drive it."""
    import torch

    facts: dict[str, Any] = {"device": device, "torch": torch.__version__}
    for package in ("triton", "transformer_engine"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = None
    if device == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        facts["driver"] = _driver()
    return facts


def no_transformer_engine() -> str | None:
    """Why Transformer Engine cannot be used here, in words; None if it can."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ModuleNotFoundError as error:
        if error.name == "transformer_engine":
            return "Transformer Engine is not installed"
        return f"Transformer Engine cannot be imported: {error}"
    except Exception as error:  # without the compiled library the import raises other errors
        return f"Transformer Engine cannot be imported: {' '.join(str(error).split())}"
    return None


def write_results(out: Path, bench: str, record: dict[str, Any]) -> Path:
    """Write the record of a benchmark as JSON, and return the path of the file.

    Args:
        out: a file, which then holds the record alone; or a folder, which has one file for each GPU
            and day, for example `nvidia-h200-2026-11-21.json`. Such a file holds the records of
            several benchmarks by name; a record of the same name is replaced.
        bench: the name of the benchmark. The text of the environment variable that `RECORD_SUFFIX`
            names is appended. `make gpu` sets this variable for a program that runs in two steps:
            "kernel te" of the step with Transformer Engine does not replace "kernel".
        record: what the benchmark measured.
    """
    bench = f"{bench} {os.environ.get(RECORD_SUFFIX, '')}".strip()
    if out.is_dir():
        out = results_file(out, record)
        record = {**(json.loads(out.read_text()) if out.exists() else {}), bench: record}
    out.parent.mkdir(parents=True, exist_ok=True)
    # If this process is killed here, the old file is still whole, so the next call can read it.
    new = out.with_name(f"{out.name}.new")
    new.write_text(json.dumps(record, indent=1) + "\n")
    new.replace(out)
    return out


def results_file(folder: Path, record: dict[str, Any]) -> Path:
    """The file of a folder that holds today's records of the GPU that `record` names."""
    gpu = re.sub(r"\W+", "-", str(record.get("gpu", "cpu"))).strip("-").lower()
    return folder / f"{gpu}-{datetime.date.today()}.json"


def _processor() -> str:
    # platform.processor() is only "x86_64" or empty on Linux
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _driver() -> str | None:
    argv = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return output.split("\n")[0].strip()  # one line for each GPU
