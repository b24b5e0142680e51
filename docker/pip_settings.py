"""Gives this machine's pip settings to a build as secrets: certificates, indices, wheels.

A build cannot see a folder of this machine. So a folder that the settings name is served on
127.0.0.1 during the build, which therefore needs the host's network.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from contextlib import ExitStack
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote, urlsplit

INDICES, LINKS = ("index-url", "extra-index-url"), ("find-links",)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


def build_secrets(stack: ExitStack, pip_conf: Path | None) -> dict[str, Path]:
    """The files that a build takes as secrets, by their ids; they exist while `stack` is open.

    Args:
        pip_conf: a file that the build gets as it is. None: a file is made from what `pip config
            list` prints on this machine.
    """
    settings = _settings()
    secrets = {}
    if "cert" in settings:
        secrets["ca"] = Path(settings["cert"])
    if pip_conf is None:
        kept = {}
        for name in (*INDICES, *LINKS):
            places = settings.get(name, "").split()
            if places:
                kept[name] = "\n  ".join(_reachable(stack, place, name) for place in places)
        if kept:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="pip-conf-")))
            lines = [f"{name} = {value}" for name, value in kept.items()]
            (folder / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))
            pip_conf = folder / "pip.conf"
    if pip_conf is not None:
        secrets["pip_conf"] = pip_conf
    return secrets


def _settings() -> dict[str, str]:
    """pip's settings by name; a setting of the environment wins over one of a file."""
    # one line: "global.index-url='https://...'", or ":env:.index-url='https://...'"
    command = [sys.executable, "-m", "pip", "config", "list", "--disable-pip-version-check"]
    listed = subprocess.run(command, capture_output=True, check=False, text=True).stdout
    settings = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    return settings


def _reachable(stack: ExitStack, place: str, name: str) -> str:
    """The address of `place` for the build: `place` itself, or that of a folder served here."""
    url = urlsplit(place)
    path = Path(unquote(url.path) if url.scheme == "file" else place)
    if not path.is_dir():
        return place
    # An index often links to files beside it (simple/six/ to ../../files/six.whl), so the folder
    # above the index is served.
    root, rest = (path.parent, f"{path.name}/") if name in INDICES else (path, "")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(root)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.shutdown)
    return f"http://127.0.0.1:{server.server_port}/{rest}"
