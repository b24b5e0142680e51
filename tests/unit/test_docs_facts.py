"""README, CONTRIBUTING and docs: each path, link, import, option and number is what there is.

Every check is a function from a text to complaints, so that each has its control: a text that is
made up and wrong, and must be found.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from docs_pages import FENCE, PAGES, ROOT, blocks, commands, help_of, spans

from keepers.rules import num_changed
from megatron_r3.data.truth.mismatch_tables import Share, Tables
from megatron_r3.patching.series import read_series
from megatron_r3.train.losses.agreement import agreement_sums
from megatron_r3.train.metrics import EXPERT_LOAD, WITHOUT_GUESTS
from megatron_r3.train.mismatch import scalars_of
from megatron_r3.train.option_kind import flag
from megatron_r3.train.option_table import OPTIONS
from proof.fidelity.cases import CASES

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


# -- options and logged names


def test_every_option_of_collect_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(["rollouts", "collect"], capsys)
    options = set(re.findall(r"--[a-z][a-z-]+", text)) - {"--help"}
    assert len(options) > 15
    assert options == options_of((ROOT / "docs" / "collect.md").read_text(), "### Every option")


def options_of(text: str, heading: str) -> set[str]:
    """The options in the first column of the table below a heading."""
    table = text.partition(f"{heading}\n\n")[2].partition("\n\n")[0]
    first = [re.split(r"(?<!\\)\|", row)[1] for row in table.splitlines()]
    return set(re.findall(r"--[a-z][a-z-]+", " ".join(first)))


def patched_options() -> set[str]:
    """The options that the patches of the default line bring, as the command line spells them."""
    text = "".join(p.read_text() for p in sorted((ROOT / "patches/core_r0.19.0").glob("*.patch")))
    options = {flag(option.name) for option in OPTIONS if not option.field}
    fields = re.findall(r"^\+    (moe_router_replay\w*): (.+) = (\S+)$", text, re.MULTILINE)
    for name, kind, default in fields:
        # Megatron makes --X of a bool that is off, and --no-X alone of any other, also of None
        only_off = "bool" in kind and default != "False"
        options.add(f"--{'no-' if only_off else ''}{name.replace('_', '-')}")
    return options


def unknown_options(text: str) -> set[str]:
    """Options of ours that a text names and that no command line takes."""
    named = re.findall(r"--(?:no-)?(?:moe-router-replay|rollouts)[a-z-]*", text)
    return set(named) - patched_options()


def test_every_option_of_training_is_documented() -> None:
    page = (ROOT / "docs" / "train.md").read_text()
    ours, fields = options_of(page, "## Every option"), options_of(page, "set them too:")
    assert min(len(ours), len(fields)) > 10
    assert ours | fields == patched_options()


def test_an_option_is_spelt_as_the_command_line_takes_it() -> None:
    names = ("--moe-router-replay-verify-plan", "--no-moe-router-replay-fused-gate")
    assert unknown_options(" ".join(names)) == set()
    wrong = {"--no-moe-router-replay-verify-plan", "--moe-router-replay-fused-gate"}
    assert unknown_options(" ".join(wrong)) == wrong


@each_page
def test_options_of_ours_exist(page: Path) -> None:
    assert unknown_options(page.read_text()) == set()


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
    source = "".join(p.read_text() for p in (ROOT / "megatron_r3" / "train").rglob("*.py"))
    constants = {
        node.value
        for node in ast.walk(ast.parse((ROOT / "megatron_r3/train/metrics.py").read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names |= {c for c in constants if re.fullmatch(r"[a-z]+ (mismatch|dispatched[a-z ]*)", c)}
    names |= {"policy loss", "reward"}
    assert '"policy loss"' in source
    # those of `scalars_of`, with the numbers of each name as letters
    share = Share(0.5, 1)
    one = {0: share}
    tables = Tables(one, one, one, one, prompts=share, responses=share)
    by = {"layer 0": "layer N", "position 0 to 7": "position A to B", "turn 1": "turn N",
          "lag 0": "lag N", "prompt": "prompt"}  # fmt: skip
    assert scalars_of(tables).keys() == {"router mismatch"} | {f"router mismatch/{n}" for n in by}
    names |= {f"router mismatch/{name}" for name in by.values()}
    names |= {"router mismatch", "router mismatch/alarms"}
    assert "router mismatch/alarms" in constants
    names |= {EXPERT_LOAD, f"{EXPERT_LOAD}/layer N", WITHOUT_GUESTS}
    assert documented == names


# -- paths, links, imports, numbers

PLACES = (ROOT, ROOT / "megatron_r3", ROOT / "proof" / "benchmarks")
# made by a command, or of Megatron-LM, or of a server, or in a reader's folder
ELSEWHERE = re.compile(
    r"build/|megatron/|/|~|https?:|pretrain_gpt\.py|train_rl\.py|run\.toml|\$|iter_|"
    r"(run|rollouts|trained|next|policy|policies|checkpoints?|events|logs)/|"
    r"(application|info|ci|debian-python|core)[/:.]|examples/|docker/\.ngc_version"
)


OURS = re.compile(r"(megatron_r3|tests|proof|keepers|demo|patches|docs)/")


def missing_paths(text: str, of_framework: bool = False) -> list[str]:
    """Inline code that looks like a path of this repository, and is none.

    Args:
        of_framework: whether the page names files of another project too. Then only paths that
            begin with a folder of this repository are looked up.
    """
    found = []
    for span in spans(text):
        is_path = re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", span)
        if not is_path or ELSEWHERE.match(span) or (of_framework and not OURS.match(span)):
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
        assert missing_paths(page.read_text(), page.parent.name == "frameworks") == []


def test_missing_paths_are_found() -> None:
    text = "`train/losses/terms.py`, `seams/cellar.py`, `patches/LINE/`, `docs/`, `cellar/`, `a/b`"
    assert missing_paths(text) == ["seams/cellar.py", "cellar/", "a/b"]
    text = "`swift/model.py`, `tests/clients/conftest.py`, `tests/clients/cellar.py`"
    assert missing_paths(text, of_framework=True) == ["tests/clients/cellar.py"]


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
    text = "[a](README.md#recipes) [b](README.md#six) [c](docs/none.md) [d](https://x.y)"
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
    block = "```python\nfrom megatron_r3.data.store import RolloutStore, Cellar\n```"
    assert wrong_python(block) == ["Cellar"]


DEMO = json.loads((ROOT / "docs" / "demo.json").read_text())
ROWS = {
    "k3 KL, sampler to trainer": "k3_kl",
    "`router mismatch`: (token, layer) pairs whose live experts differ": "router_mismatch",
    "routes dispatched as recorded": "routes_dispatched_as_recorded",
}


def test_the_numbers_of_the_readme_are_those_of_the_recorded_demo() -> None:
    text = (ROOT / "README.md").read_text()
    for words, name in ROWS.items():
        live, replay = DEMO["live"][name], DEMO["replay"][name]
        assert f"| {words} | {live:.5f} | {replay:.5f} |" in text
    sampler = f"{DEMO['sampler']['name']} {DEMO['sampler']['version']}"
    assert f"{sampler}, Megatron {DEMO['megatron'].partition('+')[0]}" in " ".join(text.split())
    assert f"{DEMO['rollouts']} rollouts" in " ".join(text.split())
    assert f"took {sum(DEMO['seconds'].values()):.0f} s" in text


UPDATE = json.loads((ROOT / "docs" / "update.json").read_text())


def test_the_commands_of_the_update_are_those_of_the_recorded_trainings() -> None:
    page = " ".join((ROOT / "docs" / "train.md").read_text().replace("\\\n", " ").split())
    for options in UPDATE["commands"].values():
        assert options in page


@each_page
def test_lines_fit_a_screen(page: Path) -> None:
    if page.parent.name == "benchmarks":
        return
    prose = [
        line
        for line in FENCE.sub("", page.read_text()).splitlines()
        if not line.startswith("|") and "](http" not in line
    ]
    assert [line for line in prose if len(line) > 120] == []


def test_the_counts_of_the_readme_are_those_of_the_cases_and_the_patches() -> None:
    text = (ROOT / "README.md").read_text()
    assert f"[{len(CASES)} cases](docs/fidelity.md)" in text
    patches = read_series(ROOT / "patches" / "core_r0.19.0").patches
    lines = sum(num_changed(patch) for patch in patches)
    assert f"# {len(patches)} patches with {lines} changed lines on 0.19;" in text


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
