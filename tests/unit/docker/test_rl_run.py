"""docker/rl-run, with stand-ins for compose and docker: the folder, the config, the status.

CI runs the same script with a real engine, a real image and the real loop (.ci/run).
"""

import os
import subprocess
from pathlib import Path

import pytest
from published import make_tree

from demo.online import Places, write_config
from megatron_r3.loop.config import read_config

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"
# in place of docker-compose: notes who and what, and gives what a container would
COMPOSE = """#!/bin/sh
echo "$RUN_AS $*" >>"$LOG"
case $* in
  *demo.policy*) touch "$VOLUME/run.toml" ;;
  *" rl check "*) exit "${CHECK:-0}" ;;
  *" ps "*) for part; do :; done; echo "id-of-$part" ;;
esac
"""
# in place of docker: the state of a container is that of its part in $STATES
CLIENT = """#!/bin/sh
for id; do :; done
part=${id#id-of-}
case $1 in
  inspect) echo "$STATES" | tr , '\\n' | sed -n "s/^$part=//p" ;;
  logs) echo "$part says this" ;;
esac
"""
ENDED = "sampler=exited 0,collector=exited 0,trainer=exited 0"


@pytest.fixture
def rl_run(tmp_path):
    """Runs docker/rl-run with the given VOLUME; what it says, and what it asked compose for."""
    stub, log = tmp_path / "stub", tmp_path / "stub" / "log"
    stub.mkdir()
    for name, text in (("compose", COMPOSE), ("docker", CLIENT)):
        (stub / name).write_text(text)
        (stub / name).chmod(0o755)

    def run(volume, **more):
        log.write_text("")
        env = {**os.environ, "COMPOSE": str(stub / "compose"), "DOCKER": str(stub / "docker")}
        env |= {"LOG": str(log), "HOME": str(tmp_path / "home"), "STATES": ENDED}
        done = subprocess.run(
            [str(DOCKER / "rl-run")],
            env={**env, "VOLUME": str(volume), **more},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            umask=0o022,
            timeout=60,
        )
        return done, log.read_text().splitlines()

    (tmp_path / "home").mkdir()
    return run


@pytest.mark.parametrize("mode", [None, 0o700, 0o750, 0o755])
def test_a_run_opens_its_folder_to_nobody(rl_run, tmp_path, mode):
    volume = tmp_path / "a run:1"
    if mode is not None:
        volume.mkdir()
        volume.chmod(mode)
    done, asked = rl_run(volume.name)  # relative to where the user is
    assert done.returncode == 0, done.stderr
    assert volume.stat().st_mode & 0o777 == (0o700 if mode is None else mode)
    who = f"{os.getuid()}:{os.getgid()} -p r3-"
    assert all(line.startswith(who) for line in asked)
    what = ("demo.policy", "rl check run.toml", "up -d sampler collector trainer", "ps", "ps", "ps")
    what += ("docker/rewards.py run.toml", "down")
    assert len(asked) == len(what)
    assert all(words in line for words, line in zip(what, asked, strict=True))
    assert (volume / "logs" / "trainer.log").read_text() == "trainer says this\n"


def test_the_demo_is_made_once_and_runs_know_each_other_by_their_folder(rl_run, tmp_path):
    _, first = rl_run(tmp_path / "run")
    _, second = rl_run(tmp_path / "run", PARTS="collector trainer")
    _, other = rl_run(tmp_path / "other")
    assert [sum("demo.policy" in line for line in asked) for asked in (first, second, other)] == [
        1,
        0,
        1,
    ]
    projects = [asked[-1].split()[2] for asked in (first, second, other)]
    assert projects[0] == projects[1] != projects[2]
    assert any(line.endswith("up -d collector trainer") for line in second)


@pytest.mark.parametrize(
    ("states", "part", "status"),
    [
        ("sampler=running 0,collector=running 0,trainer=exited 7", "trainer", 7),
        ("sampler=running 0,collector=exited 1,trainer=restarting 9", "collector", 1),
        ("sampler=dead 137,collector=running 0,trainer=running 0", "sampler", 137),
        # the first part that failed, also when the others are at their end
        ("sampler=exited 3,collector=exited 0,trainer=exited 0", "sampler", 3),
    ],
)
def test_the_status_is_that_of_the_part_that_failed(rl_run, tmp_path, states, part, status):
    done, asked = rl_run(tmp_path / "run", STATES=states)
    assert done.returncode == status
    assert f"{part} says this\nerror: the {part} ended with status {status}" in done.stderr
    assert asked[-1].endswith("down --timeout 30")
    assert not any("rewards" in line for line in asked)


def test_a_config_that_is_refused_starts_nothing(rl_run, tmp_path):
    done, asked = rl_run(tmp_path / "run", CHECK="1")
    assert done.returncode == 1
    assert "rl check" in asked[-1]


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


def test_a_run_refuses_a_folder_that_is_more_than_its_own(rl_run, tmp_path):
    words = ("is your home folder, or contains it", "name a folder for this run alone")
    refused(rl_run, tmp_path / "home", *words)
    refused(rl_run, tmp_path, *words)
    # what passwd says; a stand-in, so that no real home is ever given to the script
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "getent").write_text(f"#!/bin/sh\necho me:x:0:0::{tmp_path}/home:/bin/sh\n")
    (tmp_path / "bin" / "getent").chmod(0o755)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    for home in ("/nowhere", ""):
        refused(rl_run, tmp_path / "home", *words, HOME=home, PATH=path)


def test_a_run_refuses_what_others_may_write(rl_run, tmp_path):
    volume = tmp_path / "run"
    volume.mkdir()
    volume.chmod(0o757)
    refused(rl_run, volume, "anybody may write there", "chmod o-w")


def test_a_config_lies_in_the_folder(rl_run, tmp_path):
    volume = tmp_path / "run"
    volume.mkdir()
    (tmp_path / "else.toml").touch()
    for config in ("../else.toml", str(tmp_path / "else.toml")):
        refused(rl_run, volume, "give a path below this folder", CONFIG=config)
    # a wrong name is no wish for a demo
    refused(rl_run, volume, "has no mine.toml", CONFIG="mine.toml")
    (volume / "mine.toml").touch()
    done, asked = rl_run(volume, CONFIG="mine.toml")
    assert done.returncode == 0, done.stderr
    assert asked[0].endswith("rl check mine.toml")


def test_a_second_run_in_a_folder_is_refused(rl_run, tmp_path):
    volume = tmp_path / "run"
    volume.mkdir()
    holds = ["flock", str(volume / ".rl-run.lock"), "sleep", "60"]
    with subprocess.Popen(holds, start_new_session=True) as other:
        try:
            while subprocess.run(["flock", "-n", holds[1], "true"], check=False).returncode == 0:
                pass
            refused(rl_run, volume, "docker/rl-run runs there already")
        finally:
            os.killpg(other.pid, 9)


def made(folder, monkeypatch):
    """The config that demo/policy.py writes, in a folder with what it names."""
    (folder / "start" / "hf").mkdir(parents=True)
    (folder / "start" / "hf" / "config.json").write_text("{}")
    (folder / "start" / "checkpoint").mkdir()
    make_tree(folder / "tree")
    monkeypatch.setenv("MEGATRON", str(folder / "tree"))
    file = folder / "run.toml"
    write_config(file, Places("start", "$MEGATRON", "."), "port = 30000", 0, 2)
    return file


def test_the_demos_config_names_nothing_outside_of_its_folder(tmp_path, monkeypatch):
    file = made(tmp_path, monkeypatch)
    text = file.read_text()
    assert str(tmp_path) not in text
    assert str(ROOT) not in text
    config = read_config(file)
    assert config.path(config.policy.checkpoint) == tmp_path / "start" / "checkpoint"
    assert config.path(config.trainer.megatron) == tmp_path / "tree"
    assert '\nscript = "-m megatron_r3.cpu ./demo/pretrain.py"' in text
