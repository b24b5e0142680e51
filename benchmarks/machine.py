"""What a recorded run says of its machine."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["machine_of"]


def machine_of() -> dict[str, str]:
    """Architecture, processor and Python."""
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
