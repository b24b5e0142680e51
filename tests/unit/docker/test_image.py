"""The image's parts that need no engine."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatron_r3.patching.versions import patches_folder, read_versions

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"


@pytest.fixture
def image(monkeypatch):
    """docker/image.py, imported as Python finds it when it is run as a script."""
    monkeypatch.syspath_prepend(DOCKER)
    return importlib.import_module("image")


@pytest.fixture
def build_secrets(image):
    return image.build_secrets


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


def test_folders_of_this_machine_are_served_to_the_build(pip_conf, build_secrets):
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


def test_a_pip_conf_is_taken_as_it_is(pip_conf, tmp_path, build_secrets):
    with ExitStack() as stack:
        assert build_secrets(stack, tmp_path / "mine")["pip_conf"] == tmp_path / "mine"


def test_a_machine_without_settings_has_no_secrets(pip_conf, monkeypatch, build_secrets):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)  # then pip reads no other either
    with ExitStack() as stack:
        assert build_secrets(stack, None) == {}


def test_the_dockerfile_begins_with_the_default_line():
    line = read_versions(patches_folder()).default_line
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


def test_the_script_runs_from_any_folder(tmp_path):
    command = [sys.executable, str(DOCKER / "image.py"), "--help"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "build,test,matrix" in done.stdout


def importable(image, *path):
    """Which folders of the project `import` finds, elsewhere, with these folders on sys.path."""
    code = f"import sys\nsys.path[:0] = {[str(folder) for folder in path]}\n{image.IMPORTABLE}"
    # -I -S: neither PYTHONPATH nor site-packages, where an editable install would be found
    command = [sys.executable, "-I", "-S", "-c", code, str(ROOT), *image.UNWANTED]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_nothing_but_the_package_is_on_anyones_path(image, tmp_path):
    """What `make image-test` asks inside the image, and what the Dockerfile does for it."""
    site = tmp_path / "site-packages"
    (site / "docker").mkdir(parents=True)  # the Docker SDK
    (site / "docker" / "__init__.py").write_text("")
    (site / "megatron_r3").symlink_to(ROOT / "megatron_r3")
    assert importable(image, site) == []
    others = [name for name in image.UNWANTED if name != "docker"]
    assert importable(image, site, ROOT) == others
    assert importable(image, ROOT) == list(image.UNWANTED)
    assert not list(DOCKER.glob("__init__.py"))
    text = (DOCKER / "Dockerfile").read_text()
    assert re.findall("PYTHONPATH=([^ ]*)", text) == ["/workspace/Megatron-LM"]
    assert (
        "pip install --no-deps . " in text
    )  # --editable puts the folder of the package on the path


@pytest.mark.parametrize(
    ("user", "found", "message"),
    [
        ("0", "", "does not run, or runs as root"),
        ("", "", "does not run, or runs as root"),
        ("1100", "docker", "these can be imported from anywhere: docker"),
        ("1100", "", ""),
    ],
)
def test_an_image_is_looked_at_before_its_tests(image, tmp_path, capfd, user, found, message):
    client = tmp_path / "docker"
    client.write_text(
        f"#!/bin/sh\ncase $* in *'id --user') echo {user} ;; *python3*) echo {found} ;;\n"
        "*' test some/test.py') exit 3 ;; *) exit 9 ;; esac\n"
    )
    client.chmod(0o755)
    words = ["test", "--docker", str(client), "--tag", "made", "--tests", "some/test.py"]
    assert image.main(words) == (1 if message else 3)
    printed = capfd.readouterr()
    assert message in printed.err
    assert ("made: tested in" in printed.out) == (not message)


def test_there_is_nothing_to_test_before_a_build(image, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(image, "BUILT", tmp_path / "none")
    assert image.main(["test"]) == 1
    assert (
        capsys.readouterr().err == "error: no image was built here: make image first, or say TAG=\n"
    )


# in place of docker-compose: notes who and what, and gives what a container would
COMPOSE = """#!/bin/sh
echo "$RUN_AS $*" >>"$LOG"
case $* in *demo.policy*)
  mkdir "$VOLUME/policy" && echo a >"$VOLUME/train.args" && echo b >"$VOLUME/export.args" ;;
esac
"""


@pytest.fixture
def rl_run(tmp_path):
    """Runs docker/rl-run with the given VOLUME; what it says, and what it asked compose for."""
    stub, log = tmp_path / "stub" / "compose", tmp_path / "stub" / "log"
    stub.parent.mkdir()
    stub.write_text(COMPOSE)
    stub.chmod(0o755)

    def run(volume, **more):
        log.write_text("")
        env = {**os.environ, "COMPOSE": str(stub), "LOG": str(log), "HOME": str(tmp_path / "home")}
        done = subprocess.run(
            [str(DOCKER / "rl-run")],
            env={**env, "VOLUME": str(volume), **more},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            umask=0o022,
        )
        return done, log.read_text().splitlines()

    (tmp_path / "home").mkdir()
    return run


@pytest.mark.parametrize("mode", [None, 0o700, 0o750, 0o755])
def test_a_turn_opens_its_folder_to_nobody(rl_run, tmp_path, mode):
    volume = tmp_path / "a run:1"
    if mode is not None:
        volume.mkdir()
        volume.chmod(mode)
    done, asked = rl_run(volume.name)  # relative to where the user is
    assert done.returncode == 0, done.stderr
    assert volume.stat().st_mode & 0o777 == (0o700 if mode is None else mode)
    assert len(asked) == 7
    who = f"{os.getuid()}:{os.getgid()} -p r3 "
    assert all(line.startswith(who) for line in asked)
    assert "--hf-export /volume/next" in asked[-2]


def test_the_folder_is_made_and_not_those_above_it_closed(rl_run, tmp_path):
    done, _ = rl_run(tmp_path / "runs" / "first")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "runs" / "first").stat().st_mode & 0o777 == 0o700


def refused(rl_run, volume, *words, **more):
    before = volume.stat().st_mode if volume.exists() else None
    done, asked = rl_run(volume, **more)
    assert (done.returncode, asked) == (1, [])
    assert done.stderr.startswith(f"error: VOLUME={volume}: ")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr
    assert (volume.stat().st_mode if volume.exists() else None) == before


def test_a_turn_refuses_a_folder_that_is_more_than_its_own(rl_run, tmp_path):
    words = ("is a home folder, or has one in it", "name a folder for this run alone")
    refused(rl_run, tmp_path / "home", *words)
    refused(rl_run, tmp_path, *words)
    # what passwd says; a stand-in, so that no real home is ever given to the script
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "getent").write_text(f"#!/bin/sh\necho me:x:0:0::{tmp_path}/home:/bin/sh\n")
    (tmp_path / "bin" / "getent").chmod(0o755)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    for home in ("/nowhere", ""):
        refused(rl_run, tmp_path / "home", *words, HOME=home, PATH=path)


def test_a_turn_refuses_what_others_may_write(rl_run, tmp_path):
    volume = tmp_path / "run"
    volume.mkdir()
    volume.chmod(0o757)
    refused(rl_run, volume, "anybody may write there", "chmod o-w")
    volume.rmdir()
    volume.write_text("")
    refused(rl_run, volume, "is no folder")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_a_turn_refuses_the_folder_of_somebody_else(rl_run, tmp_path):
    volume = tmp_path / "run"
    volume.mkdir()
    shutil.chown(volume, 65534)
    refused(rl_run, volume, "belongs to nobody; run this as that user")
    shutil.chown(volume, 0)


def test_a_turn_does_not_begin_where_its_policy_could_not_be_written(rl_run, tmp_path):
    (tmp_path / "run" / "next").mkdir(parents=True)
    refused(rl_run, tmp_path / "run", "move next/ to policy/ and trained/ to checkpoint/")


def test_containers_run_as_who_is_named_and_have_a_home():
    """docker-compose itself is tried where there is one: it refuses a run without RUN_AS."""
    text = (DOCKER / "compose.yaml").read_text()
    assert text.count("<<: *common") == 3
    assert text.count("<<: *environment") == 3
    assert 'user: "${RUN_AS:?' in text
    command = shutil.which("docker-compose")
    if command is None:
        pytest.skip("no docker-compose here: compose.yaml was not parsed by it")
    config = [command, "-f", str(DOCKER / "compose.yaml"), "config"]
    env = {**os.environ, "VOLUME": "/some/a b:c"}
    for who in ("", "1000:1001"):
        done = subprocess.run(
            config, env={**env, "RUN_AS": who}, capture_output=True, text=True, check=False
        )
        if who:
            assert done.stdout.count(f"user: {who}\n") == 3
            assert done.stdout.count("HOME: /tmp\n") == 3
            assert done.stdout.count("source: /some/a b:c\n") == 3
        else:
            assert done.returncode != 0
            assert "who the containers run as" in done.stderr
