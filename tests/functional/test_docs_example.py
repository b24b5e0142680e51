"""The block and the program of docs/integrate.md run as they stand there.

Shape suffixes (docs/glossary.md): E, H, K, L, T.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from test_front_door import LENGTHS, drawn_routes, whole_batch
from training import torchrun

from megatron_r3 import ModelRoutes
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.tiny import BATCH, LAYERS, SEQUENCE, config, model, start

ROOT = Path(__file__).parents[2]


def example() -> Any:
    """The function that the page defines."""
    blocks = (ROOT / "docs" / "integrate.md").read_text().split("```python\n")[1:]
    (source,) = (b.split("```")[0] for b in blocks if "def replayed_forward" in b)
    names: dict[str, Any] = {}
    exec(source, names)
    return names["replayed_forward"]


def run_example(rank: int, shift: int) -> dict[str, int]:
    """How many rows of this rank's routing maps are those of the tokens that are there."""
    from megatron.core import parallel_state

    start(tensor_model_parallel_size=2, context_parallel_size=2)
    made = config(tensor_model_parallel_size=2, context_parallel_size=2, sequence_parallel=True)
    gpt = model(made)
    # token i of the batch has id i, so that a hidden state tells which token it is
    tokens = torch.arange(BATCH * SEQUENCE).reshape(BATCH, SEQUENCE)
    routes, batch = drawn_routes(), {**whole_batch(), "tokens": tokens, "labels": tokens}
    seen: dict[str, Any] = {"maps": {}}
    gpt.decoder.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(hidden=[*args, *kwargs.values()][0].detach()),
        with_kwargs=True,
    )
    for number, layer in enumerate(gpt.decoder.layers):
        layer.mlp.router.register_forward_hook(
            lambda _, args, out, number=number: seen["maps"].update({number: out[1].detach()})
        )
    routes_LTK = drawn_routes(shift)
    example()(gpt, made, ModelRoutes(gpt), dict(batch), routes_LTK, list(range(LAYERS)))

    # which token each hidden state is: its embedding, compared with those of the whole vocabulary
    group = parallel_state.get_tensor_model_parallel_group()
    parts: list[Any] = [None, None]
    own = gpt.embedding.word_embeddings.weight.detach()
    torch.distributed.all_gather_object(parts, own, group=group)
    hidden_TH = seen["hidden"].reshape(-1, seen["hidden"].shape[-1])
    tokens_T = torch.cdist(hidden_TH, torch.cat(parts)).argmin(1)

    rows = batch["rows"].reshape(-1)
    counts = {"right": 0, "of": 0, "padding": 0}
    for number, map_TE in seen["maps"].items():
        for token, chosen_E in zip(tokens_T.tolist(), map_TE, strict=True):
            row = int(rows[token])
            if row < 0:
                counts["padding"] += 1
                continue
            recorded = sorted(routes[number, row].tolist())
            counts["right"] += chosen_E.nonzero()[:, 0].tolist() == recorded
            counts["of"] += 1
    return counts


def total(results: list[dict[str, int]], name: str) -> int:
    return sum(result[name] for result in results)


def test_every_token_of_every_rank_takes_its_recorded_experts(patched: TreeWorker) -> None:
    results = patched.run(run_example, 4, 0)
    assert total(results, "of") == total(results, "right") == LAYERS * sum(LENGTHS)
    assert total(results, "padding") == LAYERS * (BATCH * SEQUENCE - sum(LENGTHS))
    assert len({(result["of"], result["padding"]) for result in results}) > 1  # a real split


def test_routes_that_are_shifted_by_a_token_show(patched: TreeWorker) -> None:
    results = patched.run(run_example, 4, 1)
    assert total(results, "right") < total(results, "of") / 2


def steps_of(printed: str) -> list[tuple[float, int]]:
    """What `demo/own_loop.py` prints of its steps: loss, and the pairs that differ live."""
    steps = re.findall(r"^step \d: loss ([\d.]+), (\d+) of 256 pairs", printed, re.MULTILINE)
    return [(float(loss), int(differ)) for loss, differ in steps]


def shift_by_one(rank: int) -> None:
    sys.argv = ["own_loop.py", "--shift", "1"]
    runpy.run_path(str(ROOT / "demo" / "own_loop.py"), run_name="__main__")


def test_the_whole_program_trains(patched: TreeWorker, tmp_path: Path) -> None:
    done = torchrun(patched.tree, "demo/own_loop.py", 2)
    assert done.returncode == 0, done.stderr
    steps = steps_of(done.stdout)
    assert [loss for loss, _ in steps] == sorted((loss for loss, _ in steps), reverse=True)
    assert len(steps) == 3
    assert 0 < steps[0][1] < 32  # the engine's last bits: few pairs differ
    # control: with `--shift 1` nearly all pairs differ; in forked ranks, which import nothing anew
    patched.run(shift_by_one, 2, log_dir=tmp_path)
    shifted = steps_of("".join(log.read_text() for log in sorted(tmp_path.glob("rank*.log"))))
    assert shifted[0][0] != steps[0][0]
    assert shifted[0][1] > 192
