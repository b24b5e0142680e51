"""The cases of the fidelity table: each layout and schedule, with the model that it trains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from proof.fidelity.trees import has_loop


@dataclass(frozen=True)
class Case:
    """One row of the fidelity table.

    Attributes:
        name: what the row is called.
        ranks: how many processes.
        arguments: Megatron's options of the layout.
        model: a name of `proof.fidelity.models.MODELS`.
        micro_batch_size: rollouts of a micro-batch.
        quick: whether `make matrix`, `make check` and --quick run the case. One case of each kind
            is quick.
        bitwise: the name of the case whose gradients this case must give to the last bit. The
            case's own name means that a second run must give the same bits.
        recomputes: whether experts run again in the backward pass.
        forward_only_first: whether a forward-only pass comes before each step.
        since: the first release line on which upstream itself has the feature and gets it right.
            Empty: every line has it.
        not_on: later release lines on which upstream itself fails or refuses.
        guests: options of guest experts. Empty: none. With them the case runs three times: with
            guests, with empty guest slots, and without slots. The gradients of the second run must
            be bitwise those of the third. The gradients of the first run may differ from those of
            the third only by the order of sums.
        script: a training script of the tree, run instead of our own training. PyPI's trees have
            no scripts.
    """

    name: str
    ranks: int
    arguments: str = ""
    model: str = "base"
    micro_batch_size: int = 2
    quick: bool = False
    bitwise: str = ""
    recomputes: bool = False
    forward_only_first: bool = False
    since: str = ""
    not_on: tuple[str, ...] = ()
    guests: str = ""
    script: str = ""

    def runs_on(self, tree: Path, line: str) -> bool:
        """Whether a tree of this release line has what the case needs."""
        new_enough = not self.since or _release(self.since) <= _release(line)
        has_all = has_loop(tree) and (tree / self.script).exists()
        return new_enough and has_all and line not in self.not_on


def _release(line: str) -> tuple[int, ...]:
    """The sort key of a release line: core_r0.9.0 is (0, 9, 0), before (0, 19, 0); main is last."""
    if line == "main":
        return (10**6,)
    return tuple(int(number) for number in line.removeprefix("core_r").split("."))


V19 = "core_r0.19.0"
ONE = "1 process, 6 micro-batches of 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
PP4 = "--pipeline-model-parallel-size 4"
VPP2 = "--num-virtual-stages-per-pipeline-rank 2"
# Without Transformer Engine the tree that slime pins refuses p2p, the default of --cp-comm-type.
# The option changes nothing here: attention under CP is that of megatron_r3/cpu/attention.py.
CP2, CP4 = (f"--cp-comm-type all_gather --context-parallel-size {size}" for size in (2, 4))
EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
ETP1, ETP2 = "--expert-tensor-parallel-size 1", "--expert-tensor-parallel-size 2"
ALLGATHER = "--moe-token-dispatcher-type allgather"
# every release takes these options; newer releases have other names for them too
FLEX = "--moe-token-dispatcher-type flex --moe-enable-deepep --moe-router-dtype fp32"
OVERLAP = "--overlap-moe-expert-parallel-comm"
PACK = "--rollouts-pack --seq-length 64 --max-position-embeddings 64"
# 176 tokens hold six rollouts and no more, also with the padding of CP2: so each of two mini-steps
# has one pack
HALF = "--rollouts-pack --seq-length 176 --max-position-embeddings 176"
DIST_OPT = "--use-distributed-optimizer"
OVERLAPS = "--overlap-grad-reduce --overlap-param-gather"
FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
SELECTIVE = "--recompute-granularity selective --recompute-modules"


def _one_process() -> list[Case]:
    """Cases of batches, models and packs in one process."""
    return [
        Case(ONE, 1, bitwise=ONE, quick=True),
        Case("12 micro-batches of 1", 1, micro_batch_size=1),
        Case("4 micro-batches of 3", 1, micro_batch_size=3),
        Case("1 micro-batch of 12", 1, micro_batch_size=12),
        Case("missing rows", 1, model="holes"),
        Case("dense first layer", 1, model="moonlight"),
        Case("interleaved moe_layer_freq", 1, model="interleaved"),
        Case("sigmoid, groups, bias, fp32 router", 1, model="deepseek", quick=True),
        Case("HybridModel", 1, model="hybrid", quick=True, since=V19),
        Case("MTP", 1, model="mtp", micro_batch_size=1, quick=True),
        Case("bf16", 1, model="bf16"),
        Case("bf16, fp32 router", 1, model="bf16 fp32 router"),
        Case("deterministic mode", 1, "--deterministic-mode", bitwise="deterministic mode"),
        Case("evaluation between steps", 1, "--eval-interval 1 --eval-iters 1", bitwise=ONE),
        Case("old log-probs first", 1, bitwise=ONE, forward_only_first=True, quick=True),
        Case("THD", 1, PACK, model="even", micro_batch_size=1),
        Case("THD, odd lengths", 1, PACK, micro_batch_size=1),
    ]


def _upstreams_script() -> list[Case]:
    script = "pretrain_gpt.py"
    return [
        Case(script, 1, script=script, bitwise=ONE, quick=True),
        Case(f"{script}, EP2", 2, EP2, script=script, quick=True),
        Case(f"{script}, PP2xVPP2", 2, f"{PP2} {VPP2}", script=script),
    ]


def _recompute() -> list[Case]:
    cases = [
        Case("full recompute, uniform", 1, f"{FULL} uniform", bitwise=ONE, quick=True),
        Case("full recompute, block", 1, f"{FULL} block --recompute-num-layers 2", bitwise=ONE),
        Case("recompute moe", 1, f"{SELECTIVE} moe", bitwise=ONE),
        Case("recompute layernorm", 1, f"{SELECTIVE} layernorm"),
        Case("missing rows, full recompute", 1, f"{FULL} uniform", model="holes", quick=True),
        Case(
            "MTP, full recompute",
            1,
            f"{FULL} uniform",
            model="mtp",
            micro_batch_size=1,
            not_on=("core_r0.18.0",),  # upstream's MTP layer raises a TypeError on that line
        ),
        Case("HybridModel, full recompute", 1, f"{FULL} uniform", model="hybrid", since=V19),
        Case("EP2, recompute moe", 2, f"{EP2} {SELECTIVE} moe"),
        Case("TP2+SP, full recompute", 2, f"{TP2} {FULL} uniform"),
        Case("PP2, full recompute", 2, f"{PP2} {FULL} uniform", bitwise=ONE),
    ]
    return [replace(c, recomputes="layernorm" not in c.name) for c in cases]


def _pipeline() -> list[Case]:
    virtual = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
    uneven = "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 3"
    layout = "--pipeline-model-parallel-layout"
    embedding = "--account-for-embedding-in-pipeline-split"
    loss = "--account-for-loss-in-pipeline-split"
    return [
        Case("PP2", 2, PP2, bitwise=ONE, quick=True),
        Case("PP4", 4, PP4, bitwise=ONE),
        Case("PP2, 2 + 3 of 5 layers, dense first", 2, f"{PP2} {uneven}", model="moonlight"),
        Case("PP2, embedding accounted for", 2, f"{PP2} {embedding}", model="moonlight"),
        Case("PP2, loss accounted for", 2, f"{PP2} {loss}", model="moonlight"),
        Case("PP4, both accounted for", 4, f"{PP4} {embedding} {loss}", model="six"),
        Case("PP2, layout string", 2, f"{PP2} {layout} Et|tttL", bitwise=ONE),
        Case("PP2xVPP2, layout string", 2, f"{PP2} {layout} Et|t|tt|L", bitwise=ONE),
        Case("PP2xVPP2, layers of a stage", 2, virtual, bitwise=ONE),
        Case("PP2xVPP2, number of stages", 2, f"{PP2} {VPP2}", bitwise=ONE, quick=True),
        Case("PP2xVPP3", 2, f"{PP2} --num-virtual-stages-per-pipeline-rank 3", model="six"),
        Case("PP2, missing rows", 2, PP2, model="holes"),
        Case("PP2, interleaved moe_layer_freq", 2, PP2, model="interleaved"),
        Case("PP2, MTP", 2, PP2, model="mtp", micro_batch_size=1),
        Case("PP2, evaluation between steps", 2, f"{PP2} --eval-interval 1 --eval-iters 1"),
        Case("PP2, old log-probs first", 2, PP2, forward_only_first=True),
    ]


def _sequence() -> list[Case]:
    return [
        Case("TP2+SP, no EP", 2, TP2, quick=True),
        Case("TP2+SP, no EP, experts whole", 2, f"{TP2} {ETP1}", since=V19),
        Case("TP2+SP, EP2", 2, f"{TP2} {EP2} {ETP1}"),
        Case("TP4+SP", 4, "--tensor-model-parallel-size 4 --sequence-parallel"),
        Case("CP2", 2, CP2, quick=True),
        Case("CP4", 4, CP4),
        Case("CP2xTP2", 4, f"{CP2} {TP2}"),
        Case("CP2, MTP without its loss", 2, CP2, model="mtp no loss", micro_batch_size=1),
        Case("CP2, missing rows", 2, CP2, model="holes"),
        Case("THD, CP2", 2, f"{PACK} {CP2}", model="even", micro_batch_size=1),
        Case("THD, CP2, odd lengths", 2, f"{PACK} {CP2}", micro_batch_size=1, quick=True),
        Case("THD, TP2+SP, odd lengths", 2, f"{PACK} {TP2}", micro_batch_size=1),
        Case("THD, CP2xTP2, odd lengths", 4, f"{PACK} {CP2} {TP2}", micro_batch_size=1),
        Case("THD, PP2, odd lengths", 2, f"{PACK} {PP2}", micro_batch_size=1),
    ]


def _experts() -> list[Case]:
    fold = f"{TP2} {CP2} {EP4} {ETP1}"
    return [
        Case("EP2", 2, EP2, quick=True),
        Case("EP4", 4, EP4, micro_batch_size=3),
        Case("EP2, all-gather", 2, f"{EP2} {ALLGATHER}", quick=True),
        Case("EP4, all-gather", 4, f"{EP4} {ALLGATHER}", micro_batch_size=3),
        Case("EP2, flex (DeepEP stand-in)", 2, f"{EP2} {FLEX}", quick=True),
        Case("EP2, missing rows", 2, EP2, model="holes"),
        # each step has a data iterator of its own, and only that of the first step brings plans
        Case("EP2, old log-probs first", 2, EP2, forward_only_first=True),
        Case("ETP2", 2, f"{TP2} {ETP2}"),
        Case("EP2xETP2", 4, f"{TP2} {EP2} {ETP2}"),
        Case("EP2xETP2, all-gather", 4, f"{TP2} {EP2} {ETP2} {ALLGATHER}"),
        Case("EP2xTP2, experts whole", 4, f"{TP2} {EP2} {ETP1}"),
        Case("EP2xCP2", 2, f"{CP2} {EP2}"),
        Case("folding: TP2xCP2 over EP4", 4, fold, quick=True),
        Case("folding: PP2 of TP2 over EP2", 4, f"{PP2} {TP2} {EP2} {ETP1}"),
        Case("EP2xPP2xVPP2", 4, f"{EP2} {PP2} {VPP2}", micro_batch_size=3, quick=True),
        Case("EP2, HybridModel", 2, EP2, model="hybrid", since=V19),
        Case("EP2, shared experts overlapped", 2, EP2, model="shared", quick=True),
        Case("EP2, sigmoid, groups, bias", 2, EP2, model="deepseek"),
        Case("DP2, distributed optimizer", 2, DIST_OPT),
        Case("EP2, distributed optimizer", 2, f"{EP2} {DIST_OPT} --overlap-grad-reduce"),
        Case("EP2, bf16", 2, EP2, model="bf16"),
    ]


def _overlapped() -> list[Case]:
    """Cases of combined 1F1B: the forward of one microbatch overlaps another's backward."""
    return [
        Case("EP2, 1F1B overlap, bf16", 2, f"{EP2} {OVERLAP}", model="bf16", quick=True),
        Case("EP2, 1F1B overlap, flex", 2, f"{EP2} {OVERLAP} {FLEX}", model="bf16 fp32 router"),
        Case(
            "EP2, 1F1B overlap, MTP",
            2,
            f"{EP2} {OVERLAP}",
            model="bf16 mtp",
            micro_batch_size=1,
            # without pipeline stages these lines refuse the overlap for a model with MTP
            not_on=("core_r0.16.0", "core_r0.17.0"),
        ),
        Case(
            "EP2xPP2xVPP2, 1F1B overlap",
            4,
            f"{EP2} {PP2} {VPP2} {OVERLAP}",
            model="bf16",
            micro_batch_size=3,
        ),
    ]


def _balanced() -> list[Case]:
    """Cases of auxiliary losses, z-loss and expert bias, none of which may count padding."""
    layouts = {
        "1 process": (1, ""),
        "full recompute": (1, f"{FULL} uniform"),
        "TP2+SP": (2, TP2),
        "CP2": (2, CP2),
        "EP2": (2, EP2),
        "PP2xVPP2": (2, f"{PP2} {VPP2}"),
        "CP2xTP2 over EP4": (4, f"{TP2} {CP2} {EP4} {ETP1}"),
    }
    return [
        Case(
            f"balanced, {name}",
            ranks,
            layout,
            model="balanced",
            micro_batch_size=1,
            quick=name in ("CP2", "EP2"),
            # before 0.19 upstream scales an auxiliary loss by the tokens of one rank, not by those
            # of the whole sequence
            since=V19 if "TP2" in name or "CP2" in name else "",
        )
        for name, (ranks, layout) in layouts.items()
    ]


def _updates() -> list[Case]:
    """Cases of two optimizer steps on a collection, of R2, and of a temperature other than 1."""
    virtual = f"{PP2} {VPP2}"
    steps = [
        Case("2 mini-steps", 1),
        Case("2 mini-steps, full recompute", 1, f"{FULL} uniform", recomputes=True),
        Case("2 mini-steps, TP2+SP", 2, TP2),
        Case("2 mini-steps, CP2", 2, CP2),
        Case("2 mini-steps, PP2xVPP2", 2, virtual, micro_batch_size=3),
        Case("2 mini-steps, EP2", 2, EP2, micro_batch_size=1, quick=True),
        Case("2 mini-steps, THD, CP2", 2, f"{HALF} {CP2}", micro_batch_size=1),
    ]
    old_routes = [
        Case("R2, full recompute", 1, f"{FULL} uniform", recomputes=True),
        Case("R2, TP2+SP", 2, TP2),
        Case("R2, PP2xVPP2", 2, virtual, micro_batch_size=1, quick=True),
        Case("R2, EP2", 2, EP2, micro_batch_size=1),
        Case("R2, THD", 1, HALF, micro_batch_size=1),
        Case("R2, THD, CP2", 2, f"{HALF} {CP2}", micro_batch_size=1),
    ]
    warm = [
        Case("temperature 0.7", 1),
        Case("temperature 0.7, TP2+SP", 2, TP2, quick=True),
        Case("temperature 0.7, CP2", 2, CP2),
        Case("temperature 0.7, PP2", 2, PP2),
    ]
    return [
        *(replace(case, model="mini-steps") for case in steps),
        *(replace(case, model="R2") for case in old_routes),
        *(replace(case, model="temperature") for case in warm),
    ]


def _lora() -> list[Case]:
    """Cases in which only LoRA adapters are trained."""
    one, recomputed = "LoRA, 1 process", f"{FULL} uniform"
    cases = [
        Case(one, 1),
        Case("LoRA, EP2", 2, EP2),
        Case("LoRA, EP2, full recompute", 2, f"{EP2} {recomputed}", quick=True),
        Case("LoRA, TP2+SP", 2, TP2),
        Case("LoRA, TP2+SP, full recompute", 2, f"{TP2} {recomputed}"),
        Case("LoRA, PP2", 2, PP2, bitwise=one),
        Case("LoRA, PP2, full recompute", 2, f"{PP2} {recomputed}", bitwise=one),
        Case("LoRA on attention, EP2, full recompute", 2, f"{EP2} {recomputed}"),
        Case("LoRA on attention, TP2+SP", 2, TP2),
    ]
    return [replace(c, model=c.name.split(",")[0], recomputes="recompute" in c.name) for c in cases]


def _guests() -> list[Case]:
    """Cases of guest experts, on models whose rollouts make two experts hot."""
    slots = "--moe-router-replay-guest-slots 2"
    domains = f"{slots} --moe-router-replay-guest-domain 2"
    cases = [
        Case("EP2", 2, EP2),
        Case("EP4", 4, EP4, micro_batch_size=3),
        Case("EP4, domains of 2", 4, EP4, micro_batch_size=3, guests=domains),
        Case("full recompute", 2, f"{EP2} {FULL} uniform", recomputes=True),
        Case("recompute moe", 2, f"{EP2} {SELECTIVE} moe", recomputes=True),
        Case("recompute layernorm", 2, f"{EP2} {SELECTIVE} layernorm"),
        Case("old log-probs first", 2, EP2, forward_only_first=True),
        Case("missing rows", 2, EP2, model="holes"),
        Case("EP2xTP2, experts whole", 4, f"{TP2} {EP2} {ETP1}"),
        Case("EP2xCP2", 2, f"{CP2} {EP2}"),
        Case("folding: TP2xCP2 over EP4", 4, f"{TP2} {CP2} {EP4} {ETP1}"),
        Case("folding: PP2 of TP2 over EP2", 4, f"{PP2} {TP2} {EP2} {ETP1}"),
        Case("EP2xPP2", 4, f"{EP2} {PP2}", micro_batch_size=3),
        Case("EP2xPP2xVPP2", 4, f"{EP2} {PP2} {VPP2}", micro_batch_size=3, quick=True),
        Case("THD, EP2xCP2, odd lengths", 2, f"{PACK} {CP2} {EP2}", micro_batch_size=1),
        Case("HybridModel", 2, EP2, model="hybrid", since=V19),
        Case("MTP", 2, EP2, model="mtp", micro_batch_size=1),
        Case("shared experts overlapped", 2, EP2, model="shared"),
        Case("sigmoid, groups, bias", 2, EP2, model="deepseek"),
        Case("balanced", 2, EP2, model="balanced", micro_batch_size=1),
        Case(
            "EP2xDP2, distributed optimizer",
            4,
            f"{EP2} {DIST_OPT} {OVERLAPS}",
            micro_batch_size=3,
        ),
        Case("bf16", 2, EP2, model="bf16"),
        Case("2 mini-steps", 2, EP2, model="mini-steps", micro_batch_size=1),
        Case("R2", 2, EP2, model="R2", micro_batch_size=1),
        Case("pretrain_gpt.py", 2, EP2, script="pretrain_gpt.py"),
    ]
    return [
        replace(
            case,
            name=f"guests, {case.name}",
            model=f"{case.model}, skewed",
            guests=case.guests or slots,
        )
        for case in cases
    ]


CASES: tuple[Case, ...] = (
    *_one_process(),
    *_upstreams_script(),
    *_recompute(),
    *_pipeline(),
    *_sequence(),
    *_experts(),
    *_overlapped(),
    *_balanced(),
    *_updates(),
    *_lora(),
    *_guests(),
)
