"""The image's parts that need no engine."""

import importlib
import os
import re
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


def test_a_machine_without_settings_has_no_secrets(pip_conf, monkeypatch, build_secrets):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)  # then pip reads no other either
    with ExitStack() as stack:
        assert build_secrets(stack, None) == {}


def test_the_dockerfile_begins_with_the_default_line():
    line = read_versions(patches_folder()).default_line
    text = (DOCKER / "Dockerfile").read_text()
    assert f"ARG BASE_IMAGE={line.image}\n" in text
    assert f"ARG MEGATRON_VERSION={line.name}\n" in text


def entrypoint(*words, **variables):
    env = {**os.environ, "MEGATRON": "/nowhere", **variables}
    command = [str(DOCKER / "entrypoint"), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_the_entrypoint_says_what_it_can_do():
    for words in ((), ("help",), ("--help",), ("-h",)):
        assert "docker run IMAGE pretrain_gpt.py ARGS" in entrypoint(*words).stdout
    assert entrypoint("echo", "any command").stdout == "any command\n"
    refused = entrypoint("pretrain_gpt.py", "--moe-router-replay")
    assert refused.returncode == 1
    assert "build with MEGATRON_SOURCE=git" in refused.stderr


@pytest.mark.parametrize("option", ["--moe-router-replay", "--rollouts=store", "--save=there"])
@pytest.mark.parametrize("state", ["pristine", "applied", "unknown"])
def test_an_unpatched_tree_is_named_where_an_option_needs_the_patches(tmp_path, option, state):
    for name, says in (("megatron-r3", f"{state}: TREE"), ("torchrun", "it trains")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "pretrain_gpt.py").touch()
    tree = {"MEGATRON": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = entrypoint("pretrain_gpt.py", "--lr", "1", option, **tree)
    if state == "pristine" and option != "--save=there":
        why = f"the Megatron-LM in {tmp_path} is not patched; run `megatron-r3 apply {tmp_path}`"
        assert (done.returncode, done.stderr) == (1, f"error: {why}\n")
    else:
        assert (done.returncode, done.stdout) == (0, "it trains\n")


# Root may write everywhere; without this capability the modes of a folder are for root too.
AS_A_USER = ["setpriv", "--bounding-set", "-dac_override"] if os.getuid() == 0 else []


@pytest.mark.parametrize("words", [["--save", "{}/a/b"], ["--tensorboard-dir={}"]])
@pytest.mark.parametrize("mode", [0o555, 0o755])
def test_a_volume_that_cannot_be_written_is_named(tmp_path, words, mode):
    (tmp_path / "pretrain_gpt.py").touch()
    (tmp_path / "torchrun").write_text("#!/bin/sh\necho 'it trains'\n")
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "volume").mkdir(mode=mode)
    given = [word.format(tmp_path / "volume") for word in ["pretrain_gpt.py", *words]]
    env = {**os.environ, "MEGATRON": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [*AS_A_USER, str(DOCKER / "entrypoint"), *given]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if mode == 0o755:
        assert (done.returncode, done.stdout) == (0, "it trains\n")
    else:
        assert done.returncode == 1
        assert f"may not write in {tmp_path / 'volume'}; run it as a user who may" in done.stderr
        assert done.stderr.count("\n") == 1


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
        capsys.readouterr().err
        == "error: no image was built here: run make image first, or name one by TAG=\n"
    )


def test_a_docker_without_buildkit_is_named(image, tmp_path, capsys):
    client = tmp_path / "docker"
    client.write_text("#!/bin/sh\necho 'ERROR: the buildx component is missing' >&2; exit 1\n")
    client.chmod(0o755)
    assert image.main(["build", "--docker", str(client)]) == 1
    line = capsys.readouterr().err
    assert line.startswith(f"error: {client}: it cannot build with BuildKit")
    assert line.count("\n") == 1


def test_an_image_of_a_sampler_begins_with_an_engine(image, tmp_path, capsys):
    asked = tmp_path / "asked"
    client = tmp_path / "docker"
    client.write_text(f"#!/bin/sh\necho $* >>{asked}\ncase $* in *--help) echo --secret; esac\n")
    client.chmod(0o755)
    words = ["build", "--target", "sampler", "--docker", str(client)]
    assert image.main(words) == 1
    assert "make image-sampler BASE_IMAGE=" in capsys.readouterr().err
    assert not asked.exists()
    assert image.main([*words, "--base", "vllm/vllm-openai:v0.30.0"]) == 0
    assert "--target sampler --build-arg BASE_IMAGE=vllm/vllm-openai:v0.30.0" in asked.read_text()
    assert "--tag megatron-r3-sampler ." in asked.read_text()


@pytest.mark.parametrize("words", [["build"], ["test", "--tag", "made"]])
def test_a_machine_without_docker_is_told(image, tmp_path, capsys, words):
    assert image.main([*words, "--docker", str(tmp_path / "docker")]) == 1
    assert "no such program here: install Docker" in capsys.readouterr().err
