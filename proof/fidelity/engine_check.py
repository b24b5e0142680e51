"""The matrix's check of an inference engine: does it return the experts of every token?

`tests/functional/test_sampling_routes.py` checks more of the engine, on the default tree.

Shape suffixes (docs/glossary.md): K, L, N, T.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proof.fidelity import sampling
from proof.fidelity.line_checks import Copies, Result
from proof.fidelity.models import MODELS
from proof.fidelity.rig.rank_process import RankError
from proof.fidelity.sampling import RECORD, Sampled

MODEL = [*MODELS["base"].argv(), "--micro-batch-size", "1"]
LAYOUTS = {
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "TP2, SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "EP2": (2, sampling.EP2),
}


def engine(checked: Copies) -> Result:
    """Check that the engine records every row in each layout, and changes nothing if off."""
    metadata = "megatron/core/inference/contexts/routing_metadata.py"
    if not (checked.patched / metadata).is_file():
        return None, "the engine records no routes"
    try:
        return _compared(checked)
    except RankError as error:
        return False, str(error)


def _compared(checked: Copies) -> Result:
    patched, unpatched = checked.worker(checked.patched), checked.worker(checked.unpatched)
    folder = str(checked.folder / "engine")
    save = ["--save", folder, "--save-interval", "1"]
    patched.run(sampling.save_model, 1, [*MODEL, *save], timeout_s=180)
    load = [*MODEL, "--load", folder]

    def sampled(more: str, ranks: int = 1, **options: Any) -> list[list[Sampled]]:
        argv = [*load, *more.split()]
        return patched.run(sampling.sample, ranks, argv, timeout_s=240, **options)

    ((off,), (plain,)) = sampled(""), sampled(RECORD)
    upstream = unpatched.run(sampling.sample, 1, load, timeout_s=240)
    if off != upstream[0]:
        return False, "recording off: other tokens or log-probs than on the unpatched tree"
    both = [*load, RECORD, "--moe-router-replay"]
    (chosen,) = patched.run(sampling.in_training, 1, both, plain, timeout_s=240)
    for number, (one, (ids_TLK, _)) in enumerate(zip(plain, chosen, strict=True)):
        if one.ids_TLK is None or sampling.same_experts(one.ids_TLK, ids_TLK) < 1:
            return False, f"request {number}: no experts, or not those of the training forward"
    recompute = {"kv_cache_management_mode": "recompute"}
    cases = {
        "a second model": sampled(RECORD, second=True),
        "suspended": sampled(RECORD, settings=recompute, suspend_at=12),
    }
    if not any(one.stopped_at for one in cases["suspended"][0]):
        return False, "suspended: no request was running when the engine was suspended"
    for name, (ranks, options) in LAYOUTS.items():
        cases[name] = sampled(f"{RECORD} {options}", ranks)
    for name, ranks_samples in cases.items():
        if any(differs(samples, plain) for samples in ranks_samples):
            return False, f"{name}: other tokens, or other or no experts, than in one process"
    same = f"the training forward, {', '.join(cases)}"
    return True, f"{len(plain)} requests, the same experts in {same}; recording off"


def differs(samples: Sequence[Sampled], plain: Sequence[Sampled]) -> bool:
    """Whether a request has other tokens in `samples` than in `plain`, other experts, or none."""
    return any(
        one.tokens_N != other.tokens_N
        or one.ids_TLK is None
        or other.ids_TLK is None
        or sampling.same_experts(one.ids_TLK, other.ids_TLK) < 1
        for one, other in zip(samples, plain, strict=True)
    )
