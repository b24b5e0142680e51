"""README, CONTRIBUTING and docs: something runs each command.

Every check is a function from a text to complaints, so that each has its control: a text that is
made up and wrong, and must be found.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from docs_pages import PAGES, ROOT, commands, help_of
from engine_server import DATA, engine, write_inputs
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatron_r3.cli import main
from megatron_r3.data.store import RolloutStore

MAKEFILE = (ROOT / "Makefile").read_text()
CI = (ROOT / ".ci" / "run").read_text()
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


# -- what runs each command

HERE = "this file"
NO_GPU = "by hand: it needs a GPU"
PACKED = "tests/unit/gpu/test_run.py::test_packed_is_unpacked"
NO_CLONE = "by hand: it needs a clone of Megatron-LM, a network away"
REHEARSAL = "by hand: make gpu REHEARSE=1 takes six minutes; tests run its parts"
NO_DOCKER = "by hand: it needs several images of gigabytes"
JOBS = "tests/unit/launch/test_jobs.py"
CONTAINERS = "ci loop_in_containers"
UNIT, RUNS = "tests/unit/", "tests/functional/"
PATCHING = "tests/unit/patching/"
KEEPERS = "tests/unit/keepers/"
CHECK = "tests/functional/test_check.py"
# the first row that matches a command from its beginning counts; `ci make X` is a step of .ci/run,
# or what such a step needs first
RUN_BY = [
    (r"make (setup|megatron|lint|test)\b", "ci make test-all"),
    (r"make (apply .*UNRELEASED=1|check)\b", f"{CHECK}::test_apply_check_status_revert"),
    (r"make (apply|revert|status)\b", "tests/functional/test_make.py::test_apply_status_revert"),
    (r"make verify\b", f"{KEEPERS}test_verify.py::test_the_command"),
    (r"make export\b", f"{KEEPERS}test_export.py::test_the_command"),
    (r"make bump\b", f"{KEEPERS}test_bump.py::test_the_command"),
    (
        r"python -m keepers\.bridge_recipes\b",
        f"{KEEPERS}test_bridge_recipes.py::test_recipes_are_read_without_their_packages",
    ),
    (r"make (fidelity|matrix) .*(MEGATRON|REPO)=", NO_CLONE),
    (r"make gpu REHEARSE=1", REHEARSAL),
    (r"make gpu-pack\b", PACKED),
    (r"make gpu\b", NO_GPU),
    (r"(cat part-|tar x|\./unpack)", PACKED),
    (r"make fidelity\b", "tests/functional/test_make.py::test_fidelity_of_one_case"),
    (r"make image-matrix\b", NO_DOCKER),
    (r"make image-(vllm-cpu|sampler)\b", NO_DOCKER),
    (r"make (help|files)\b", HERE),
    (r"make compare\b", "by hand: it takes an hour; tests/unit/comparison runs its parts"),
    (r"make trees\b", f"{UNIT}fidelity/test_pinned_trees.py::test_a_tree_that_is_refused_is_a_row"),
    (r"make upstream\b", NO_CLONE),
    (r"make mutants\b", f"{UNIT}fidelity/test_mutants.py::test_a_fault_is_put_in_noticed_and"),
    (r"make ([\w-]+)", r"ci make \1"),
    (r"python -m proof\.fidelity\.run --quick\b", "by hand: .ci/newer"),
    (r"megatron-r3 apply\b", "tests/unit/patching/test_patches_cli.py::test_a_whole_round"),
    (r"megatron-r3 megatron\b", f"{PATCHING}test_fetch.py::test_a_commit_is_fetched_alone"),
    (r"megatron-r3 rollouts skew\b", "tests/unit/balance/test_skew.py::test_the_command_prints"),
    (r"megatron-r3 rollouts collect --engine transformers\b", "ci make demo"),
    (r"python -m demo.policy\b", CONTAINERS),  # its first step
    (r"megatron-r3 rollouts\b", HERE),
    (r"megatron-r3 rl check\b", f"{UNIT}loop/test_config.py::test_check_reads_what_the_parts"),
    (
        r"megatron-r3 rl (run|sampler|collector|trainer)\b(?!.*--(host|print))",
        f"{RUNS}test_rl_run.py::test_every_policy_is",
    ),
    (r"megatron-r3 rl (sampler|collector) .*--host\b", f"{JOBS}::test_the_jobs_of_kubernetes"),
    (r"megatron-r3 rl trainer .*--print\b", f"{JOBS}::test_a_shell_runs_the_printed_command"),
    (r"megatron-r3 rl report\b", "tests/unit/loop/test_report.py::test_runs_stand_side_by_side"),
    (
        r"python -m pytest .*test_families_in_vllm\.py\b",
        "by hand: it takes vLLM on the CPU, and seven minutes",
    ),
    (r"python -m pytest\b", "ci make test-all"),
    (r"python -m proof\.comparison\.report\b", f"{UNIT}comparison/test_report.py::test_the"),
    (r"python -m proof\.benchmarks\.report\b", f"{UNIT}benchmarks/test_report.py::test_the"),
    (r"python -m proof\.benchmarks\.\w+", REHEARSAL),
    (r"python -m megatron_r3\.cpu\b", "ci make demo"),
    (
        r"(python -m proof\.fidelity\.traced|torchrun .*--moe-routing-trace-path)\b",
        f"{RUNS}test_traced.py::test_the_tracer_sees",
    ),
    (
        r"(python -m sglang|vllm serve)\b",
        "by hand: the engine's own; make demo SAMPLER=vllm and SAMPLER=sglang run them on the CPU",
    ),
    (r"(uv run|megatron rlhf)\b", "by hand: a framework's own, which needs GPUs"),
    (r"torchrun .*-m megatron_r3\.cpu demo/pretrain\.py\b", "ci make demo"),
    (r"export PYTHONPATH=build/megatron-core-0\.19\.2:", "ci make demo"),
    (
        r"python -m megatron_r3\.weights\.model_arguments\b",
        "tests/unit/weights/test_families.py::test_the_command",
    ),
    (r"torchrun .*\$ARGS\b", f"{RUNS}test_update_examples.py::test_a_command_of_the_page_trains"),
    (r"torchrun .*hf\.py .*--hf-bridge\b", "tests/clients/test_bridge_weights.py::test_a_model"),
    (r"torchrun .*-m megatron_r3\.loop\.serve\b", f"{RUNS}test_serve.py::test_collect_stores"),
    (r"torchrun .*demo/own_loop\.py\b", f"{RUNS}test_docs_example.py::test_the_whole_program"),
    (
        r"torchrun .*-m megatron_r3\.cpu megatron_r3/loop/serve\.py\b",
        "tests/functional/test_serve.py::test_the_command_of_the_page_is_the_one_that_runs_here",
    ),
    (r"torchrun .*hf\.py --hf-export\b", "tests/functional/test_hf.py::test_import_and_export"),
    (r"torchrun .*hf\.py --hf-import\b", "tests/functional/test_hf.py::test_import_and_export"),
    (r"torchrun .*pretrain_gpt\.py .*--rollouts-follow\b", f"{RUNS}test_follow.py::test_a_store"),
    (r"torchrun .*train_rl\.py\b", f"{RUNS}test_rl_loop.py::test_what_the_engine_sampled_is"),
    (r"torchrun .*pretrain_gpt\.py\b", "ci make demo"),  # the options; the model is the reader's
    (r"pip install\b", "ci make test-all"),
    (r"docker build\b", "ci make image"),
    (r"docker run\b", NO_GPU),
    (r"docker/rl-run\b", CONTAINERS),
    (r"sbatch\b", "by hand: on the cluster that .ci/slurm-cluster makes"),
    (r"kubectl\b", "by hand: no Kubernetes cluster was there"),
    (r"(cd|git) ", f"{KEEPERS}test_bump_conflicts.py::test_a_conflict_gives_five_lines"),
]


def runner_of(words: list[str]) -> str | None:
    text = " ".join(words)
    for pattern, runner in RUN_BY:
        if match := re.match(pattern, text):
            return match.expand(runner) if "\\1" in runner else runner
    return None


def needed_by_ci() -> set[str]:
    """The make targets of .ci/run, and those that they need first."""
    needs = dict(re.findall(r"^([a-z-]+):([^\n#]*)", MAKEFILE, re.MULTILINE))
    targets = set(re.findall(r"^\s*(?:step |beside \w+ )?make ([a-z-]+)(?: |$)", CI, re.MULTILINE))
    while more := {n for t in targets for n in needs[t].split() if n in needs} - targets:
        targets |= more
    return targets


def is_there(runner: str) -> bool:
    if runner == HERE or runner.startswith("by hand: "):
        return True
    if runner.startswith("ci loop"):
        return f"  beside loop {runner.removeprefix('ci ')}\n" in CI
    if runner.startswith("ci make "):
        return runner.removeprefix("ci make ") in needed_by_ci()
    path, _, name = runner.partition("::")
    return (ROOT / path).is_file() and f"def {name}" in (ROOT / path).read_text()


def not_run(text: str) -> list[str]:
    """The commands that nothing runs."""
    found = []
    for command in commands(text):
        runner = runner_of(command.words)
        if runner is None or not is_there(runner):
            found.append(f"{' '.join(command.words)} ({runner or 'give it a row in RUN_BY'})")
    return found


@each_page
def test_each_command_is_run_by_a_test_or_by_ci(page: Path) -> None:
    assert not_run(page.read_text()) == []


def test_commands_that_nothing_runs_are_found() -> None:
    assert len(not_run("```bash\nmake coffee\nnpm install && make demo\n```")) == 2
    assert len(not_run("so `make\ncoffee NOW=1` is wrong, and `make` alone is no command")) == 1
    assert not is_there("ci make bump")
    assert not is_there("ci loop_in_cellars")
    assert not is_there("tests/unit/test_docs.py::test_nothing_of_" + "this_name")


def test_every_row_is_of_some_command() -> None:
    texts = [" ".join(c.words) for page in PAGES for c in commands(page.read_text())]
    of_some = {next((p for p, _ in RUN_BY if re.match(p, text)), "") for text in texts}
    assert [pattern for pattern, _ in RUN_BY if pattern not in of_some] == []


# -- make


def wrong_make(words: list[str]) -> str:
    """What is wrong with a make command: an unknown target or variable, or a dry run that fails."""
    given = [word for word in words[1:] if re.fullmatch(r"[A-Z_]+=.*", word)]
    targets = [word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)]
    unknown = [v for v in given if not re.search(rf"^{v.partition('=')[0]}\s*\?=", MAKEFILE, re.M)]
    if unknown or not targets:
        return f"{words}: no such variable or target: {unknown or words[1:]}"
    done = subprocess.run(
        # nothing is made again here: the environment may be older than requirements.lock
        ["make", "-n", "-o", "build/venv/.done", *targets, *given],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return "" if done.returncode == 0 else f"{words}: {done.stderr}"


def test_make_commands_have_targets_and_variables() -> None:
    found = {tuple(c.words) for page in PAGES for c in commands(page.read_text())}
    makes = [[*words] for words in sorted(found) if words[0] == "make"]
    assert len(makes) > 30
    assert [wrong for words in makes if (wrong := wrong_make(words))] == []
    assert wrong_make(["make", "coffee"])
    assert wrong_make(["make", "demo", "SAMPLR=vllm"])


def printed(*command: str) -> list[str]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


# under `make test` a make of its own would say which directory it enters
MAKE = ("make", "--no-print-directory")


def test_make_help_lists_every_target() -> None:
    phony = re.search(r"\.PHONY: (.*?)\n\n", MAKEFILE, re.DOTALL)
    assert phony is not None
    listed = {line.partition(":")[0] for line in printed(*MAKE, "help")}
    assert listed == set(phony[1].replace("\\\n", " ").split())


# -- megatron-r3


class _Parsed(Exception):
    """Raised in the place of running a command that was parsed."""


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """What the real parser makes of `megatron-r3 ...`; SystemExit if it refuses."""
    parse_args = argparse.ArgumentParser.parse_args

    def parsed(self: Any, argv: Any = None, namespace: Any = None) -> Any:
        raise _Parsed(parse_args(self, argv, namespace))

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parsed)
        with pytest.raises(_Parsed) as caught:
            main(words)
    return caught.value.args[0]


def test_commands_of_megatron_r3_parse(monkeypatch, capsys):
    found = [c for page in PAGES for c in commands(page.read_text()) if c.words[0] == "megatron-r3"]
    whole = [c.words[1:] for c in found if c.whole and "..." not in c.words]
    assert len(whole) >= 8
    for words in whole:
        assert callable(parse(words, monkeypatch).run)
    for command in found:  # an inline one leaves arguments out: its options must be there
        names = re.match(r"(?:[a-z][a-z-]* )*", " ".join([*command.words[1:], ""]))
        assert names is not None
        text = help_of(names[0].split(), capsys)
        assert [w for w in command.words if w.startswith("--") and w not in text] == []


def test_a_command_with_an_unknown_option_does_not_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        parse(["rollouts", "inspect", "rollouts", "--colour"], monkeypatch)


def test_the_commands_on_rollouts_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_inputs(tmp_path, 4)
    Path("rewards.py").write_text("def score(sample):\n    return len(sample.response_tokens)\n")
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    Path("HF_DIR").mkdir()
    Path("config.json").rename("HF_DIR/config.json")
    words = Tokenizer(WordLevel({"word": 0}, unk_token="word"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained("HF_DIR")
    line = json.loads((DATA / "14_p12_g10_n2.json").read_text())
    line = {"request": line["request"], "response": line["response"], "reward": [0, 1]}
    Path("recorded.jsonl").write_text(json.dumps(line) + "\n")
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "collect.md").read_text()
    found = [c.words[1:] for c in commands(text) if c.whole and c.words[0] == "megatron-r3"]
    found = [words for words in found if "transformers" not in words]  # make demo runs that
    assert {words[1] for words in found} == {"collect", "inspect", "show", "verify", "convert"}
    shutil.copytree("HF_DIR", "run/policies/v000000")
    Path("run/rollouts").symlink_to("../rollouts")
    with engine() as server:
        for words in found:
            words = [server.url if word.startswith("http://") else word for word in words]
            assert main(words) == 0, capsys.readouterr().err
    assert len(RolloutStore(["rescored"])) == 4 * 8
    assert len(RolloutStore(["converted"])) == 2


@each_page
def test_modules_that_are_run_exist(page: Path) -> None:
    for command in commands(page.read_text()):
        if command.words[:2] == ["python", "-m"] and command.words[2] != "sglang.launch_server":
            assert importlib.util.find_spec(command.words[2]), command.words
