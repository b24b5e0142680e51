"""`make bench-clients`: the replay of frameworks, compared with that of megatron_r3.

    python -m proof.benchmarks.clients --out build/bench/clients.json [--rounds 8] [--skyrl CLONE]
                                 [--only "EP2 full"]

All ways train one model on one batch and its routes, with EP 1 and EP 2, without and with full
recompute. There are two training steps: that of verl 0.9.1's own engine, and one that is written by
hand. The ways of a step differ in what replays: the framework's code, the same code on top of
megatron_r3, or `replaying`. The table compares what is counted: waits, copies, collectives, bytes.
The ways patch Megatron differently, so each way has processes of its own, and their times cannot be
compared. Exit status 1: a router took other routes than those of its micro-batch, a layer with a
dispatch plan waits, or a control shows that such faults are not found.

Megatron and the frameworks are imported inside the functions.

Shape suffixes (docs/glossary.md): B, E, K, L, S, T.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_r3 import (
    MicrobatchRoutes,
    ModelRoutes,
    RouteArrays,
    local_routers,
    recording,
    replaying,
)
from megatron_r3.replay.host_routes import HostRoutes
from proof.benchmarks.bench import Bench, Row, median_ms, number, recomputed, text
from proof.benchmarks.layers_model import Model, Sizes, make_config, make_model, start
from proof.benchmarks.waits import (
    COPIES,
    GATHERED,
    GATHERS,
    PLANS,
    WAITS,
    count_passes,
    instrument,
)
from proof.fidelity.clients.sources import SKYRL_FILES, take_from_clone
from proof.fidelity.clients.verl_engine import (
    ask_for_replay,
    bare_engine,
    jagged,
    put_on_cpu,
    trainer_batch,
)
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.trees import patched_copy, unpatched_copy

ROOT = Path(__file__).parents[2]
VERL = "verl-0.9.1"
START_S = 300.0  # how many seconds ranks may take to start and to count
LAYERS, EXPERTS, TOPK = 4, 16, 4
VOCABULARY, LONGEST = 256, 48
SIZES = Sizes(LAYERS, 128, 4, EXPERTS, TOPK, 64, LONGEST, 1, VOCABULARY)
MODEL = Model(SIZES, SIZES, {}, {}, {"num_query_groups": 2, "kv_channels": 32})
SAMPLES, TOGETHER = 8, 4  # samples of a rank, and how many are packed into a micro-batch
MICROBATCHES = SAMPLES // TOGETHER


class Way(NamedTuple):
    """A way to replay: the worker (`_workers`) that runs it, and whether layers have plans."""

    worker: str
    plan: bool = False


LIVE = ("verl, live", "by hand, live")
WAYS = {
    "verl, live": Way("verl on r3"),
    "verl, own replay": Way("verl"),
    "verl, on megatron_r3": Way("verl on r3", plan=True),
    "verl, native": Way("verl on r3"),
    "verl, native, plan": Way("verl on r3", plan=True),
    "by hand, live": Way("megatron"),
    "by hand, RouterReplay": Way("megatron"),
    "by hand, drop-in": Way("megatron", plan=True),
    "SkyRL, RouterReplay": Way("megatron"),
    "SkyRL, drop-in": Way("megatron", plan=True),
    "by hand, native": Way("megatron"),
    "by hand, native, plan": Way("megatron", plan=True),
}


class Case(NamedTuple):
    """What all ways of a case share.

    Attributes:
        expert_parallel: how many ranks run; they share the experts.
        recompute: whether there is full recompute.
        skyrl: a folder with SkyRL's files; None leaves out the ways of SkyRL.
    """

    expert_parallel: int
    recompute: bool
    skyrl: Path | None = None

    def ways(self) -> list[str]:
        """The names of the ways that can run."""
        return [name for name in WAYS if self.skyrl or not name.startswith("SkyRL")]


CASES = {
    f"EP{ep} {'full' if full else 'none'}": Case(ep, full)
    for ep in (1, 2)
    for full in (False, True)
}


# -- the driver


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """The rows of every case."""
    clients = Path(os.environ.get("MEGATRON_R3_CLIENTS", ROOT / "build" / "clients")).resolve()
    if not (clients / VERL).is_dir():
        raise ValueError(f"no {VERL} in {clients}: run `make bench-clients`")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        skyrl = folder / "skyrl" if args.skyrl else None
        if skyrl:
            skyrl.mkdir()
            take_from_clone("SKYRL", args.skyrl, SKYRL_FILES, skyrl)
        tree, tree_name = unpatched_copy(None, folder / "unpatched")
        patched = patched_copy(tree, folder / "patched")
        workers = {
            name: stack.enter_context(TreeWorker(patched, *given))
            for name, given in _workers(clients).items()
        }
        for case in args.cases.values():
            case, size = case._replace(skyrl=skyrl), case.expert_parallel
            routes = workers["megatron"].run(record, size, case, timeout_s=START_S)
            for name in case.ways():
                given = (name, case, routes, args.rounds)
                limit_s = START_S + 10.0 * args.rounds
                found = workers[WAYS[name].worker].run(run_way, size, *given, timeout_s=limit_s)
                alike = {"ep": size, "recompute": case.recompute, "tree": tree_name}
                yield {**alike, **summarise(name, found)}


def _workers(clients: Path) -> dict[str, tuple[tuple[str, ...], dict[str, str]]]:
    """For each worker the modules that it imports before its ranks fork, and its environment."""
    path = os.pathsep.join(map(str, (clients / VERL, clients / "site", ROOT)))
    verl = {"PYTHONPATH": path, "VERL_USE_EXTERNAL_PLUGINS": "none"}
    engine = "verl.workers.engine.megatron.transformer_impl"
    adapter = "megatron_r3.frameworks.verl"
    return {
        "verl": ((engine,), {**verl, "VERL_USE_EXTERNAL_MODULES": ""}),
        "verl on r3": ((engine,), {**verl, "VERL_USE_EXTERNAL_MODULES": adapter}),
        "megatron": (("megatron.core.models.gpt",), {}),
    }


def summarise(name: str, ranks: list[dict[str, Any]]) -> Row:
    """The row of a way, from what `run_way` returned on each rank.

    Each number is the largest of the ranks; the wrong passes are those of all ranks together.
    """

    def most(key: str, by: str) -> float:
        return max(float(count.get(key, 0) / count[by]) for count in ranks)

    slowest = {
        clock: median_ms([max(step) for step in zip(*(r[clock] for r in ranks), strict=True)])
        for clock in ("wall_s", "cpu_s")
    }
    return {
        "way": name,
        **{key: most(key, "experts") for key in (WAITS, COPIES, GATHERS)},
        PLANS: max(count.get(PLANS, 0) for count in ranks),
        "moved_per_token": most("moved", "tokens"),
        "gathered_per_token": most(GATHERED, "tokens"),
        "wrong_passes": sum(count["wrong"] for count in ranks),
        "rounds": len(ranks[0]["wall_s"]),
        "step_wall_ms": slowest["wall_s"],
        "step_cpu_ms": slowest["cpu_s"],
    }


def wrong(row: Row) -> str:
    """The fault of a row, other routes or a layer with a plan that waits; "" if it has none.

    Live routers choose other routes than those of the batch. So a live way must show wrong passes:
    if it did not, the check of the other ways could not fail either.
    """
    way, in_layers = WAYS[row["way"]], sum(row[name] for name in (WAITS, COPIES, GATHERS))
    if row["way"] in LIVE and not row["wrong_passes"]:
        return "the live routers take the routes of the batch, so the check cannot fail"
    if row["way"] not in LIVE and row["wrong_passes"]:
        return f"{row['wrong_passes']} passes took other routes than their micro-batch has"
    if way.plan and in_layers:
        return f"{in_layers:g} waits, copies and collectives in a layer with a plan; expected 0"
    if not way.plan and not in_layers:
        return "no wait was counted in a layer without a plan, so the counting is broken"
    return ""


BENCH = Bench(
    "clients",
    __doc__,
    {
        "EP": text("ep"),
        "recompute": recomputed,
        "": text("way"),
        "host waits": number(WAITS),
        "copies": number(COPIES),
        "metadata": number(GATHERS),
        "moved": number("moved_per_token"),
        "gathered": number("gathered_per_token"),
        "wall, ms": number("step_wall_ms"),
        "CPU, ms": number("step_cpu_ms"),
    },
    measure,
    wrong,
    CASES,
    "steps of each way, in a case",
    8,
    {"skyrl": ("", "a clone of NovaSky-AI/SkyRL; empty leaves out the ways of SkyRL")},
    about="CPU tensors and gloo, verl {verl}",
    facts=lambda args: {"verl": VERL.partition("-")[2]},
)


# -- the ranks


def record(rank: int, case: Case) -> list[np.ndarray]:
    """The routes of this rank's batch, the same for all ways, made from those of live routers."""
    way, chosen = Rank(rank, "by hand, native", case), []
    for samples in way.batch.microbatches():
        with torch.no_grad(), recording() as routes:
            way.chunk(**packed(way.batch, samples))
        ids_TLK = torch.stack([routes.ids[n] for n in sorted(routes.ids)], 1).numpy()
        ends = np.cumsum([len(way.batch.tokens[index]) for index in samples])
        # the last token of a sample has no route
        chosen += [part_TLK[:-1] for part_TLK in np.split(ids_TLK, ends[:-1])]
    return way.batch.turned(chosen)


def run_way(
    rank: int, name: str, case: Case, routes: list[list[np.ndarray]], rounds: int
) -> dict[str, Any]:
    """Train on the recorded routes: warm up, time `rounds` steps, then count in one more.

    Returns:
        "wall_s", "cpu_s": the seconds of each timed step; and what `Rank.count` returns.
    """
    way = Rank(rank, name, case)
    way.batch.routes = routes[rank]
    wall_s, cpu_s = zip(*[way.step() for _ in range(rounds + 1)][1:], strict=True)
    return {"wall_s": wall_s, "cpu_s": cpu_s, **way.count()}


class Rank:
    """The model, the batch and the step of one way, on one rank.

    Args:
        rank: the number of this rank.
        name: the name of the way, a key of `WAYS`.
        case: what all ways share.
    """

    def __init__(self, rank: int, name: str, case: Case) -> None:
        torch.set_num_threads(1)
        start(False, "env://", rank, case.expert_parallel)
        self.case, self.batch = case, Batch(rank)
        self.chunk, self.way, self.moved = self._built(name)

    def step(self) -> tuple[float, float]:
        """Run one step; return its wall seconds, and CPU seconds of all threads of this rank."""
        self.chunk.zero_grad(set_to_none=True)
        torch.distributed.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        self.way.step()
        return time.perf_counter() - wall, time.process_time() - cpu

    def count(self) -> dict[str, Any]:
        """Run one step and count. Counting stays on, so no step may be timed afterwards.

        Returns:
            Numbers by name: those of `proof.benchmarks.waits`; "experts", the passes of MoE layers;
            "wrong", the passes of a router that took other routes than those of its micro-batch;
            "moved", the bytes of routes that were copied to the device; "tokens", those of the
            batch.
        """
        counts = Counter[str]()
        count_passes([self.chunk], counts)
        instrument(counts)
        self.chunk.zero_grad(set_to_none=True)
        self.moved.num_bytes = 0
        on_device = HostRoutes.on_device

        def counted(routes: HostRoutes, *args: Any, **kwargs: Any) -> Any:
            self.moved.num_bytes += routes.packed.nbytes
            return on_device(routes, *args, **kwargs)

        HostRoutes.on_device = counted  # type: ignore[method-assign]
        maps: list[tuple[int, torch.Tensor]] = []

        def keep(router: Any, _: Any, output: Any) -> None:
            maps.append((router.layer_number, output[1].detach().clone()))

        for router in local_routers(self.chunk).values():
            router.register_forward_hook(keep)
        self.way.step()
        return {
            **counts,
            "wrong": wrong_passes(maps, self.batch, self.case.recompute),
            "moved": self.moved.num_bytes,
            "tokens": self.batch.num_tokens(),
        }

    def _built(self, name: str) -> tuple[Any, Any, Moved]:
        """The model of a way, what runs its step, and its count of the bytes of routes moved."""
        around, _, kind = name.partition(", ")
        if around == "verl":
            return self._built_in_verl(kind)
        if kind == "drop-in":
            import megatron_r3.frameworks.router_replay  # noqa: F401
        if around == "SkyRL":
            sys.path.append(str(self.case.skyrl))
            from skyrl.backends.skyrl_train.utils import replay_utils

            replay_utils.patch_topk_router_layer_number()  # it must run before the model is made
        native = kind.startswith("native")
        chunk = self._model(
            moe_router_replay=native, moe_enable_routing_replay=not native and kind != "live"
        )
        way: Live
        if native:
            way = Native(self.batch, chunk, plan=WAYS[name].plan)
        elif around == "SkyRL":
            way = SkyRL(self.batch)
        else:
            way = Live(self.batch) if kind == "live" else ByHand(self.batch)
        step = HandWritten(way, chunk)
        return chunk, step, way.moved

    def _built_in_verl(self, kind: str) -> tuple[Any, Any, Moved]:
        from verl.workers.engine.megatron import transformer_impl as impl

        put_on_cpu(impl)
        if kind in ("own replay", "on megatron_r3"):
            # verl's engine begins with this call. In the worker "verl on r3" verl has loaded
            # megatron_r3.frameworks.verl, which has replaced the function.
            impl.apply_router_replay_patch()
            chunk, kind = self._model(ask_for_replay), "verl"
        else:
            chunk = self._model(moe_router_replay=kind != "live")
        way = InVerl(self.batch, chunk, kind)
        return chunk, way, way.moved

    def _model(self, prepare: Any = None, **options: Any) -> Any:
        """A Qwen3-MoE of 4 layers, 16 experts, top-4, with the same weights in every way."""
        full = "full" if self.case.recompute else None
        parallel = {"expert_model_parallel_size": self.case.expert_parallel}
        parallel |= {"expert_tensor_parallel_size": 1, "variable_seq_lengths": True}
        options = {"moe_router_replay": False, "moe_router_fusion": False, **options, **parallel}
        options["recompute_granularity"] = full
        if not full:
            options |= {"recompute_method": None, "recompute_num_layers": None}
        config = make_config(MODEL, MODEL.tiny, "local", False, **options)
        if prepare:
            prepare(config)
        torch.manual_seed(3)
        return make_model(MODEL, MODEL.tiny, config, "local")


def wrong_passes(maps: list[tuple[int, torch.Tensor]], batch: Batch, recompute: bool) -> int:
    """How many router passes did not take the routes of their micro-batch and layer.

    Args:
        maps: for each pass, in order, the layer number and the routing map `[T, E]`.

    Raises:
        ValueError: the number of passes does not follow from layers and micro-batches.
    """
    each_ = LAYERS * (2 if recompute else 1)  # passes of a micro-batch
    if len(maps) != each_ * MICROBATCHES:
        raise ValueError(f"{len(maps)} passes of routers, expected {each_ * MICROBATCHES}")
    found = 0
    for number_, (layer, map_TE) in enumerate(maps):
        wanted_LTK = batch.wanted(batch.microbatches()[number_ // each_])
        ids_TK = torch.from_numpy(wanted_LTK[layer - 1]).long()
        has_T = ids_TK[:, 0] >= 0
        wanted_TE = torch.zeros(len(ids_TK), EXPERTS, dtype=torch.bool)
        wanted_TE.scatter_(1, ids_TK.clamp(min=0), True)
        found += not torch.equal(wanted_TE[has_T], map_TE[has_T])
    return found


# -- the batch


@dataclass
class Batch:
    """What a rank trains on in a step: samples of several lengths, four in a pack.

    Args:
        rank: the rank, which seeds its tokens.

    Attributes:
        tokens: the token ids of each sample, int64.
        responses: how many tokens of each sample are its response.
        routes: the routes of each sample, int16 `[tokens - 1, L, K]`, as an engine returns them:
            the last token was never forwarded. Empty until `run_way` sets what `record` made.
    """

    rank: int
    tokens: list[torch.Tensor] = field(init=False)
    responses: list[int] = field(init=False)
    routes: list[np.ndarray] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Draw the samples."""
        # Every micro-batch and rank has the same lengths. Otherwise all ranks would wait in each
        # layer for the rank with the most tokens.
        drawn = np.random.default_rng(0).integers(LONGEST // 2, LONGEST + 1, TOGETHER)
        lengths = np.tile(drawn, MICROBATCHES).tolist()
        rng = np.random.default_rng(1 + self.rank)
        self.tokens = [torch.from_numpy(rng.integers(1, VOCABULARY, n)) for n in lengths]
        self.responses = [len(ids) // 2 for ids in self.tokens]

    def microbatches(self) -> list[range]:
        """The numbers of the samples of each micro-batch."""
        return [range(first, first + TOGETHER) for first in range(0, SAMPLES, TOGETHER)]

    def num_tokens(self) -> int:
        """How many tokens all samples have together."""
        return sum(map(len, self.tokens))

    def turned(self, chosen: list[np.ndarray]) -> list[np.ndarray]:
        """The routes to train on, from those that the live routers chose.

        Each id is moved on by half of the experts. So the spread of the load stays that of live
        routing, and a replay that silently routes live is found wrong. Example with 16 experts:
        [0, 3, 9, 15] becomes [8, 11, 1, 7].
        """
        return [(ids_TLK + EXPERTS // 2) % EXPERTS for ids_TLK in chosen]

    def wanted(self, samples: range) -> np.ndarray:
        """The routes of a packed micro-batch, `[L, T, K]`; -1 for a token without a route."""
        missing = np.full((1, LAYERS, TOPK), -1, np.int16)
        parts = [part for index in samples for part in (self.routes[index], missing)]
        return np.concatenate(parts).transpose(1, 0, 2)


# -- ways to replay, each as its users would write it; each begins with an engine's arrays

# runs the model on the micro-batch, with more arguments for the model if there are any
Run = Callable[..., torch.Tensor]


@dataclass
class Moved:
    """Counts the bytes of routes that a way copies to the device, which here is the CPU too."""

    num_bytes: int = 0

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device, and count its bytes."""
        self.num_bytes += tensor.nbytes
        return tensor.to(torch.device("cuda"), non_blocking=True, copy=True)


class Live:
    """Runs the model without replay; the classes of the other ways override its methods."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.moved = batch, Moved()

    def begin_step(self) -> None:
        """Called once, before the micro-batches of a step."""

    def forward(self, chunk: Any, samples: range, run: Run) -> torch.Tensor:
        """One forward pass on the packed samples."""
        return run()

    def end_step(self) -> None:
        """Called once, after the last backward pass of a step."""


class ByHand(Live):
    """Replay by Megatron's `RouterReplay`, called as its docstrings say, with one copy of ids."""

    def forward(self, chunk: Any, samples: range, run: Run) -> torch.Tensor:
        """Set the targets and the action, run the pass, set the action for backward."""
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        # a token without a route needs ids too: the dispatcher relies on K distinct experts
        dummy = np.broadcast_to(np.arange(TOPK, dtype=np.int16), (1, LAYERS, TOPK))
        routes = self.batch.routes
        ids_TLK = np.concatenate([part for i in samples for part in (routes[i], dummy)])
        on_device_TLK = self.moved.to_device(torch.from_numpy(ids_TLK))
        ids_LTK = on_device_TLK.permute(1, 0, 2).long()  # torch gathers with int64
        RouterReplay.set_replay_data([*ids_LTK])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        output = run()
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        return output

    def end_step(self) -> None:
        """Clear the queues of `RouterReplay`: without recompute nothing empties them."""
        from megatron.core.transformer.moe.router_replay import RouterReplay

        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()


class SkyRL(Live):
    """Replay by SkyRL's helpers, called as SkyRL's `megatron_model_wrapper.py` calls them."""

    def begin_step(self) -> None:
        """Clear an earlier replay; pad the routes of the batch as SkyRL's `preprocess.py` does."""
        from skyrl.backends.skyrl_train.utils import replay_utils

        replay_utils.clear_router_replay()
        lengths = [len(ids) for ids in self.batch.tokens]
        shape = (len(lengths), max(lengths), LAYERS, TOPK)
        padded = replay_utils.make_replay_padding_indices_np(shape, dtype=np.dtype(np.int16))
        no_route = np.ones(shape[:2], bool)
        attention = np.zeros(shape[:2], bool)
        for index, (route, length) in enumerate(zip(self.batch.routes, lengths, strict=True)):
            padded[index, : len(route)] = route
            no_route[index, : len(route)] = False
            attention[index, :length] = True
        self._host = [torch.from_numpy(array) for array in (padded, no_route, attention)]

    def forward(self, chunk: Any, samples: range, run: Run) -> torch.Tensor:
        """Set up the replay of the forward pass, run the pass, set up the replay of backward."""
        from skyrl.backends.skyrl_train.distributed.megatron import token_metadata
        from skyrl.backends.skyrl_train.utils import replay_utils

        part = slice(samples.start, samples.stop)
        ids_BSLK, no_route_BS = (self.moved.to_device(whole[part]) for whole in self._host[:2])
        attention_BS = self._host[2][part].to(torch.device("cuda"))
        layout = token_metadata.build_token_metadata_layout(
            attention_BS, attention_BS.device, packed=True, fp8_enabled=False
        )
        more = replay_utils.setup_per_microbatch_replay_forward(
            ids_BSLK,
            no_route_BS,
            attention_BS,
            model=chunk,
            model_config=chunk.config,
            metadata_layout=layout,
            remove_microbatch_padding=True,
        )
        output = run(**more)
        replay_utils.setup_per_microbatch_replay_backward()
        return output

    def end_step(self) -> None:
        """Clear the replay, as the end of SkyRL's `router_replay_schedule` does."""
        from skyrl.backends.skyrl_train.utils import replay_utils

        replay_utils.clear_router_replay()


class Native(Live):
    """Replay by `replaying`, from arrays on the host.

    Args:
        chunk: the model, with `moe_router_replay`.
        plan: whether each micro-batch gets a dispatch plan.
    """

    def __init__(self, batch: Batch, chunk: Any, plan: bool) -> None:
        super().__init__(batch)
        self.model_routes = ModelRoutes(chunk, plan=plan)

    def begin_step(self) -> None:
        """Check the ids of the batch, and number the rows of each sample."""
        ids_TLK = np.concatenate(self.batch.routes)
        self._source = RouteArrays(ids_TLK.transpose(1, 0, 2), EXPERTS, range(LAYERS))
        first, self._rows = 0, []
        for route in self.batch.routes:
            # -1: the last token has no route
            self._rows.append(np.append(np.arange(first, first + len(route)), -1))
            first += len(route)

    def forward(self, chunk: Any, samples: range, run: Run) -> torch.Tensor:
        """Make the routes of the micro-batch, and run the pass inside `replaying`."""
        rows_BS = torch.from_numpy(np.concatenate([self._rows[i] for i in samples]))[None]
        with replaying(self.model_routes.microbatch(self._source, rows_BS)):
            return run()


class HandWritten:
    """A hand-written step on packed sequences, which replays in one of the ways above.

    Args:
        way: how each forward pass replays.
        chunk: the model.
    """

    def __init__(self, way: Live, chunk: Any) -> None:
        self.way, self.chunk = way, chunk

    def step(self) -> None:
        """Forward and backward passes of all micro-batches."""
        self.way.begin_step()
        for samples in self.way.batch.microbatches():
            run = partial(self.chunk, **packed(self.way.batch, samples))
            self.way.forward(self.chunk, samples, run).mean().backward()
        self.way.end_step()


def packed(batch: Batch, samples: range) -> dict[str, Any]:
    """The model's arguments for one micro-batch: its samples one after the other."""
    from megatron.core.packed_seq_params import PackedSeqParams

    parts = [batch.tokens[index] for index in samples]
    lengths = [len(part) for part in parts]
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    longest = {name: max(lengths) for name in ("max_seqlen_q", "max_seqlen_kv")}
    tokens = torch.cat(parts)[None]
    return {
        "input_ids": tokens,
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "attention_mask": None,
        "labels": tokens.roll(-1, 1),
        "packed_seq_params": PackedSeqParams("thd", **dict.fromkeys(names, ends), **longest),
    }


class InVerl:
    """A step of verl's engine: all ways run verl's `forward_backward_batch` and `forward_step`.

    Args:
        batch: what this rank trains on; the first step reads its routes.
        chunk: the model.
        way: "live"; "verl", for verl's own calls, which set routes in verl's hooks or in those of
            megatron_r3; "native" or "native, plan", for `replaying`.
    """

    def __init__(self, batch: Batch, chunk: Any, way: str) -> None:
        from verl.workers.engine.megatron import transformer_impl as impl

        self.batch, self.chunk, self.replays = batch, chunk, way == "verl"
        self.moved = Moved()
        mode = "R3" if self.replays else "disabled"
        self.engine = bare_engine(impl, [chunk], mode, replays=self.replays)
        theirs = self.engine.forward_step
        if way.startswith("native"):
            self.engine.forward_step = natively(theirs, ModelRoutes(chunk, plan="plan" in way))
        else:
            self.engine.forward_step = self._observed(theirs)
        self._takes_routes, self._data = way != "live", None

    def step(self) -> None:
        """Forward and backward passes of all micro-batches."""
        if self._data is None:
            routes = [torch.from_numpy(ids_TLK) for ids_TLK in self.batch.routes]
            self._data = trainer_batch(
                self.batch.tokens,
                self.batch.responses,
                routes if self._takes_routes else None,
                TOGETHER,
                self.replays,
            )
        self.engine.forward_backward_batch(self._data, self._loss)

    def _observed(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        """verl's forward step, and before it the count of the bytes of routes that verl moves."""

        def forward_step(batches: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
            batch = next(batches)
            if (routes := batch.get("routed_experts", None)) is not None:
                # `batch.to(device)` in verl's forward step copies all of it
                self.moved.num_bytes += routes.values().nbytes
            return theirs(iter([batch]), *args, **kwargs)

        return forward_step

    @staticmethod
    def _loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        log_probs = model_output["log_probs"]
        values = log_probs.values() if log_probs.is_nested else log_probs
        return (values.reshape(-1) * data["loss_mask"].values()).sum() / SAMPLES, {}


def natively(theirs: Callable[..., Any], model_routes: ModelRoutes) -> Callable[..., Any]:
    """verl's forward step inside `replaying`; verl gets no routes, so it sets none in a router."""

    def forward_step(batches: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        batch = next(batches)
        with replaying(routes_of(batch, model_routes)):
            rest = batch.exclude("routed_experts")
            return theirs(iter([rest]), *args, **kwargs)

    return forward_step


def routes_of(batch: Any, model_routes: ModelRoutes) -> MicrobatchRoutes:
    """Make the routes of verl's micro-batch, whose tensors are still on the host.

    The row ids go through verl's own packing like tokens, and so get verl's context-parallel split
    and padding. In the packing they count from 1, since verl pads with zeros.
    """
    from verl.models.mcore.util import preprocess_thd_engine

    routes, lengths = batch["routed_experts"], batch["input_ids"].offsets().diff().tolist()
    ids_LTK = routes.values().numpy().transpose(1, 0, 2)
    source = RouteArrays(ids_LTK, EXPERTS, range(LAYERS))
    # like verl's R3 mask: no route for the last token, nor for a sample without a response
    counts = (routes.offsets().diff() * (batch["response_mask"].sum(-1) > 0)).tolist()
    numbers = [np.zeros(length, np.int64) for length in lengths]
    for row, first, count in zip(numbers, routes.offsets().tolist(), counts, strict=False):
        row[:count] = np.arange(first, first + count) + 1
    rows_S, *_ = preprocess_thd_engine(jagged([torch.from_numpy(row) for row in numbers]))
    rows_BS = rows_S.reshape(1, -1) - 1
    return model_routes.microbatch(source, rows_BS)


if __name__ == "__main__":
    from proof.benchmarks import clients  # the ranks import `run_way` by this module's name

    sys.exit(clients.BENCH.main())
