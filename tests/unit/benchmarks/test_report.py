"""The documents are what `python -m proof.benchmarks.report` makes of the recorded results.

No run on a GPU is recorded yet, so its text is tested on results files that are made up here, in
the shape in which the benchmarks write them.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proof.benchmarks import report
from proof.benchmarks.interval import median_of
from proof.benchmarks.report import NOTHING, documents, status
from proof.benchmarks.report_gpu import read_run, section
from proof.benchmarks.waits import COPIES, WAITS

ROOT = Path(__file__).parents[3]
RESULTS = "proof/benchmarks/results"
GPU = "nvidia-h200-2026-12-01.json"
MACHINE = {"device": "cuda", "gpu": "NVIDIA H200", "torch": "2.11.0+cu130", "rehearsal": False}


def wrong_documents(root: Path) -> list[str]:
    """The documents that are not what the recorded results make of them."""
    return [path.name for path, text in documents(root).items() if path.read_text() != text]


def copied(tmp_path: Path, **records: Any) -> Path:
    """A checkout's documents and results, and a results file of a GPU if there are records."""
    for name in ("README.md", "docs/gpu.md", "proof/benchmarks/README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / RESULTS, tmp_path / RESULTS)
    for path in (tmp_path / RESULTS).glob("nvidia-*"):
        path.unlink()
    if records:
        (tmp_path / RESULTS / GPU).write_text(json.dumps(records))
    return tmp_path


def texts(root: Path) -> tuple[str, str]:
    """The README and docs/gpu.md as they should be."""
    pages = documents(root)
    return pages[root / "README.md"], pages[root / "docs" / "gpu.md"]


def test_the_documents_are_made_of_the_recorded_results() -> None:
    assert wrong_documents(ROOT) == []


def test_a_document_that_was_changed_by_hand_is_found(tmp_path: Path) -> None:
    """The control: a claim, a number of a table, a section that says more."""
    root = copied(tmp_path)
    assert report.main(["--root", str(root)]) == 0
    assert wrong_documents(root) == []
    changes = {
        "README.md": ("| **run on** | CPU", "| **run on** | CUDA, CPU"),
        "docs/gpu.md": (NOTHING, "All was run on a GPU."),
        "proof/benchmarks/README.md": ("| 4 | full | plan |", "| 4 | full | plan, faster |"),
    }
    for name, (old, new) in changes.items():
        before = (root / name).read_text()
        assert before.count(old) == 1
        (root / name).write_text(before.replace(old, new))
        assert wrong_documents(root) == [Path(name).name]
        (root / name).write_text(before)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = copied(tmp_path, **everything())
    argv = [sys.executable, "-m", "proof.benchmarks.report", "--root", str(root)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "README.md" in done.stdout
    assert wrong_documents(root) == []
    assert report.main(["--root", str(root)]) == 0
    assert capsys.readouterr().out == ""  # nothing is left to write


# -- runs on a GPU, made up


def ratio(value: float) -> dict[str, Any]:
    return median_of([value] * 16).record()


def everything() -> dict[str, Any]:
    gate: list[dict[str, Any]] = [
        {"model": "Qwen3", "tokens": 1024, "pass": "forward", "dtype": "bfloat16", "agrees": True}
        | {"way": way, "us": us, "of_unfused": ratio(us / 100.0), "of_te": ratio(us / 25.0)}
        | {"of_copies": ratio(us / 10.0)}
        for way, us in (("kernel", 12.5), ("(a) unfused", 100.0), ("(c) TE, live", 25.0))
    ]
    gate += [{"model": "Kimi", "way": "(b) compiled", "skipped": "no compiler"}] * 2
    steps = [
        {"recompute": False, "way": way, "beside": "live", "step_ms": ms, "agrees": True}
        | {WAITS: waits, COPIES: waits, "peak_mb": 1000.0, "ratio": ratio(ms / 20.0)}
        for way, ms, waits in (("live", 20.0, 8), ("plan", 18.0, 0))
    ]
    sizes = {"layers": 4, "sequence": 512, "batch": 2, "topk": 8}
    # either shape: a record with the cases in its rows, or a record for each case
    training = [
        {"case": "local", "spec": "local", "dispatched": 1.0, "bitwise": True},
        {"case": "te grouped", "spec": "te", "dispatched": 1.0, "bitwise": True},
        {"case": "te fp8", "spec": "te", "skipped": "no fp8 here"},
    ]
    exactness = [
        {"row": "replay", "ok": True, "dispatched": 1.0, "ratios": {"step": ratio(0.9)}},
        {"row": "live, the control", "ok": True, "dispatched": 0.7},
    ]
    return {
        "kernel": {**MACHINE, "rows": gate},
        "layers": {**MACHINE, "sizes": sizes, "route_bytes": 4 * 512 * 2 * 8, "rows": steps},
        "training": {**MACHINE, "transformer_engine": "2.16.1", "rows": training},
        "training exactness": {**MACHINE, "spec": "te", "rows": exactness},
        "cellar": {**MACHINE, "rows": [{"wine": 1}]},
        "steps": {
            **MACHINE,
            "tests-gpu": {"status": "passed", "seconds": 61.2, "reason": None},
            "slices": {"status": "skipped", "seconds": 1.0, "reason": "no memory"},
        },
    }


def test_a_whole_run_is_told(tmp_path: Path) -> None:
    readme, gpu = texts(copied(tmp_path, **everything()))
    assert "### NVIDIA H200, 2026-12-01" in gpu
    assert NOTHING not in gpu
    for row in (
        "by the live one's | at most 0.97 | 0.900 (0.900 to 0.900) (layers, no recompute) |",
        "| 0 | 0, live 8 (layers, no recompute) |",
        "| at most 0.67 | 0.50 to 0.50 in 1 of 1 cases |",
        "| at most 1.43 | 1.25 to 1.25 in 1 of 1 cases |",
        "| 8.00 for top-8 (layers) |",
        "| trainings under Transformer Engine that are exact | all | 3 of 3 |",
        "| tests-gpu | passed | 61 |  |",
        "| slices | skipped | 1 | no memory |",
        "| te grouped | te | yes | 1.00000 | yes |  |",
        "| te fp8 | te |  |  |  | skipped: no fp8 here |",
        "| exactness: replay | te | yes | 1.00000 |  | step 0.900 (0.900 to 0.900) |",
        "| exactness: live, the control | te | yes | 0.70000 |  |  |",
        "| Qwen3 | 1024 | forward | 12.5 | 0.12 (0.12 to 0.12) | 0.50 (0.50 to 0.50) | 1.250 (",
        "\n\n- skipped: (b) compiled: no compiler\n\n",
        "The file also holds: `cellar`.",
        "Transformer Engine 2.16.1",
    ):
        assert row in gpu, row
    assert (
        "; one [NVIDIA H200](docs/gpu.md), 2026-12-01: gate kernel, MoE layers, training with "
        in (readme)
    )
    assert "| **not run on** | **NCCL, several nodes, HybridEP** (" in readme
    assert "| **stand-ins** | DeepEP; hybrid models without Mamba layers |" in readme


def test_without_a_run_nothing_is_told(tmp_path: Path) -> None:
    """The control of the whole run: the same documents, no file."""
    readme, gpu = texts(copied(tmp_path))
    assert gpu.count(NOTHING) == 1
    assert "NVIDIA" not in readme + gpu
    missing = "**CUDA, NCCL, several nodes, Transformer Engine, HybridEP**"
    assert f"| **not run on** | {missing} (" in readme


@pytest.mark.parametrize("part", ["kernel", "layers", "training", "steps"])
def test_a_run_that_was_cut_short_tells_what_it_has(tmp_path: Path, part: str) -> None:
    records = everything()
    readme, gpu = texts(copied(tmp_path, **{part: records[part]}))
    assert "### NVIDIA H200" in gpu
    assert (
        gpu.count("| not measured |") == {"kernel": 4, "layers": 3, "training": 5, "steps": 6}[part]
    )
    assert ("Transformer Engine" in readme.partition("**not run on**")[2][:80]) == (
        part != "training"
    )
    assert ("**CUDA, " in readme) == (part == "steps")


def without_one(found: Any) -> Iterator[Any]:
    """The same with one part, row or field left out, each in turn, at every depth."""
    for key in found if isinstance(found, dict) else range(len(found)):
        rest = copy.deepcopy(found)
        del rest[key]
        yield rest
        if isinstance(found[key], (dict, list)):
            for inner in without_one(found[key]):
                whole = copy.deepcopy(found)
                whole[key] = inner
                yield whole


def test_whatever_is_missing_the_rest_is_told(tmp_path: Path) -> None:
    path, tried = tmp_path / GPU, 0
    records = everything()
    for found in without_one(records):
        path.write_text(json.dumps(found))
        run = read_run(path)
        assert run is not None
        assert section(run).startswith("### NVIDIA H200, 2026-12-01\n")
        assert "one [NVIDIA H200](docs/gpu.md)" in status([run])["run on"]
        tried += 1
    assert tried > 150


def test_what_went_wrong_is_told(tmp_path: Path) -> None:
    records = everything()
    records["kernel"]["rows"][0]["agrees"] = False
    records["layers"]["rows"][1]["agrees"] = False
    records["training"]["rows"][1]["bitwise"] = False
    records["training exactness"]["rows"][0] = {"row": "replay", "ok": False, "error": "a\nb"}
    records["steps"]["slices"] = {"status": "timed out", "seconds": 600.0, "reason": "600 s"}
    readme, gpu = texts(copied(tmp_path, **records))
    assert "wrong or not finished: slices, gate, layers, te grouped, exactness: replay |" in readme
    assert "training with Transformer Engine" not in readme
    assert "gate kernel" not in readme.partition("**not run on**")[0]
    assert "several nodes, Transformer Engine, HybridEP**" in readme
    for told in (
        "12.5, **wrong**",
        "plan, **wrong gradients**",
        "| te | **no** | 1.00000 | no |",
        "| all | 1 of 3 |",
    ):
        assert told in gpu
    # a time of what is wrong is no number to be proud of
    assert gpu.count("| not measured |") == 3


def test_a_ratio_that_does_not_tell_is_not_told(tmp_path: Path) -> None:
    records = everything()
    records["layers"]["rows"][1]["ratio"] = median_of([0.9, 1.04] * 8).record()
    _, gpu = texts(copied(tmp_path, **records))
    assert "| at most 0.97 | cannot tell (0.900 to 1.040) (" in gpu
    records["layers"]["rows"][1]["ratio"] = 0.9
    records["kernel"]["rows"][0]["of_te"] = median_of([0.9, 1.04] * 8).record()
    (tmp_path / RESULTS / GPU).write_text(json.dumps(records))
    _, gpu = texts(tmp_path)
    assert "| at most 0.97 | no interval recorded (" in gpu
    assert "| at most 0.67 | cannot tell in 1 cases |" in gpu


def test_the_newest_run_on_a_gpu_counts_in_the_readme(tmp_path: Path) -> None:
    root = copied(tmp_path, **everything())
    older = {"kernel": everything()["kernel"]}
    older["kernel"]["rows"][0]["agrees"] = False
    (root / RESULTS / "nvidia-h200-2026-11-30.json").write_text(json.dumps(older))
    readme, gpu = texts(root)
    assert gpu.index("### NVIDIA H200, 2026-12-01") < gpu.index("### NVIDIA H200, 2026-11-30")
    assert "2026-11-30" not in readme


def refused(tmp_path: Path, name: str, found: Any) -> str:
    path = tmp_path / name
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    with pytest.raises(ValueError) as caught:
        read_run(path)
    assert name in str(caught.value)
    return str(caught.value)


def test_what_is_no_run_on_a_gpu_is_refused(tmp_path: Path) -> None:
    rehearsed = {**everything(), "training": {**MACHINE, "rehearsal": True, "rows": []}}
    assert "record training: a rehearsal" in refused(tmp_path, GPU, rehearsed)
    assert "a rehearsal" in refused(tmp_path, GPU, {**MACHINE, "rehearsal": True, "rows": []})
    assert "a rehearsal" in refused(tmp_path, "kernel-cpu-2026-12-01.json", {"rehearsal": True})
    on_cpu = {"kernel": {**MACHINE, "device": "cpu"}}
    assert "['kernel'] was run on a CPU" in refused(tmp_path, GPU, on_cpu)
    assert "no GPU" in refused(tmp_path, GPU, {"kernel": {"rows": []}})
    assert "no GPU" in refused(tmp_path, "cpu-2026-12-01.json", {"kernel": {"rows": []}})
    assert "GPU-DATE.json" in refused(tmp_path, "nvidia-h200.json", everything())
    two = {**everything(), "kernel": {**MACHINE, "gpu": "NVIDIA B200", "rows": []}}
    assert "B200" in refused(tmp_path, GPU, two)
    assert "not JSON" in refused(tmp_path, GPU, "{")
    assert "not a results file" in refused(tmp_path, GPU, [])


def test_the_command_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = copied(tmp_path, kernel={**MACHINE, "rehearsal": True, "rows": []})
    before = (root / "README.md").read_text()
    assert report.main(["--root", str(root)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert (root / "README.md").read_text() == before
    (root / RESULTS / GPU).unlink()
    (root / "docs" / "gpu.md").write_text("# no marker\n")
    assert report.main(["--root", str(root)]) == 1
    assert "gpu.md: expected once the line" in capsys.readouterr().err
