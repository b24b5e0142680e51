"""The rules of the house: who may import whom, one legend of shape letters, files of a fair size.

Each rule is a function from texts to complaints, so that each has its control below: a text that is
made up, breaks the rule, and must be found.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("megatron_r3", "keepers", "proof", "demo", "tests")
Trees = Mapping[str, ast.Module]  # of each file, by its path below ROOT


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def parsed(*rooms: str) -> Trees:
    files = [file for room in rooms for file in sorted((ROOT / room).rglob("*.py"))]
    return {file.relative_to(ROOT).as_posix(): tree_of(file) for file in files}


def made_up(**texts: str) -> Trees:
    """Files for a control: `a__b="..."` is the file a/b.py."""
    return {f"{name.replace('__', '/')}.py": ast.parse(text) for name, text in texts.items()}


# -- imports


# The wall, from above to below: a room imports only from the lines below its own. A room is a
# package or a module at the top of megatron_r3; rooms of one line do not import each other.
FLOORS = [
    line.split()
    for line in """
    cli
    loop
    record
    collect frameworks rl patching
    balance weights cpu
    seams
    train
    data
    replay
    """.strip().splitlines()
]
HEIGHT = {room: len(FLOORS) - number for number, line in enumerate(FLOORS) for room in line}
# R3 itself is the last four lines, and nothing there knows what stands above. What stands above
# hangs on it by these three files, whose patches and options ask for it by name.
THREADS = {
    ("megatron_r3/seams/guests.py", "balance"),
    ("megatron_r3/seams/rl.py", "rl"),
    ("megatron_r3/seams/pretrain.py", "loop"),
    ("megatron_r3/seams/pretrain.py", "weights"),
}
KNOW_MEGATRON = {*"seams train frameworks weights rl cpu loop".split()}
# the three files of replay that look at a model or at the ranks
LOOK_AT_MEGATRON = {
    f"megatron_r3/replay/{name}.py" for name in ("layers", "planner", "rank_layout")
}
PROOF = {"fidelity", "benchmarks", "comparison", "fuzz", "gpu"}
PROOF_ON_TOP = {"comparison", "fuzz", "gpu"}
# what the product, the proof and the benchmarks must run without
FORBIDDEN = {
    "megatron_r3": {"keepers", "proof", "demo", "tests", "docker"},
    "keepers": {"proof", "demo", "tests", "docker"},
    "proof.fidelity": {"demo", "tests", *(f"proof.{part}" for part in PROOF - {"fidelity"})},
    "proof.benchmarks": {"demo", "tests", *(f"proof.{part}" for part in PROOF_ON_TOP)},
    "proof.comparison": {"tests", "proof.fuzz", "proof.gpu"},
}


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def imports(tree: ast.Module) -> list[str]:
    """Every imported name, those inside functions too: `a.b.c` of `from a.b import c`."""
    return [*_imports(tree)]


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports here name the whole module"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            yield from (str(arg.value) for arg in node.args if isinstance(arg, ast.Constant))


def part_of(module: str) -> str:
    """Of `proof.fuzz.run.main`: proof.fuzz."""
    return ".".join(module.split(".")[:2])


def room_of(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


def wrong_imports(trees: Trees) -> list[str]:
    """The imports that run upward in FLOORS, know Megatron where they must not, or leave a room."""
    wrong = []
    for file, tree in trees.items():
        module = module_of(file)
        top, room = module.split(".")[0], room_of(module)
        if top == "megatron_r3" and room and room not in HEIGHT:
            wrong.append(f"{file}: give {room} its place in FLOORS")
        for name in imports(tree):
            target, there = name.split(".")[0], room_of(name)
            upward = (
                target == top == "megatron_r3"
                and there in HEIGHT
                and there != room
                and HEIGHT[there] >= HEIGHT.get(room, HEIGHT["data"])  # the front door: replay
                and (file, there) not in THREADS
            )
            may_know = room in KNOW_MEGATRON or file in LOOK_AT_MEGATRON
            knows = target == "megatron" and top == "megatron_r3" and not may_know
            forbidden = FORBIDDEN.get(top) or FORBIDDEN.get(part_of(module), set())
            if upward or knows or {target, part_of(name)} & forbidden:
                wrong.append(f"{file} imports {name}")
    return wrong


def in_circles(trees: Trees) -> list[str]:
    """The modules of a circle of imports; empty if there is none."""
    modules = {module_of(file) for file in trees}
    graph: dict[str, set[str]] = {}
    for file, tree in trees.items():
        # `from a.b import c` needs a.b.c if that is a module, and else a.b
        needed = {name if name in modules else name.rpartition(".")[0] for name in imports(tree)}
        graph[module_of(file)] = needed & modules - {module_of(file)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return sorted({*error.args[1]})
    return []


def test_imports_point_one_way() -> None:
    trees = parsed(*ROOMS)
    assert not wrong_imports(trees), "\n".join(wrong_imports(trees))
    assert in_circles(trees) == []
    rooms = {room_of(module_of(file)) for file in parsed("megatron_r3")} - {""}
    assert rooms == HEIGHT.keys()  # FLOORS names no room that is gone
    for file, room in THREADS:
        assert any(room_of(name) == room for name in imports(trees[file])), file


def shared_names(trees: Trees) -> set[str]:
    """The names that stand in several rooms; each package has its __init__.py."""
    names = Counter(file.rpartition("/")[2] for file in trees)
    return {name for name, times in names.items() if times > 1} - {"__init__.py"}


def test_a_name_alone_says_which_file_is_meant() -> None:
    assert shared_names(parsed("megatron_r3")) == set()
    names = ("a/__init__.py", "b/__init__.py", "a/plan.py", "b/plan.py", "b/cli.py")
    assert shared_names(dict.fromkeys(names, ast.parse(""))) == {"plan.py"}


def test_what_an_image_runs_imports_no_package_called_tests() -> None:
    """Megatron-LM has a package `tests`, which hides ours in an image of a checkout."""
    trees = parsed("tests/functional", "tests/support", "tests/gpu", "proof/fidelity", "demo")
    assert [f for f, tree in trees.items() for i in imports(tree) if i.startswith("tests.")] == []
    assert any(i.startswith("tests.") for t in parsed("tests/unit").values() for i in imports(t))


def test_wrong_imports_are_found() -> None:
    def wrong(**texts: str) -> list[str]:
        return wrong_imports(made_up(**texts))

    upward = "def f():\n    from megatron_r3.data.store import writer"
    assert wrong(megatron_r3__replay__a=upward) == [
        "megatron_r3/replay/a.py imports megatron_r3.data.store.writer"
    ]
    assert wrong(megatron_r3__data__a="from megatron_r3.replay.routes import Routes") == []
    through = "from megatron_r3.balance import places"
    assert wrong(megatron_r3__seams__guests=through) == []
    for room in ("seams", "train"):
        name = f"megatron_r3/{room}/a.py imports megatron_r3.balance.places"
        assert wrong(**{f"megatron_r3__{room}__a": through}) == [name]
    assert wrong(megatron_r3="from megatron_r3.replay import active") == []
    assert wrong(megatron_r3="from megatron_r3.data import rollout") != []
    assert wrong(megatron_r3__patching__a="from keepers import bump") != []
    assert wrong(keepers__a="from proof.benchmarks import machine") != []
    assert wrong(keepers__a="from megatron_r3.patching import series") == []
    beside = wrong(megatron_r3__rl__a="import megatron_r3.collect.collect")
    assert beside == ["megatron_r3/rl/a.py imports megatron_r3.collect.collect"]
    knows = wrong(megatron_r3__data__a="import_lib.import_module('megatron.core')")
    assert knows == ["megatron_r3/data/a.py imports megatron.core"]
    assert wrong(megatron_r3__seams__a="import megatron.core") == []
    assert wrong(megatron_r3__replay__layers="import megatron.core") == []
    assert wrong(megatron_r3__replay__a="import megatron.core") != []
    borrows = wrong(proof__fidelity__a="from demo.model import arguments")
    assert borrows == ["proof/fidelity/a.py imports demo.model.arguments"]
    assert wrong(proof__fidelity__a="from proof.fuzz import tries") != []
    assert wrong(proof__fuzz__a="from proof.fidelity import run") == []
    assert "FLOORS" in wrong(megatron_r3__cellar="x = 1")[0]


def test_circles_are_found() -> None:
    circle = made_up(
        demo__a="from demo import b",
        demo__b="def f():\n    import demo.c",
        demo__c="from demo.a import name",
        demo__d="import demo.a",
    )
    assert in_circles(circle) == ["demo.a", "demo.b", "demo.c"]
    del circle["demo/c.py"]
    assert in_circles(circle) == []


# -- shape letters


SUFFIX = re.compile(r"_*[a-z][a-z0-9_]*_([A-Z][A-Z0-9]*)")  # of ids_LTK: LTK
LEGEND = re.compile(r"^Shape suffixes \(docs/glossary\.md\): ([A-Z](?:, [A-Z])*)\.$", re.MULTILINE)
NO_SHAPES = {"do_GET", "do_POST"}  # http.server names them


def letters_of_the_glossary() -> set[str]:
    """The first column of the table below the heading "Shape letters"."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    section = text.split("Shape letters\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| ([A-Z]) \|", section, re.MULTILINE))


def letters_used(tree: ast.Module) -> set[str]:
    """The letters in the suffixes of all names; `_U2` has the letter U and a fixed size."""
    names = {
        value
        for node in ast.walk(tree)
        for _, value in ast.iter_fields(node)
        if isinstance(value, str) and value not in NO_SHAPES and not isinstance(node, ast.Constant)
    }
    suffixes = [match[1] for match in map(SUFFIX.fullmatch, names) if match]
    return {letter for suffix in suffixes for letter in suffix if letter.isalpha()}


def wrong_letters(trees: Trees, known: set[str]) -> list[str]:
    """Files whose docstring does not list exactly the letters in use, or with unknown ones."""
    wrong = []
    for file, tree in trees.items():
        used = letters_used(tree)
        legend = LEGEND.search(ast.get_docstring(tree) or "")
        listed = set(legend[1].split(", ")) if legend else set()
        if used != listed:
            line = f"Shape suffixes (docs/glossary.md): {', '.join(sorted(used))}."
            wrong.append(
                f"{file} lists {sorted(listed)}, not as it must: {line if used else 'none'}"
            )
        if used - known:
            wrong.append(f"{file}: {sorted(used - known)} are not in docs/glossary.md")
    return wrong


def test_every_file_lists_its_shape_letters_and_the_glossary_has_them() -> None:
    wrong = wrong_letters(parsed(*ROOMS), letters_of_the_glossary())
    assert not wrong, "\n".join(wrong)


def test_wrong_shape_letters_are_found() -> None:
    legend = '"""A file.\n\nShape suffixes (docs/glossary.md): T, K.\n"""\n'

    def wrong(text: str) -> list[str]:
        return wrong_letters(made_up(a=text), {"T", "K", "U"})

    assert wrong(f"{legend}ids_TK = 1") == []
    assert wrong("ids, LTK, do_GET, IMPORT_S = '_LTK', 1, 2, 3") == []
    (unlisted,) = wrong("def f(spans_U2): ...")
    assert unlisted.endswith("lists [], not as it must: Shape suffixes (docs/glossary.md): U.")
    assert wrong(f"{legend}x = 1") == ["a.py lists ['K', 'T'], not as it must: none"]
    assert len(wrong(f"{legend}x.ids_T = 1")) == 1
    assert len(wrong(f"{legend}f(f'{{ids_TKU}}')")) == 1
    assert wrong(f"{legend}ids_TKX = 1")[1] == "a.py: ['X'] are not in docs/glossary.md"


# -- sizes of files


LEAST, MOST = 40, 430
# A package's __init__.py is its front door, and may be short. Other short files say why.
SHORT: dict[str, str] = {
    "megatron_r3/seams/deferred.py": "one file for each patch",
    "megatron_r3/data/lazy.py": "a decorator that four files of the store use",
}


def wrong_sizes(lengths: Mapping[str, int], short: Mapping[str, str]) -> list[str]:
    """Files that are too long, or too short without a reason, or no longer as short as listed."""
    wrong = [f"{file}: {lines} lines" for file, lines in lengths.items() if lines > MOST]
    for file, lines in lengths.items():
        is_short = lines < LEAST and not file.endswith("__init__.py")
        if is_short != (file in short):
            wrong.append(f"{file}: {lines} lines, and SHORT is {short.get(file, 'silent')}")
    return wrong + [f"{file} is not there" for file in short if file not in lengths]


def test_files_of_the_product_have_a_fair_size() -> None:
    files = sorted((ROOT / "megatron_r3").rglob("*.py"))
    lengths = {str(file.relative_to(ROOT)): file.read_text().count("\n") for file in files}
    wrong = wrong_sizes(lengths, SHORT)
    assert not wrong, "\n".join(wrong)


def test_wrong_sizes_are_found() -> None:
    lengths = {"a/__init__.py": 1, "a/fair.py": 100, "a/short.py": 39, "a/long.py": 431}
    assert wrong_sizes(lengths, {}) == [
        "a/long.py: 431 lines",
        "a/short.py: 39 lines, and SHORT is silent",
    ]
    assert len(wrong_sizes(lengths, {"a/short.py": "why", "a/fair.py": "why", "gone.py": ""})) == 3
