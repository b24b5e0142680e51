"""The image's parts that need no engine."""

import os
import re
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from docker.pip_settings import build_secrets
from megatron_r3.patching.matrix import patches_folder, read_matrix

DOCKER = Path(__file__).parents[2] / "docker"


@pytest.fixture
def pip_conf(tmp_path, monkeypatch):
    """The machine's pip settings are those of this file."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    conf = tmp_path / "machine.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(conf))
    wheels, index = tmp_path / "wheels", tmp_path / "index" / "simple"
    for folder, text in ((wheels, "a wheel"), (index / "six", "a page")):
        folder.mkdir(parents=True)
        (folder / "index.html").write_text(text)
    (index.parent / "files").mkdir()
    (index.parent / "files" / "six.whl").write_text("beside it")
    conf.write_text(
        f"[global]\ncert = /some/ca.crt\nfind-links = {wheels}\n"
        f"extra-index-url = file://{index} https://else.invalid/simple\n"
    )
    return conf


def get(url):
    with urllib.request.urlopen(url) as answer:
        return answer.read().decode()


def test_folders_of_this_machine_are_served_to_the_build(pip_conf):
    with ExitStack() as stack:
        secrets = build_secrets(stack, None)
        assert secrets["ca"] == Path("/some/ca.crt")
        text = secrets["pip_conf"].read_text()
        links, index = re.findall(r"http://127\.0\.0\.1:\d+\S*", text)[::-1]
        assert get(links) == "a wheel"
        assert get(f"{index}six/") == "a page"
        assert get(f"{index}../files/six.whl") == "beside it"
        assert "https://else.invalid/simple" in text
        command = [sys.executable, "-m", "pip", "config", "list"]
        env = {**os.environ, "PIP_CONFIG_FILE": str(secrets["pip_conf"])}
        listed = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert "global.find-links" in listed.stdout  # pip reads it
    assert not secrets["pip_conf"].exists()
    with pytest.raises(OSError, match="refused"):
        get(links)


def test_a_pip_conf_is_taken_as_it_is(pip_conf, tmp_path):
    with ExitStack() as stack:
        assert build_secrets(stack, tmp_path / "mine")["pip_conf"] == tmp_path / "mine"


def test_a_machine_without_settings_has_no_secrets(pip_conf, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)  # then pip reads no other either
    with ExitStack() as stack:
        assert build_secrets(stack, None) == {}


def test_the_dockerfile_begins_with_the_default_line():
    line = read_matrix(patches_folder()).default_line
    text = (DOCKER / "Dockerfile").read_text()
    assert f"ARG BASE_IMAGE={line.image}\n" in text
    assert f"ARG MEGATRON_VERSION={line.name}\n" in text


def entrypoint(*words):
    env = {**os.environ, "MEGATRON": "/nowhere"}
    command = [str(DOCKER / "entrypoint"), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_the_entrypoint_says_what_it_can_do():
    assert "docker run IMAGE pretrain_gpt.py ARGS" in entrypoint().stdout
    assert entrypoint("echo", "any command").stdout == "any command\n"
    refused = entrypoint("pretrain_gpt.py", "--moe-router-replay")
    assert refused.returncode == 1
    assert "build with MEGATRON_SOURCE=git" in refused.stderr


def test_there_is_nothing_to_test_before_a_build(tmp_path, monkeypatch, capsys):
    from docker import image

    monkeypatch.setattr(image, "BUILT", tmp_path / "none")
    assert image.main(["test"]) == 1
    assert (
        capsys.readouterr().err == "error: no image was built here: make image first, or say TAG=\n"
    )
