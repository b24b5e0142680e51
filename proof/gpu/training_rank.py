"""One training of `make gpu`, in a process of its own: runs the script, and writes what it saw.

    python -m proof.gpu.training_rank ORDER.json RESULT.pt

The process is the only rank. The script and its arguments are those of a user. Functions that
Megatron's loop calls to begin and to end a step are wrapped, to observe the step. Megatron
is imported only inside of functions; without a GPU, `megatron_r3.cpu.install` runs before.

Shape suffixes (docs/glossary.md): K, T.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatron_r3.cpu.ranks import describe_rank, free_port
from proof.gpu.training_load import load_local_checkpoints


@dataclass(frozen=True)
class Order:
    """What the process is asked to do.

    Attributes:
        script: a training script of the tree.
        arguments: Megatron's command line.
        ways: for each step one of `WAYS`. Empty: all steps route as the arguments say.
        cpu: whether the process runs under `megatron_r3.cpu`.
        gradients: whether the gradients of every step are kept.
        bound: False, as a control: recomputed functions are not bound to their micro-batch.
        stand_in: whether torch computes what apex's fused_weight_gradient_mlp_cuda would.
        reference_gate: whether the plain reference runs where a GPU runs the gate's kernel.
    """

    script: str
    arguments: list[str] = field(default_factory=list)
    ways: list[str] = field(default_factory=list)
    cpu: bool = False
    gradients: bool = False
    bound: bool = True
    stand_in: bool = False
    reference_gate: bool = False


@dataclass
class Step:
    """What one training step showed.

    Attributes:
        losses: what Megatron logs, by name.
        finite: whether every gradient is finite.
        seconds: from the call of `train_step` to the end of its work on the device.
        dispatched: how many (token, expert) pairs reached the recorded expert, and how many pairs
            there were, in all passes; None if the step was not measured.
        gradients: float32 on the host, by name of the parameter; empty if they are not kept.
    """

    losses: dict[str, float] = field(default_factory=dict)
    finite: bool = False
    seconds: float = 0.0
    dispatched: tuple[int, int] | None = None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Seen:
    """What one training showed.

    Attributes:
        experts, attention: the classes of the first MoE layer's experts and of its attention.
        fused_wgrad: how many modules add their weight's gradient to the sum themselves.
        counts: by name: the recomputes that Megatron (`checkpoint`) and Transformer Engine
            (`te_checkpoint`) bound; calls of the fused `gate`, and of `stand_in`, which replaces
            apex's kernel; captured CUDA `graphs`.
    """

    steps: list[Step] = field(default_factory=list)
    experts: str = ""
    attention: str = ""
    fused_wgrad: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, name: str, more: int = 1) -> None:
        """Add to a count."""
        self.counts[name] = self.counts.get(name, 0) + more


def train(order: Order, seen: Seen) -> None:
    """Run the training of the order in this process, and write what it shows into `seen`."""
    from megatron_r3.replay.gate import replayed_gate_reference, substitute_gate
    from megatron_r3.train.step import Parts
    from proof.fidelity.observe import made_of

    load_local_checkpoints()
    _watch_steps(order, seen)
    _watch_calls(seen)
    if order.ways:
        _steer(order.ways, seen)
    sys.argv = [order.script, *order.arguments]
    with ExitStack() as stack:
        if order.reference_gate:
            stack.enter_context(substitute_gate(replayed_gate_reference))
        stack.enter_context(made_of(Parts(metrics=_kept_metrics(seen))))
        runpy.run_path(order.script, run_name="__main__")


def _watch_steps(order: Order, seen: Seen) -> None:
    """Wrap what Megatron's loop calls for a step, and what ends its backward passes."""
    from megatron.core.deferred import set_deferred_binder
    from megatron.training import training

    from megatron_r3.train.launch import watch_models

    train_step, finalize = training.train_step, training.finalize_model_grads
    built: list[torch.nn.Module] = []

    def step(*args: Any, **kwargs: Any) -> Any:
        if not order.bound:  # building the model has set the binder
            set_deferred_binder(None)
        seen.steps.append(Step())
        torch.cuda.synchronize()
        begin = time.perf_counter()
        losses, *rest = train_step(*args, **kwargs)
        torch.cuda.synchronize()
        seen.steps[-1].seconds = time.perf_counter() - begin
        seen.steps[-1].losses = {name: float(value) for name, value in losses.items()}
        return losses, *rest

    def finalized(*args: Any, **kwargs: Any) -> None:
        finalize(*args, **kwargs)
        gradients = {n: p.main_grad for m in built for n, p in m.named_parameters()}
        seen.steps[-1].finite = all(bool(g.isfinite().all()) for g in gradients.values())
        if order.gradients:
            kept = {name: g.detach().float().cpu().clone() for name, g in gradients.items()}
            seen.steps[-1].gradients = kept

    def on_models(models: list[torch.nn.Module]) -> None:
        built.extend(models)
        _describe(models, seen)

    training.train_step, training.finalize_model_grads = step, finalized
    watch_models(on_models)


def _describe(models: list[torch.nn.Module], seen: Seen) -> None:
    from megatron_r3.replay.layers import local_moe_layers

    seen.experts = type(next(iter(local_moe_layers(models[0]).values())).experts).__name__
    modules = [module for model in models for module in model.modules()]
    attention = (getattr(module, "core_attention", None) for module in modules)
    seen.attention = next((type(a).__name__ for a in attention if a is not None), "")
    # Transformer Engine's modules have the first attribute, Megatron's linear layers the second
    names = ("fuse_wgrad_accumulation", "gradient_accumulation_fusion")
    seen.fused_wgrad = sum(any(getattr(m, name, False) for name in names) for m in modules)


def _kept_metrics(seen: Seen) -> Any:
    from megatron_r3.train.metrics import StepMetrics

    class KeptMetrics(StepMetrics):
        def scalars(self) -> dict[str, float]:
            matched, total = self.dispatched
            if self.microbatches and total:
                seen.steps[-1].dispatched = (matched, total)
            return super().scalars()

    return KeptMetrics


def _watch_calls(seen: Seen) -> None:
    """Count the calls of what a case is about: a case must not pass because nothing happened."""
    from megatron.core.extensions import transformer_engine as te
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import cuda_graphs

    from megatron_r3.seams import router

    def counted(module: Any, function: str, name: str) -> None:
        original = getattr(module, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.count(name)
            return original(*args, **kwargs)

        setattr(module, function, call)

    counted(te, "bind_deferred", "te_checkpoint")  # in that module only te_checkpoint calls it
    counted(random, "bind_deferred", "checkpoint")
    counted(router, "replayed_gate", "gate")
    helper = cuda_graphs.TECudaGraphHelper
    create = helper.create_cudagraphs

    def created(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = create(self, *args, **kwargs)
        if self.graphs_created():
            seen.count("graphs", len(self.flattened_callables))
        return result

    helper.create_cudagraphs = created


# given: as the options say; live: no routes; no plan: replayed, without a dispatch plan;
# record: live, and the routes are kept; recorded: replays the kept routes; changed: replays the
# kept routes, with another expert for one token
WAYS = ("given", "live", "no plan", "record", "recorded", "changed")


def _steer(ways: list[str], seen: Seen) -> None:
    """Have each step route in its own way, in one process and with the same weights."""
    from megatron_r3.replay.microbatch import MicrobatchRoutes, Mode
    from megatron_r3.train.step import RolloutStep

    assert {*ways} <= {*WAYS}, ways
    original = RolloutStep._microbatch
    recorded: list[MicrobatchRoutes] = []
    used = {"step": -1, "microbatches": 0}

    def microbatch(self: Any, chunk: Any, prepared: Any) -> MicrobatchRoutes | None:
        number = len(seen.steps) - 1
        way = ways[number]
        index = 0 if used["step"] != number else used["microbatches"]
        used.update(step=number, microbatches=index + 1)
        if way == "live":
            return None
        if way in ("given", "no plan"):
            plan = prepared.plan if way == "given" else None
            return original(self, chunk, replace(prepared, plan=plan))
        if way == "record":
            # like `megatron_r3.replay.active.recording`, but `RolloutStep` opens the block
            recorded.append(MicrobatchRoutes({}, mode=Mode.RECORD, checked=True))
            return recorded[-1]
        if recorded[index].mode is Mode.RECORD:
            recorded[index].stop_recording()
        routes = recorded[index].fresh()
        if way == "changed" and index == 0:
            mask = self._layout.router_order(prepared.batch["loss_mask"])
            routes = _with_one_change(routes, mask)
        self._guard.add_routes(routes)
        return routes

    RolloutStep._microbatch = microbatch  # type: ignore[method-assign]


def _with_one_change(routes: Any, counted_T: torch.Tensor) -> Any:
    """The same routes, but in the first layer one response token has another last expert."""
    first = min(routes.ids)
    ids_TK = routes.ids[first].clone()
    token = int(counted_T.bool().int().argmax())
    taken = set(ids_TK[token].tolist())
    # Example: [0, 5, 1, 9] becomes [0, 5, 1, 2]; of K + 1 experts one is not taken.
    ids_TK[token, -1] = next(expert for expert in range(len(taken) + 1) if expert not in taken)
    tally = routes.tally and routes.tally.fresh()
    return replace(routes, ids={**routes.ids, first: ids_TK}, tally=tally)


def _stand_in_for_apex(seen: Seen) -> None:
    """Provide the one apex kernel that Megatron's own linear layers need for the fusion.

    With gradient accumulation fusion on, Megatron's output layer asks for the kernel also where all
    other layers are Transformer Engine's. The kernel is main_grad += grad_output^T @ input, in
    float32.
    """
    import types

    def wgrad(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: Any) -> None:
        seen.count("stand_in")
        main_grad.addmm_(grad_output.t().float(), total_input.float())

    module: Any = types.ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = wgrad
    sys.modules[module.__name__] = module


def main() -> None:
    """Do what the order says, and write the result; a failure ends with a traceback."""
    order = Order(**json.loads(Path(sys.argv[1]).read_text()))
    result = Path(sys.argv[2])
    for name, value in describe_rank(0, 1, free_port()).items():
        os.environ.setdefault(name, value)
    sys.path.insert(0, str(Path(order.script).resolve().parent))
    seen = Seen()
    if order.stand_in:  # Megatron looks for apex while it is imported
        _stand_in_for_apex(seen)
    if order.cpu:
        from megatron_r3.cpu import install

        install()
    else:
        from megatron_r3.cpu.megatron_gaps import patch_index_builder

        patch_index_builder()  # upstream's builder ends the process if a tree has no Makefile
    train(order, seen)
    torch.save(asdict(seen), result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # do not wait for the lookahead's threads or for process groups


if __name__ == "__main__":
    main()
