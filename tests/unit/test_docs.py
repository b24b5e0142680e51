"""README, CONTRIBUTING and docs: something runs each command; each path, link and number holds.

Every check is a function from a text to complaints, so that each has its control: a text that is
made up and wrong, and must be found.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engine_server import DATA, engine, write_inputs

from megatron_r3.cli import main
from megatron_r3.store import RolloutStore
from megatron_r3.training.losses import agreement_sums

ROOT = Path(__file__).parents[2]
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").glob("*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text()
CI = (ROOT / ".ci" / "run").read_text()
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


# -- what is in a page


def blocks(text: str, language: str) -> list[str]:
    return [match[3] for match in FENCE.finditer(text) if match[2] == language]


def spans(text: str) -> list[str]:
    """The inline code, with a line break inside it as one space."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", text))]


class Command(NamedTuple):
    words: list[str]
    whole: bool  # of a block; an inline one may leave arguments out


PROGRAMS = ("make", "megatron-r3", "python", "torchrun", "pip", "vllm", "git", "cd")
PROGRAMS += ("docker", "docker/rl-run")


def commands(text: str) -> Iterator[Command]:
    """Every command of the shell blocks, and the inline code that is one."""
    for block in blocks(text, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"\s(?:&&|\|)\s", line):
                if words := without_environment(shlex.split(part, comments=True)):
                    yield Command(words, whole=True)
    for line in re.findall(r"^    ((?:[A-Z_]+=\S+ )*python3? -m .*)", FENCE.sub("", text), re.M):
        yield Command(without_environment(shlex.split(line)), whole=True)
    for span in spans(text):
        for part in re.split(r"\s&&\s", span) if " " in span else ():
            words = without_environment(shlex.split(part))
            if words and words[0] in PROGRAMS and words[1:] not in ([], ["-m"]):
                yield Command(words, whole=False)


def without_environment(words: list[str]) -> list[str]:
    """The words from the program on: `A=1 build/venv/bin/python -m x` gives `python -m x`."""
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program = words[0].rpartition("venv/bin/")[2].replace("python3", "python") if words else ""
    return [program, *words[1:]] if words else []


# -- what runs each command

HERE = "this file"
NO_GPU = "by hand: it needs a GPU"
NO_CLONE = "by hand: it needs a clone of Megatron-LM, a network away"
NO_DOCKER = "by hand: it needs several images of gigabytes"
IMAGE = "tests/unit/docker/test_image.py"
PATCHING = "tests/unit/patching/"
# the first row that matches a command from its beginning counts; `ci make X` is a step of .ci/run,
# or what such a step needs first
RUN_BY = [
    (r"make (setup|megatron|lint)\b", "ci make test"),
    (r"make (apply|revert|status)\b", "tests/functional/test_make.py::test_apply_status_revert"),
    (r"make verify\b", f"{PATCHING}test_verify.py::test_the_command"),
    (r"make export\b", f"{PATCHING}test_export.py::test_the_command"),
    (r"make bump\b", f"{PATCHING}test_bump.py::test_the_command"),
    (r"make (fidelity|matrix) .*(MEGATRON|REPO)=", NO_CLONE),
    (r"make bench-gpu .*MEGATRON=", NO_GPU),
    (r"make image-matrix\b", NO_DOCKER),
    (r"make image-vllm-cpu\b", NO_DOCKER),
    (r"make (help|clean)\b", HERE),
    (r"make ([\w-]+)", r"ci make \1"),
    (r"megatron-r3 rollouts collect --engine transformers\b", "ci make demo"),
    (r"megatron-r3 rollouts\b", HERE),
    (r"python -m pytest\b", "ci make test"),
    (r"python -m fuzz\.run\b", "ci make fuzz"),
    (r"python -m benchmarks\.\w+", "ci make bench-gpu"),
    (r"python -m demo\.collect_vllm\b", "by hand: it takes a vLLM server for minutes"),
    (r"python -m megatron_r3\.cpu\b", "ci make demo"),
    (r"python -m tests\.upstream\.driver\b", "tests/upstream/test_driver.py::test_rows_say_what"),
    (
        r"(python -m sglang|vllm serve)\b",
        "by hand: the engine's own; make demo SAMPLER=vllm runs one",
    ),
    (r"torchrun .*-m megatron_r3\.cpu megatron_r3/pretrain\.py\b", "ci make demo"),
    (r"torchrun .*-m megatron_r3\.cpu ~/Megatron-LM/pretrain_gpt\.py\b", NO_CLONE),
    (r"torchrun .*hf\.py --hf-export\b", "tests/functional/test_hf.py::test_import_and_export"),
    (r"torchrun .*hf\.py --hf-import\b", "tests/functional/test_hf.py::test_import_and_export"),
    (
        r"torchrun .*pretrain_gpt\.py .*--rollouts-follow\b",
        "tests/functional/test_follow.py::test_",
    ),
    (r"torchrun .*pretrain_gpt\.py\b", "ci make demo"),  # the options; the model is the reader's
    (r"pip install\b", "ci make test"),
    (r"docker build\b", "ci make image"),
    (r"docker run\b", NO_GPU),
    (r"docker (compose|stop)\b", f"{IMAGE}::test_containers_run_as_who_is_named"),
    (r"docker/rl-run\b", f"{IMAGE}::test_a_turn_opens_its_folder_to_nobody"),
    (r"(cd|git) ", f"{PATCHING}test_bump_conflicts.py::test_a_conflict_gives_five_lines"),
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
    targets = set(re.findall(r"^\s*make ([a-z-]+)", CI, re.MULTILINE))
    while more := {word for t in targets for word in re.findall(r"[a-z-]+", needs[t])} - targets:
        targets |= more & needs.keys()
        if not more & needs.keys():
            break
    return targets


def is_there(runner: str) -> bool:
    if runner == HERE or runner.startswith("by hand: "):
        return True
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


def test_make_help_lists_every_target() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    phony = re.search(r"\.PHONY: (.*?)\n\n", MAKEFILE, re.DOTALL)
    assert phony is not None
    listed = {line.partition(":")[0] for line in done.stdout.splitlines()}
    assert listed == set(phony[1].replace("\\\n", " ").split()) - {"help"} | (listed & {"help"})


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


def test_commands_of_megatron_r3_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [c for page in PAGES for c in commands(page.read_text()) if c.words[0] == "megatron-r3"]
    whole = [c.words[1:] for c in found if c.whole and "..." not in c.words]
    assert len(whole) >= 8
    for words in whole:
        assert callable(parse(words, monkeypatch).run)
    for command in found:  # an inline one leaves arguments out: its options must be there
        names = re.match(r"(?:[a-z-]+ )*", " ".join([*command.words[1:], ""]))
        assert names is not None
        text = help_of(names[0].split(), monkeypatch)
        assert [w for w in command.words if w.startswith("--") and f"{w}" not in text] == []


def help_of(words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What `megatron-r3 WORDS --help` prints."""
    printed: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(
            argparse.ArgumentParser, "print_help", lambda p: printed.append(p.format_help())
        )
        with pytest.raises(SystemExit) as caught:
            main([*words, "--help"])
    assert caught.value.code == 0
    return printed[0]


def test_a_command_with_an_unknown_option_does_not_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        parse(["rollouts", "inspect", "rollouts", "--colour"], monkeypatch)


def test_the_commands_on_rollouts_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_inputs(tmp_path, 4)
    Path("rewards.py").write_text("def score(sample):\n    return len(sample.response_tokens)\n")
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    Path("HF_DIR").mkdir()
    Path("config.json").rename("HF_DIR/config.json")
    line = json.loads((DATA / "14_p12_g10_n2.json").read_text())
    line = {"request": line["request"], "response": line["response"], "reward": [0, 1]}
    Path("recorded.jsonl").write_text(json.dumps(line) + "\n")
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "collect.md").read_text()
    found = [c.words[1:] for c in commands(text) if c.whole and c.words[0] == "megatron-r3"]
    found = [words for words in found if "transformers" not in words]  # make demo runs that
    assert {words[1] for words in found} == {"collect", "inspect", "verify", "convert"}
    with engine() as server:
        for words in found:
            words = [server.url if word.startswith("http://") else word for word in words]
            assert main(words) == 0, capsys.readouterr().err
    assert len(RolloutStore(["rescored"])) == 4 * 8
    assert len(RolloutStore(["converted"])) == 2


def test_every_option_of_collect_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    text = help_of(["rollouts", "collect"], monkeypatch)
    options = set(re.findall(r"--[a-z][a-z-]+", text)) - {"--help"}
    assert len(options) > 15
    assert options == options_of((ROOT / "docs" / "collect.md").read_text(), "### Every option")


def options_of(text: str, heading: str) -> set[str]:
    """The options in the first column of the table below a heading."""
    table = text.partition(f"{heading}\n\n")[2].partition("\n\n")[0]
    first = [re.split(r"(?<!\\)\|", row)[1] for row in table.splitlines()]
    return set(re.findall(r"--[a-z][a-z-]+", " ".join(first)))


# -- training


def patched_options() -> set[str]:
    """The options that the patches of the default line bring to the command line."""
    text = "".join(p.read_text() for p in sorted((ROOT / "patches/core_r0.19.0").glob("*.patch")))
    options = set(re.findall(r"^\+\s+group\.add_argument\(\s*'(--[\w-]+)'", text, re.MULTILINE))
    fields = re.findall(r"^\+    (moe_router_replay\w*): ([^\n]*)", text, re.MULTILINE)
    for name, rest in fields:  # Megatron makes --no-X of a field that is on
        on = rest.endswith("= True") or "default=True" in rest
        options.add(f"--{'no-' if on else ''}{name.replace('_', '-')}")
    return {option.replace("--no-moe", "--moe") for option in options}


def test_every_option_of_training_is_documented() -> None:
    documented = options_of((ROOT / "docs" / "train.md").read_text(), "## Every option")
    assert len(documented) > 12
    assert {option.replace("--no-moe", "--moe") for option in documented} == patched_options()


@each_page
def test_options_of_ours_exist(page: Path) -> None:
    named = set(re.findall(r"--(?:no-)?(?:moe-router-replay|rollouts)[a-z-]*", page.read_text()))
    known = patched_options() | {o.replace("--moe", "--no-moe") for o in patched_options()}
    assert named - known == set()


def test_the_whole_command_has_options_of_megatron() -> None:
    trees = sorted((ROOT / "build").glob("megatron-core-*/megatron"))
    if not trees:
        pytest.skip("make megatron fetches the sources")
    sources = [path.read_text() for path in trees[-1].rglob("*.py")]
    (words,) = [
        c.words
        for c in commands((ROOT / "docs" / "train.md").read_text())
        if "--num-layers" in c.words
    ]
    assert len(words) > 60

    def known(option: str) -> bool:
        field = re.compile(rf"^    {option[2:].replace('-', '_')}:", re.MULTILINE)
        return any(f"'{option}'" in s or f'"{option}"' in s or field.search(s) for s in sources)

    options = [w for w in words[3:] if w.startswith("--") and w not in patched_options()]
    assert [option for option in options if not known(option)] == []
    assert not known("--num-leyers")


def test_every_logged_name_is_documented() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    table = text.partition("## Each value\n")[2].partition("\n\n-")[0]
    documented = set(re.findall(r"^\| `([^`]+)`", table, re.MULTILINE))
    ones = torch.ones(1, 1)
    names = {name.replace("_", " ") for name in agreement_sums(-ones, -ones, ones)}
    source = "".join(p.read_text() for p in (ROOT / "megatron_r3" / "training").glob("*.py"))
    constants = {
        node.value
        for node in ast.walk(ast.parse((ROOT / "megatron_r3/training/metrics.py").read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names |= {c for c in constants if re.fullmatch(r"[a-z]+ (mismatch|dispatched[a-z ]*)", c)}
    names |= {"policy loss", "reward", "router mismatch/layer N"}
    assert {'"policy loss"' in source, "router mismatch/layer " in constants} == {True}
    assert documented == names


# -- paths, links, imports, numbers

PLACES = (ROOT, ROOT / "megatron_r3", ROOT / "benchmarks")
# made by a command, or of Megatron-LM, or of a server, or in a reader's folder
ELSEWHERE = re.compile(
    r"build/|megatron/|/|~|https?:|pretrain_gpt\.py|\$|(rollouts|trained|next|policy|checkpoint)/|iter_|"
    r"(application|info|ci|debian-python|core)[/:.]|examples/|docker/\.ngc_version"
)


def missing_paths(text: str) -> list[str]:
    """Inline code that looks like a path of this repository, and is none."""
    found = []
    for span in spans(text):
        is_path = re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", span)
        if not is_path or ELSEWHERE.match(span):
            continue
        in_folder = "/" in span.rstrip("/") or span.endswith("/")
        if not in_folder and not span.endswith((".py", ".toml", ".patch")):
            continue
        pattern = re.sub(r"\b(LINE|NAME|MODULE|N|GPU-DATE)\b", "*", span).rstrip("/")
        folders = PLACES if in_folder else (*PLACES, *(f for p in PLACES for f in p.iterdir()))
        if not any(next(iter(f.glob(pattern)), None) for f in folders if f.is_dir()):
            found.append(span)
    return found


@each_page
def test_each_path_exists(page: Path) -> None:
    if page.name != "CHANGELOG.md":  # which may name what was there
        assert missing_paths(page.read_text()) == []


def test_missing_paths_are_found() -> None:
    text = "`training/losses.py`, `seams/cellar.py`, `patches/LINE/`, `docs/`, `cellar/`, `a/b`"
    assert missing_paths(text) == ["seams/cellar.py", "cellar/", "a/b"]


def anchors(text: str) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def broken_links(text: str, page: Path) -> list[str]:
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        path, _, anchor = target.partition("#")
        if re.match(r"https?:", target):
            continue
        file = (page.parent / path).resolve() if path else page
        wrong_anchor = anchor and file.exists() and anchor not in anchors(file.read_text())
        if not file.exists() or wrong_anchor:
            found.append(target)
    return found


@each_page
def test_each_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page.read_text(), page) == []


def test_broken_links_are_found() -> None:
    text = "[a](README.md#five-recipes) [b](README.md#six) [c](docs/none.md) [d](https://x.y)"
    assert broken_links(text, ROOT / "PAGE.md") == ["README.md#six", "docs/none.md"]


def wrong_python(text: str) -> list[str]:
    """Imports of this project in python blocks that do not resolve; a block must compile."""
    found = []
    for block in blocks(text, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("megatron_r3"):
                module = importlib.import_module(str(node.module))
                names = [alias.name for alias in node.names]
                found += [n for n in names if not hasattr(module, n) and not submodule(module, n)]
    return found


def submodule(module: Any, name: str) -> bool:
    return importlib.util.find_spec(f"{module.__name__}.{name}") is not None


@each_page
def test_python_blocks_compile_and_import_what_there_is(page: Path) -> None:
    assert wrong_python(page.read_text()) == []


def test_wrong_imports_in_python_blocks_are_found() -> None:
    block = "```python\nfrom megatron_r3.store import RolloutStore, Cellar\n```"
    assert wrong_python(block) == ["Cellar"]


@each_page
def test_modules_that_are_run_exist(page: Path) -> None:
    for command in commands(page.read_text()):
        if command.words[:2] == ["python", "-m"] and command.words[2] != "sglang.launch_server":
            assert importlib.util.find_spec(command.words[2]), command.words


STILL_WIDE = ("bumping.md", "engines.md", "fuzz.md", "image.md", "rl-run.md", "rollout-store.md")
DEMO = json.loads((ROOT / "docs" / "demo.json").read_text())
ROWS = {
    "k3 KL, sampler to trainer": "k3_kl",
    "tokens with a ratio outside 1/2..2": "extreme_2",
    r"mean \|log-prob difference\|": "mean_abs_dlogp",
    "routers that would choose others now": "router_mismatch",
    "tokens with any such layer": "token_mismatch",
    "routes dispatched as recorded": "routes_dispatched_as_recorded",
}


def test_the_table_of_the_readme_is_that_of_the_recorded_demo() -> None:
    text = (ROOT / "README.md").read_text()
    for words, name in ROWS.items():
        live, replay = DEMO["live"][name], DEMO["replay"][name]
        assert f"| {words} | {live:.5f} | {replay:.5f} |" in text
    sampler = f"{DEMO['sampler']['name']} {DEMO['sampler']['version']}"
    assert f"{sampler}, Megatron {DEMO['megatron'].partition('+')[0]}" in " ".join(text.split())
    assert f"{DEMO['rollouts']} rollouts" in " ".join(text.split())


@each_page
def test_lines_fit_a_screen(page: Path) -> None:
    if page.name in STILL_WIDE or page.parent.name == "benchmarks":
        return
    prose = [
        line
        for line in FENCE.sub("", page.read_text()).splitlines()
        if not line.startswith("|") and "](http" not in line
    ]
    assert [line for line in prose if len(line) > 120] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
