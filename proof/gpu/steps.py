"""The steps of `make gpu`, in their order.

A step is one process. A benchmark or training records each of its cases as it ends, with
`proof.benchmarks.machine.write_results`. A step's exit status is 0 (passed), 1 (failed) or 77
(skipped as a whole; its last line is `skipped: REASON`). For a single case that is skipped, the
step prints the line `skipped: CASE: REASON`. The steps without Transformer Engine come first. With
these time limits all steps fit into three calls of ten minutes each (tests/unit/gpu/test_run.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """One process of `make gpu`.

    Attributes:
        name: the step's name in the results and in printed lines.
        command: what `python -m` runs; {tree}, {store}, {checkpoint} and {script} are filled in
            from `Places`. {record} becomes the options that say where to record, on which device.
        limit_s: seconds after which the step is killed.
        needs_te: whether the step is skipped if there is no Transformer Engine.
        rehearsal: the command of a rehearsal; empty for `command`. A rehearsal skips a step that
            needs Transformer Engine, unless the step has a `rehearsal`, with `--spec local`.
        suffix: added to the names of the step's records, because another step runs the same program
            and cases.
    """

    name: str
    command: str
    limit_s: int
    needs_te: bool = False
    rehearsal: str = ""
    suffix: str = ""


@dataclass(frozen=True)
class Places:
    """The files that a step reads."""

    tree: Path
    store: Path
    checkpoint: Path
    script: Path

    @classmethod
    def of(cls, tree: Path, demo: Path) -> Places:
        """The files of a patched tree and of the folder that the demo made.

        The script is the tree's own pretrain_gpt.py. For a tree from PyPI, which has no such
        script, it is megatron_r3/train/pretrain_gpt.py.

        Raises:
            ValueError: a file or folder is not there; the message says what to type.
        """
        tree, demo = tree.resolve(), demo.resolve()
        config = tree / "megatron" / "core" / "transformer" / "transformer_config.py"
        if not config.is_file() or "moe_router_replay" not in config.read_text():
            raise ValueError(f"{tree} is no patched Megatron-LM: make apply MEGATRON={tree}")
        places = cls(tree, demo / "rollouts", demo / "checkpoint", tree / "pretrain_gpt.py")
        for folder in (places.store, places.checkpoint):
            if not folder.is_dir():
                raise ValueError(f"there is no {folder}: run make demo first")
        if places.script.exists():
            return places
        ours = Path(__file__).parents[2] / "megatron_r3" / "train" / "pretrain_gpt.py"
        return cls(places.tree, places.store, places.checkpoint, ours)

    def words(self, command: str, record: list[str]) -> list[str]:
        """A step's command as a list of words, with the paths filled in; a path may have spaces."""
        words: list[str] = []
        for word in command.split():
            words += record if word == "{record}" else [word.format(**vars(self))]
        return words


KERNEL = "proof.benchmarks.kernel --megatron {tree} {record}"
LAYERS = "proof.benchmarks.layers --megatron {tree} {record}"
SLICE = f"{LAYERS} --spec te --layers 2 --seconds 25 --model"
TRAIN = "proof.gpu.training --tree {tree} --store {store} --checkpoint {checkpoint} "
TRAIN += "--script {script} {record} --spec"


def _te_training(name: str, limit_s: int) -> Step:
    """The step of a case under Transformer Engine; a rehearsal trains Megatron's own layers."""
    of_te, local = (f"{TRAIN} {spec} --cases {name}" for spec in ("te", "local"))
    return Step(f"te-{name}", of_te, limit_s, True, local)


def _te_layers(name: str, arguments: str, rehearsal: str = "") -> Step:
    return Step(name, f"{SLICE} {arguments}", 90, True, rehearsal)


STEPS = (
    Step("tests-gpu", "pytest tests/gpu -q -rs -p no:cacheprovider --patched-tree {tree}", 150),
    Step("gate", KERNEL, 120),
    Step("layers", f"{LAYERS} --seconds 45", 130),
    Step("training", f"{TRAIN} local --cases exactness,recorded", 100, suffix="local"),
    Step("te-training", f"{TRAIN} te --cases exactness,recorded", 140, True),
    Step("te-gate", KERNEL, 85, True, suffix="te"),
    _te_training("fused-gate", 65),
    _te_training("recompute", 90),
    _te_training("grad-fusion", 90),
    _te_layers("qwen3-8k", "Qwen3-30B-A3B --sequence 8192"),
    _te_layers("qwen3-32k", "Qwen3-30B-A3B --sequence 32768"),
    _te_layers(
        "deepseek-8k", "DeepSeek-V3 --sequence 8192", f"{LAYERS} --spec local --model DeepSeek-V3"
    ),
    _te_layers("deepseek-32k", "DeepSeek-V3 --sequence 32768"),
    _te_training("cuda-graphs", 90),
    _te_training("fp8", 90),
)
