"""docker/launch/: the Slurm script and the Kubernetes jobs give commands that there are.

What is not seen here is in docs/launch.md: a Slurm cluster ran the script, no Kubernetes cluster
ran the jobs. The JobSet: test_jobset.py. Several jobs of Slurm: test_slurm_parts.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch_files import JOBSET, KUBERNETES, PARTS, SLURM, parsed, resources, rl_commands
from published import make_tree
from torch.distributed.run import get_args_parser

from demo.online import Places, write_config
from megatron_r3.loop.config import read_config
from megatron_r3.loop.config_tables import SamplerTable
from megatron_r3.loop.trainer import printed_command, trainer_command

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "launch.md").read_text()


def wrong_jobs(text: str) -> list[str]:
    """What does not fit together in the file: ports, names, labels, counts, commands."""
    there, wrong = resources(text), []
    sampler, trainer = (there["Service", f"megatron-r3-{part}"] for part in ("sampler", "trainer"))
    if sampler["spec"]["ports"][0]["port"] != SamplerTable().port:
        wrong.append("the sampler's port")
    for part in PARTS:
        job = there["Job", f"megatron-r3-{part}"]["spec"]
        pod = job["template"]["spec"]
        if job.get("suspend") is not True:
            wrong.append(f"the {part} begins before the volume has a config")
        (container,) = pod["containers"]
        service = there.get(("Service", f"megatron-r3-{part}"))
        if service and service["spec"]["selector"] != job["template"]["metadata"]["labels"]:
            wrong.append(f"the labels of the {part}")
        if {m["name"] for m in container["volumeMounts"]} != {v["name"] for v in pod["volumes"]}:
            wrong.append(f"the volumes of the {part}")
        if (
            "PersistentVolumeClaim",
            pod["volumes"][0]["persistentVolumeClaim"]["claimName"],
        ) not in there:
            wrong.append(f"the claim of the {part}")
        words = container["command"]
        words = rl_commands(words[-1])[0] if words[0] == "bash" else words[1:]
        try:
            args = parsed(words)
        except SystemExit:
            wrong.append(f"the command of the {part}")
            continue
        hosts = {"sampler": "0.0.0.0", "collector": sampler["metadata"]["name"], "trainer": None}
        if words[1] != part or getattr(args, "host", None) != hosts[part]:
            wrong.append(f"the host or the name in the command of the {part}")
    env = {e["name"]: e.get("value") for e in container["env"]}
    if not int(env["PET_NNODES"]) == job["parallelism"] == job["completions"]:
        wrong.append("the trainer's nodes")
    name = trainer["metadata"]["name"]
    if env["PET_MASTER_ADDR"] != f"megatron-r3-trainer-0.{name}" or pod["subdomain"] != name:
        wrong.append("the name of the trainer's first pod")
    return wrong


def test_the_jobs_of_kubernetes_fit_together() -> None:
    assert wrong_jobs(KUBERNETES) == []


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("- port: 30000 #", "- port: 30001 #", "the sampler's port"),
        ("part: sampler}\n    spec", "part: s}\n    spec", "the labels of the sampler"),
        ("{name: memory, mount", "{name: mem, mount", "the volumes of the sampler"),
        ("{claimName: megatron-r3}", "{claimName: other}", "the claim of the sampler"),
        ('"--host", "0.0.0.0"', '"--port", "1"', "the command of the sampler"),
        ("run.toml --print", "run.toml --colour", "the command of the trainer"),
        ('"megatron-r3-sampler"]', '"sampler"]', "the host or the name in the command"),
        ('"rl", "collector"', '"rl", "sampler"', "the host or the name in the command"),
        ("parallelism: 2", "parallelism: 3", "the trainer's nodes"),
        ("subdomain: megatron-r3-t", "subdomain: t", "the name of the trainer's first pod"),
        ("suspend: true", "suspend: false", "the sampler begins before the volume has a config"),
    ],
)
def test_jobs_that_do_not_fit_are_found(before: str, after: str, complaint: str) -> None:
    assert before in KUBERNETES
    (wrong,) = wrong_jobs(KUBERNETES.replace(before, after, 1))
    assert wrong.startswith(complaint)


def test_the_slurm_script_gives_commands_that_there_are() -> None:
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    found = rl_commands(SLURM.read_text())
    assert [words[1] for words in found] == ["check", "trainer", "sampler", "collector"]
    assert [callable(parsed(words).run) for words in found] == [True] * 4
    with pytest.raises(SystemExit):
        parsed(["rl", "sampler", "run.toml", "--colour"])


def test_torchrun_reads_the_variables_that_all_set(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
    for text in (SLURM.read_text(), KUBERNETES, JOBSET):
        assert set(re.findall("PET_[A-Z_]+", text)) == names
    plain = vars(get_args_parser().parse_args(["script.py"]))
    for name in names:
        monkeypatch.setenv(name, "7")
        given = vars(get_args_parser().parse_args(["script.py"]))
        field = name.removeprefix("PET_").lower()
        assert str(given[field]) == "7" != str(plain[field])
        monkeypatch.delenv(name)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config of the demo's start, with a `launch` that prints what it is given."""
    (tmp_path / "start" / "hf").mkdir(parents=True)
    (tmp_path / "start" / "hf" / "config.json").write_text("{}")
    (tmp_path / "start" / "checkpoint").mkdir()
    make_tree(tmp_path / "a tree")
    monkeypatch.setenv("MEGATRON", str(tmp_path / "a tree"))
    file = tmp_path / "run.toml"
    write_config(file, Places("start", "$MEGATRON", "."), "port = 30000", 0, 2)
    shows = [sys.executable, "-c", "import sys, json; print(json.dumps(sys.argv[1:]))"]
    text = file.read_text().replace("processes = 2", f"launch = {json.dumps(shows)}")
    file.write_text(text)
    return file


def test_a_shell_runs_the_printed_command_word_by_word(config: Path, tmp_path: Path) -> None:
    (container,) = resources()["Job", "megatron-r3-trainer"]["spec"]["template"]["spec"][
        "containers"
    ]
    ours = tmp_path / "bin" / "megatron-r3"
    ours.parent.mkdir()
    ours.write_text(f'#!/bin/sh\nexec {sys.executable} -m megatron_r3.cli "$@"\n')
    ours.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{ours.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        container["command"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    read = read_config(config)
    assert json.loads(done.stdout) == trainer_command(read)[3:]
    # Slurm's script gives the same text to `bash -c`
    slurm = subprocess.run(
        ["bash", "-c", f"export PET_NODE_RANK=0; exec {printed_command(read)}"],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert slurm.stdout == done.stdout


def test_the_pages_config_is_one_that_is_read(config: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    text = re.sub(r"^launch = .*$", "", config.read_text(), flags=re.MULTILINE)
    config.write_text(text.replace("[trainer]\n", block))
    launch = read_config(config).trainer.launch
    assert launch == ["torchrun", "--nproc-per-node", "8"]
    assert str(launch).replace("'", '"') in KUBERNETES  # its comment
    config.write_text(config.read_text().replace("launch =", "lunch ="))
    with pytest.raises(ValueError, match="lunch: no such name"):
        read_config(config)
