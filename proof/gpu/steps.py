"""The steps of a session, in their order, and which of them a rehearsal must skip.

A step is one process, `python -m MODULE ...`, that records what it measured with
`proof.benchmarks.machine.write_results`, after each of its cases. Its exit status is 0 (passed), 1
(failed) or 77 (skipped as a whole; its last line is `skipped: REASON`). A case that is skipped
inside of a step that runs has a line `skipped: CASE: REASON`.

The steps without Transformer Engine come first. The limits
are such that all steps fit into three calls of ten minutes each (tests/unit/gpu/test_steps.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """One process of a session.

    Attributes:
        name: in the results, and on the summary's line.
        module: what `python -m` runs.
        arguments: beside --out, --device and --rehearse; {tree}, {store}, {checkpoint} and {script}
            are filled in (`Places`).
        limit_s: seconds after which the step is ended.
        needs_te: whether it is skipped where there is no Transformer Engine.
        rehearsal: the arguments of a rehearsal, where a step that needs Transformer Engine can run
            without it (`--spec local`); empty if it cannot.
        suffix: of its records' names, where another step runs the same program on the same cases.
    """

    name: str
    module: str
    arguments: str
    limit_s: int
    needs_te: bool = False
    rehearsal: str = ""
    suffix: str = ""


@dataclass(frozen=True)
class Places:
    """Where a step finds what it needs."""

    tree: Path
    store: Path
    checkpoint: Path
    script: Path

    @classmethod
    def of(cls, tree: Path, demo: Path) -> Places:
        """The places in a patched tree and in what the demo made.

        The tree's own pretrain_gpt.py is trained; the sources on PyPI have none, and then ours is.
        """
        tree, demo = tree.resolve(), demo.resolve()
        script = tree / "pretrain_gpt.py"
        if not script.exists():
            script = Path(__file__).parents[2] / "megatron_r3" / "train" / "pretrain_gpt.py"
        return cls(tree, demo / "rollouts", demo / "checkpoint", script)

    def missing(self) -> str:
        """What is not there, and what to type; empty if all is."""
        config = self.tree / "megatron" / "core" / "transformer" / "transformer_config.py"
        if not config.is_file() or "moe_router_replay" not in config.read_text():
            return f"{self.tree} is no patched Megatron-LM: make apply MEGATRON={self.tree}"
        for folder in (self.store, self.checkpoint):
            if not folder.is_dir():
                return f"there is no {folder}: make demo"
        return ""

    def words(self, arguments: str) -> list[str]:
        """A step's arguments with the places filled in; a path may have spaces in it."""
        return [word.format(**vars(self)) for word in arguments.split()]


LAYERS, KERNEL, TRAINING = (
    "proof.benchmarks.layers",
    "proof.benchmarks.kernel",
    "proof.gpu.training",
)
TRAIN = "--tree {tree} --store {store} --checkpoint {checkpoint} --script {script}"
TE, LOCAL = f"{TRAIN} --spec te", f"{TRAIN} --spec local"
SLICE = "--megatron {tree} --spec te --layers 2 --seconds 25 --model"


def _te_training(name: str, case: str, limit_s: int) -> Step:
    """A step of trainings under Transformer Engine; a rehearsal trains Megatron's own layers."""
    return Step(
        *(name, TRAINING, f"{TE} --cases {case}", limit_s, True),
        rehearsal=f"{LOCAL} --cases {case}",
    )


STEPS = (
    Step("tests-gpu", "proof.gpu.tests_gpu", "--tree {tree}", 150),
    Step("gate", KERNEL, "--megatron {tree}", 120),
    Step("layers", LAYERS, "--megatron {tree} --seconds 45", 130),
    Step("training", TRAINING, f"{LOCAL} --cases exactness,recorded", 100, suffix="local"),
    Step("te-training", TRAINING, f"{TE} --cases exactness,recorded", 140, True),
    Step("te-gate", KERNEL, "--megatron {tree}", 85, True, suffix="te"),
    _te_training("te-fused-gate", "fused-gate", 65),
    _te_training("te-recompute", "recompute", 90),
    _te_training("te-grad-fusion", "grad-fusion", 90),
    Step("qwen3-8k", LAYERS, f"{SLICE} Qwen3-30B-A3B --sequence 8192", 90, True),
    Step("qwen3-32k", LAYERS, f"{SLICE} Qwen3-30B-A3B --sequence 32768", 90, True),
    Step(
        *("deepseek-8k", LAYERS, f"{SLICE} DeepSeek-V3 --sequence 8192", 90, True),
        rehearsal="--megatron {tree} --spec local --model DeepSeek-V3",
    ),
    Step("deepseek-32k", LAYERS, f"{SLICE} DeepSeek-V3 --sequence 32768", 90, True),
    _te_training("te-cuda-graphs", "cuda-graphs", 90),
    _te_training("te-fp8", "fp8", 90),
)

# What a rehearsal skips, and nothing else: a step, or STEP/CASE. Without CUDA there is no test of
# the kernel on a device, and without Transformer Engine no step that needs it.
TESTS_ON_CUDA = ("test_gate_cuda.py", "test_gate_kernel.py", "test_gate_kernel_rows.py")
ON_A_GPU = ("live, fused", "peak memory")  # live routing in one kernel is Transformer Engine's
EXPECTED_SKIPS = {
    *(f"tests-gpu/{name}" for name in TESTS_ON_CUDA),
    *(f"gate/(c) TE, {way}" for way in ("live", "live, groups")),
    *(f"{step}/{case}" for step in ("layers", "deepseek-8k") for case in ON_A_GPU),
    *(f"te-recompute/recompute, {row}" for row in ("moe_act", "te_checkpoint full")),
    "te-recompute/recompute, te_checkpoint moe",
    *(f"te-fp8/fp8, {recipe}" for recipe in ("tensorwise", "delayed")),
    "te-cuda-graphs/cuda-graphs, attention",
    "deepseek-8k/fused, counted",  # on a GPU too: the fused gate knows no groups of experts
    *(step.name for step in STEPS if step.needs_te and not step.rehearsal),
}
