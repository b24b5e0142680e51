"""Downloads what packages.toml names, each file checked, for the machine described there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatron_r3.patching.git import PatchingError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = Path(__file__).with_name("packages.toml")
SECTIONS = ("site", "te", "source")
# pip asks a source package for its metadata by running its setup.py. The one of
# transformer_engine_torch stops where torch was built without CUDA. The site that pip's Python
# reads at its start says CUDA 13.0 in its place; nothing is compiled here.
PRETEND_CUDA = """
try:
    import torch
except ImportError:
    pass
else:
    torch.version.cuda = torch.version.cuda or "13.0"
"""


def read_table(file: Path = TABLE) -> dict[str, Any]:
    """packages.toml: `python`, `platforms`, and for each section {"name==version": sha256}."""
    return tomllib.loads(file.read_text())


def download(out: Path) -> list[str]:
    """Fetch every package into the folder of its section; return their requirements.

    Raises:
        PatchingError: a download fails, or gives another file than the table names.
    """
    table = read_table()
    for section in SECTIONS:
        _download(table, section, out / section)
    return [requirement for section in SECTIONS for requirement in table[section]]


def _download(table: dict[str, Any], section: str, folder: Path) -> None:
    options = ["--no-binary", ":all:", "--no-build-isolation"]
    if section != "source":
        options = ["--only-binary", ":all:", "--python-version", table["python"]]
        options += ["--implementation", "cp"]
        options += [word for name in table["platforms"] for word in ("--platform", name)]
    with tempfile.TemporaryDirectory(prefix="gpu-kit-pip-") as temp:
        lines = [f"{name} --hash=sha256:{sha256}\n" for name, sha256 in table[section].items()]
        requirements = Path(temp, "requirements.txt")
        requirements.write_text("".join(lines))
        Path(temp, "sitecustomize.py").write_text(PRETEND_CUDA)
        command = [
            *(sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"),
            *("--no-deps", "--require-hashes", "--requirement", str(requirements)),
            *("--dest", str(folder), *options),
        ]
        path = os.pathsep.join([temp, os.environ.get("PYTHONPATH", "")])
        pip = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if pip.returncode:
        last = "\n".join(pip.stdout.splitlines()[-5:])
        raise PatchingError(f"pip cannot download the packages of [{section}]:\n{last}")
