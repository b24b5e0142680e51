"""What the ranks of `make bench-clients` do: they wait for a word, run a step, and answer.

The ways patch Megatron differently, so each way has ranks of its own, with one model each; a rank
that held more would be slower by some percents for that alone. The driver lets the ranks of one way
run one step at a time. All others are blocked at a socket meanwhile, so that the steps of a round
have the machine one after the other.

Megatron and the frameworks are imported only inside the functions.

Shape suffixes (docs/glossary.md): L, T, K, E.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_r3 import MicrobatchRoutes, local_routers, recording
from megatron_r3.replay.host_routes import HostRoutes
from proof.benchmarks.clients_model import (
    EXPERTS,
    LAYERS,
    MICROBATCHES,
    Batch,
    make_config,
    make_model,
    start,
)
from proof.benchmarks.clients_ways import ByHand, HandWritten, Live, Moved, Native, Packed, SkyRL
from proof.benchmarks.waits import count_passes, instrument


@dataclass(frozen=True)
class Way:
    """A way to replay.

    Attributes:
        worker: the worker that its ranks are forked from, which has imported what they need.
        live: the way without replay around which everything else is the same.
        peer: the way that it would replace; None for a peer, and for live.
        plan: whether its layers have a dispatch plan.
    """

    worker: str
    live: str
    peer: str | None = None
    plan: bool = False


_VERL, _HAND = "verl, live", "by hand, live"
WAYS = {
    _VERL: Way("verl on r3", _VERL),
    "verl, own replay": Way("verl", _VERL),
    "verl, on megatron_r3": Way("verl on r3", _VERL, "verl, own replay", plan=True),
    "verl, native": Way("verl on r3", _VERL, "verl, own replay"),
    "verl, native, plan": Way("verl on r3", _VERL, "verl, own replay", plan=True),
    _HAND: Way("r3", _HAND),
    "by hand, RouterReplay": Way("upstream", _HAND),
    "by hand, drop-in": Way("r3", _HAND, "by hand, RouterReplay", plan=True),
    "SkyRL, RouterReplay": Way("upstream", _HAND),
    "SkyRL, drop-in": Way("r3", _HAND, "SkyRL, RouterReplay", plan=True),
    "by hand, native": Way("r3", _HAND, "by hand, RouterReplay"),
    "by hand, native, plan": Way("r3", _HAND, "by hand, RouterReplay", plan=True),
}


@dataclass(frozen=True)
class Case:
    """What is alike in all ways of a run.

    Attributes:
        expert_parallel: how many ranks share the experts; as many run.
        recompute: whether everything is recomputed.
        skyrl: a folder with SkyRL's files; None leaves its ways out.
    """

    expert_parallel: int
    recompute: bool
    skyrl: Path | None = None

    @property
    def name(self) -> str:
        """Of the case, without SkyRL. Example: "EP2 full"."""
        return f"EP{self.expert_parallel} {'full' if self.recompute else 'none'}"

    def ways(self) -> list[str]:
        """The ways that can run."""
        return [name for name in WAYS if self.skyrl or not name.startswith("SkyRL")]

    def ways_of(self, worker: str) -> list[str]:
        """Those whose ranks are forked from one worker."""
        return [name for name in self.ways() if WAYS[name].worker == worker]


def serve(rank: int, worker: str, address: str, case: Case) -> None:
    """Do what the driver says, until it says nothing more.

    Args:
        rank: among the ranks of all ways of the worker. Example with two ways on EP2: ranks 0 and 1
            are those of the first way, ranks 2 and 3 are 0 and 1 of the second.
        worker: whose ways are run.
        address: of the driver's socket. It gets the way and its rank first, and then an answer for
            each word: the name of a method of `Bench`, and its arguments.
    """
    number, own_rank = divmod(rank, case.expert_parallel)
    name = case.ways_of(worker)[number]
    os.environ |= {"RANK": str(own_rank), "LOCAL_RANK": str(own_rank)}
    os.environ["WORLD_SIZE"] = str(case.expert_parallel)
    bench = Bench(own_rank, name, case, f"file://{address}-{name.replace(' ', '-')}")
    with socket.socket(socket.AF_UNIX) as connecting:
        connecting.connect(address)
        connection = Connection(connecting.detach())
    connection.send((name, own_rank))
    while (word := connection.recv()) is not None:
        method, *arguments = word
        connection.send(getattr(bench, method)(*arguments))


class Bench:
    """One way on one rank.

    Args:
        rank: among the ranks of the way.
        name: of the way.
        case: of all ways.
        meeting: where the ranks of the way find each other, as torch's `init_method`.
    """

    def __init__(self, rank: int, name: str, case: Case, meeting: str) -> None:
        torch.set_num_threads(1)
        start(rank, case.expert_parallel, meeting)
        self.case, self.batch, self.held = case, Batch(rank), Held()
        self.chunk, self.way, self.moved = self._built(name)
        # What Python's collector of circles looks through in a step is what the step has made, and
        # not the modules of this process, of which another process has more or fewer.
        gc.collect()
        gc.freeze()

    def record(self) -> list[np.ndarray]:
        """The routes of the batch for all ways, made from what the live router chooses."""
        chosen = []
        for samples in self.batch.microbatches():
            packed = Packed.of(self.batch, samples)
            with torch.no_grad(), recording() as routes:
                self.chunk(packed.tokens, packed.positions, None, packed_seq_params=packed.bounds)
            ids_TLK = torch.stack([routes.ids[n] for n in sorted(routes.ids)], 1).numpy()
            ends = np.cumsum([len(self.batch.tokens[index]) for index in samples])
            # the last token of a sample has no route
            chosen += [part_TLK[:-1] for part_TLK in np.split(ids_TLK, ends[:-1])]
        return self.batch.turned(chosen)

    def take(self, routes: list[np.ndarray]) -> None:
        """Train on these routes from now on."""
        self.batch.routes = routes

    def step(self) -> tuple[float, float]:
        """Run one step; wall and CPU seconds of this rank, of all its threads."""
        self.chunk.zero_grad(set_to_none=True)
        gc.collect()  # what an earlier step has left is not this one's to clear away
        torch.distributed.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        self.way.step()
        return time.perf_counter() - wall, time.process_time() - cpu

    def count(self) -> dict[str, Any]:
        """Run one step and count; no step is timed afterwards, since counting goes on.

        Returns:
            Numbers by name: those of `proof.benchmarks.waits`; "layer passes"; "wrong", the passes
            of a router that took other routes than those of their micro-batch; "moved", the bytes
            of routes that were copied to the device; "held" by a token of a micro-batch; "tokens".
        """
        counts, passes = Counter[str](), Counter[str]()
        count_passes([self.chunk], passes)
        instrument(counts)
        self.chunk.zero_grad(set_to_none=True)
        self.moved.num_bytes = 0
        with _native_copies(self.moved), Seen(self.chunk) as seen, self.held.measured(self.chunk):
            self.way.step()
        return {
            **counts,
            "layer passes": passes["experts"],
            "wrong": seen.wrong(self.batch, self.case.recompute),
            "moved": self.moved.num_bytes,
            "held": self.held.most / (self.batch.num_tokens() / MICROBATCHES),
            "tokens": self.batch.num_tokens(),
        }

    def _built(self, name: str) -> tuple[Any, Any, Moved]:
        """The model of a way, its step, and where it counts the bytes that it copies."""
        around, _, kind = name.partition(", ")
        if around == "verl":
            return self._built_in_verl(kind)
        if kind == "drop-in":
            import megatron_r3.frameworks.router_replay  # noqa: F401
        if around == "SkyRL":
            sys.path.append(str(self.case.skyrl))
            from skyrl.backends.skyrl_train.utils import replay_utils

            replay_utils.patch_topk_router_layer_number()  # before the model is made
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
        step = HandWritten(way, chunk, self.held.begin, self.held.sample)
        return chunk, step, way.moved

    def _built_in_verl(self, kind: str) -> tuple[Any, Any, Moved]:
        from verl.workers.engine.megatron import transformer_impl as impl

        from proof.benchmarks.clients_verl import InVerl
        from proof.fidelity.clients.verl_engine import ask_for_replay, put_on_cpu

        put_on_cpu(impl)
        if kind in ("own replay", "on megatron_r3"):
            # the first thing that the engine does; it is ours where verl has the setting for it
            impl.apply_router_replay_patch()
            chunk, kind = self._model(ask_for_replay), "verl"
        else:
            chunk = self._model(moe_router_replay=kind != "live")
        way = InVerl(self.batch, chunk, kind, self.held.begin, self.held.sample)
        return chunk, way, way.moved

    def _model(self, prepare: Any = None, **options: Any) -> Any:
        config = make_config(self.case.expert_parallel, self.case.recompute, **options)
        if prepare:
            prepare(config)
        return make_model(config)


@contextmanager
def _native_copies(moved: Moved) -> Iterator[None]:
    """Have `HostRoutes` say how many bytes it copies to the device."""
    on_device = HostRoutes.on_device

    def counted(self: HostRoutes, *args: Any, **kwargs: Any) -> Any:
        moved.num_bytes += self.packed.nbytes
        return on_device(self, *args, **kwargs)

    HostRoutes.on_device = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        HostRoutes.on_device = on_device  # type: ignore[method-assign]


class Seen:
    """What each router of a model did, in the block."""

    def __init__(self, chunk: Any) -> None:
        self._routers = local_routers(chunk).values()
        self._maps: list[tuple[int, torch.Tensor]] = []

    def __enter__(self) -> Seen:
        def keep(module: Any, _: Any, output: Any) -> None:
            self._maps.append((module.layer_number, output[1].detach().clone()))

        self._handles = [router.register_forward_hook(keep) for router in self._routers]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def wrong(self, batch: Batch, recompute: bool) -> int:
        """How many passes did not take the routes of their micro-batch, in their layer.

        Raises:
            ValueError: the routers ran another number of times than the layers and micro-batches.
        """
        each = LAYERS * (2 if recompute else 1)  # passes of a micro-batch
        if len(self._maps) != each * MICROBATCHES:
            raise ValueError(f"{len(self._maps)} passes of routers, not {each * MICROBATCHES}")
        wrong = 0
        for number, (layer, map_TE) in enumerate(self._maps):
            wanted_LTK = batch.wanted(batch.microbatches()[number // each])
            ids_TK = torch.from_numpy(wanted_LTK[layer - 1]).long()
            has_T = ids_TK[:, 0] >= 0
            wanted_TE = torch.zeros(len(ids_TK), EXPERTS, dtype=torch.bool)
            wanted_TE.scatter_(1, ids_TK.clamp(min=0), True)
            wrong += not torch.equal(wanted_TE[has_T], map_TE[has_T])
        return wrong


class Held:
    """The bytes of integers and bits that replay and autograd hold until the backward pass.

    On a CPU no allocator tells what a device would hold, so the places are looked at, between the
    forward pass of each micro-batch and its backward pass: what the routers' hooks keep (targets,
    masks, queues), every `MicrobatchRoutes`, and what autograd has saved in the forward pass. Two
    tensors in the same memory count once. What live routing holds as well, such as the indices of
    its top-k, is in this number too; the table shows the difference to live.

    Attributes:
        most: the bytes, of the micro-batch at which they were most.
    """

    _KEPT = ("target_topk_idx", "target_replay_mask", "recorded_topk_idx")
    _QUEUES = ("replay_backward_list", "replay_backward_mask_list")

    def __init__(self) -> None:
        self.most, self._chunk = 0, None
        self._saved: dict[int, int] = {}  # bytes by the address of the memory

    def measured(self, chunk: Any) -> Any:
        """A block in which the steps of a model are looked at."""
        self.most, self._chunk = 0, chunk

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self._add(self._saved, tensor)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def begin(self) -> None:
        """A forward pass begins."""
        self._saved.clear()

    def sample(self) -> None:
        """A forward pass is over, and its backward pass has not begun."""
        if self._chunk is None:
            return
        found = dict(self._saved)
        for router in local_routers(self._chunk).values():
            hook = getattr(router, "router_replay", None)
            for name in self._KEPT:
                self._add(found, getattr(hook, name, None))
            for tensor in (t for name in self._QUEUES for t in getattr(hook, name, ())):
                self._add(found, tensor)
        for routes in gc.get_objects():
            if type(routes) is MicrobatchRoutes:
                live_T = routes.live_T
                masks = [live_T] if isinstance(live_T, torch.Tensor) else [*(live_T or {}).values()]
                counted_T = None if routes.tally is None else routes.tally.counted_T
                for tensor in (*routes.ids.values(), *masks, routes.padding_T, counted_T):
                    self._add(found, tensor)
        self.most = max(self.most, sum(found.values()))

    @staticmethod
    def _add(found: dict[int, int], tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point():
            memory = tensor.untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
