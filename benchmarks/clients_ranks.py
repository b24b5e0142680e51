"""What the ranks of `make bench-clients` do: they wait for a word, run a step, and answer.

The ways patch Megatron differently, so they are spread over several processes (`WAYS`), each with
its ranks. The driver lets one process run one step at a time. All others are blocked at a socket
meanwhile, so that the steps of a round have the machine one after the other.

Megatron and the frameworks are imported only inside the functions.

Shape suffixes (docs/glossary.md): L, T, K, E.
"""

from __future__ import annotations

import gc
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.clients_model import (
    EXPERTS,
    LAYERS,
    MICROBATCHES,
    Batch,
    make_config,
    make_model,
    start,
)
from benchmarks.clients_ways import ByHand, HandWritten, Live, Native, SkyRL
from benchmarks.waits import count_passes, instrument


@dataclass(frozen=True)
class Way:
    """A way to replay.

    Attributes:
        process: the process that it runs in.
        live: the way without replay around which everything else is the same.
        peer: the way that it would replace; None for a peer, and for live.
        plan: whether its layers have a dispatch plan.
    """

    process: str
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

    def ways(self) -> list[str]:
        """The ways that can run."""
        return [name for name in WAYS if self.skyrl or not name.startswith("SkyRL")]


def serve(rank: int, process: str, address: str, case: Case) -> None:
    """Do what the driver says, until it says nothing more.

    Args:
        process: the ways of this process are run.
        address: of the driver's socket. It gets the name and the rank first, and then an answer for
            each word: the name of a method of `Bench`, and its arguments.
    """
    bench = Bench(rank, process, case)
    with socket.socket(socket.AF_UNIX) as connecting:
        connecting.connect(address)
        connection = Connection(connecting.detach())
    connection.send((process, rank))
    while (word := connection.recv()) is not None:
        method, *arguments = word
        connection.send(getattr(bench, method)(*arguments))


class Bench:
    """The ways of one process on one rank."""

    def __init__(self, rank: int, process: str, case: Case) -> None:
        torch.set_num_threads(1)
        start(case.expert_parallel)
        self.case, self.batch = case, Batch(rank)
        self.held = Held()
        self.chunks: dict[str, Any] = {}
        self.ways: dict[str, Any] = {}
        build = {
            "verl": self._build_verl,
            "verl on r3": self._build_verl_on_r3,
            "upstream": self._build_upstream,
            "r3": self._build_r3,
        }
        build[process]()
        assert self.ways.keys() == {n for n in case.ways() if WAYS[n].process == process}
        self._passes: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._counting = False

    def record(self) -> list[np.ndarray]:
        """The routes of the batch for all ways, made from what the live router chooses."""
        from benchmarks.clients_ways import Packed
        from megatron_r3.integrations import recording

        chosen = []
        for samples in self.batch.microbatches():
            packed = Packed.of(self.batch, samples)
            chunk = self.chunks["native"]
            with torch.no_grad(), recording() as routes:
                chunk(packed.tokens, packed.positions, None, packed_seq_params=packed.bounds)
            ids_TLK = torch.stack([routes.ids[n] for n in sorted(routes.ids)], 1).numpy()
            ends = np.cumsum([len(self.batch.tokens[index]) for index in samples])
            # the last token of a sample has no route
            chosen += [part_TLK[:-1] for part_TLK in np.split(ids_TLK, ends[:-1])]
        return self.batch.turned(chosen)

    def take(self, routes: list[np.ndarray]) -> None:
        """Train on these routes from now on."""
        self.batch.routes = routes

    def step(self, name: str) -> tuple[float, float]:
        """Run one step; wall and CPU seconds of this rank, of all its threads."""
        way = self.ways[name]
        way.chunk.zero_grad(set_to_none=True)
        gc.collect()  # what another way has left is not this one's to clear away
        torch.distributed.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        way.step()
        return time.perf_counter() - wall, time.process_time() - cpu

    def count(self, name: str) -> dict[str, Any]:
        """Run one step and count; no step is timed afterwards, since counting goes on.

        Returns:
            Numbers by name: those of `benchmarks.waits`; "layer passes"; "wrong", the passes of a
            router that took other routes than those of their micro-batch; "moved", the bytes of
            routes that were copied to the device; "held" by a micro-batch; "tokens".
        """
        if not self._counting:
            self._counting = True
            count_passes(self.chunks.values(), self._passes)
            instrument(self._counts)
            _count_moved(self.ways)
        way = self.ways[name]
        way.chunk.zero_grad(set_to_none=True)
        before, passes, way_moved = Counter(self._counts), Counter(self._passes), _moved(way)
        num_before = way_moved.num_bytes
        with Seen(way.chunk) as seen, self.held.measured(way.chunk):
            way.step()
        return {
            **(self._counts - before),
            "layer passes": (self._passes - passes)["experts"],
            "wrong": seen.wrong(self.batch, self.case.recompute),
            "moved": way_moved.num_bytes - num_before,
            "held": self.held.most / (self.batch.num_tokens() / MICROBATCHES),
            "tokens": self.batch.num_tokens(),
        }

    # -- the models and ways of each process

    def _chunk(self, name: str, prepare: Any = None, **options: Any) -> Any:
        config = make_config(self.case.expert_parallel, self.case.recompute, **options)
        if prepare:
            prepare(config)
        self.chunks[name] = make_model(config)
        return self.chunks[name]

    def _in_verl(self, name: str, way: str, chunk: Any) -> None:
        from benchmarks.clients_verl import InVerl

        begin, sample = self.held.begin, self.held.sample
        self.ways[name] = InVerl(self.batch, chunk, way, begin, sample)

    def _by_hand(self, name: str, way: Live, chunk: Any) -> None:
        self.ways[name] = HandWritten(way, chunk, self.held.begin, self.held.sample)

    def _build_verl(self) -> None:
        """verl's replay, as its engine puts it into Megatron."""
        from verl.workers.engine.megatron import transformer_impl as impl

        from fidelity.clients.verl_engine import ask_for_replay, put_on_cpu

        put_on_cpu(impl)
        impl.apply_router_replay_patch()
        chunk = self._chunk("own", ask_for_replay)
        self._in_verl("verl, own replay", "verl", chunk)

    def _build_verl_on_r3(self) -> None:
        from verl.workers.engine.megatron import transformer_impl as impl

        from fidelity.clients.verl_engine import ask_for_replay, put_on_cpu

        put_on_cpu(impl)
        self._in_verl("verl, live", "live", self._chunk("live"))
        native = self._chunk("native", moe_router_replay=True)
        self._in_verl("verl, native", "native", native)
        self._in_verl("verl, native, plan", "native, plan", native)
        impl.apply_router_replay_patch()  # ours, since verl was started with the setting for it
        self._in_verl("verl, on megatron_r3", "verl", self._chunk("hook", ask_for_replay))

    def _build_upstream(self) -> None:
        self._prepare_skyrl()
        chunk = self._chunk("RouterReplay", moe_enable_routing_replay=True)
        self._by_hand("by hand, RouterReplay", ByHand(self.batch), chunk)
        if self.case.skyrl:
            self._by_hand("SkyRL, RouterReplay", SkyRL(self.batch), chunk)

    def _build_r3(self) -> None:
        self._by_hand("by hand, live", Live(self.batch), self._chunk("live"))
        native = self._chunk("native", moe_router_replay=True)
        for name, plan in {"by hand, native": False, "by hand, native, plan": True}.items():
            self._by_hand(name, Native(self.batch, native, plan), native)
        # Routers that are made from here on stand in upstream's list, so this model comes last:
        # code for RouterReplay gives targets to all routers of the list.
        import megatron_r3.integrations.router_replay  # noqa: F401

        self._prepare_skyrl()
        drop_in = self._chunk("drop-in", moe_enable_routing_replay=True)
        self._by_hand("by hand, drop-in", ByHand(self.batch), drop_in)
        if self.case.skyrl:
            self._by_hand("SkyRL, drop-in", SkyRL(self.batch), drop_in)

    def _prepare_skyrl(self) -> None:
        if self.case.skyrl:
            sys.path.append(str(self.case.skyrl))
            from skyrl.backends.skyrl_train.utils import replay_utils

            replay_utils.patch_topk_router_layer_number()  # before the model is made


def _moved(way: Any) -> Any:
    """Where a way counts the bytes of routes that it copies to the device."""
    return way.way.moved if isinstance(way, HandWritten) else way.moved


def _count_moved(ways: dict[str, Any]) -> None:
    """Have `HostRoutes` say how many bytes it copies, to the ways that copy by it."""
    from megatron_r3.integrations.host_routes import HostRoutes

    native = [_moved(way) for name, way in ways.items() if "native" in name]
    on_device = HostRoutes.on_device

    def counted(self: HostRoutes, *args: Any, **kwargs: Any) -> Any:
        for moved in native:  # one way runs at a time, and reads the difference
            moved.num_bytes += self.packed.nbytes
        return on_device(self, *args, **kwargs)

    HostRoutes.on_device = counted  # type: ignore[method-assign]


class Seen:
    """What each router of a model did, in the block."""

    def __init__(self, chunk: Any) -> None:
        self._routers = routers_of(chunk)
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


def routers_of(chunk: Any) -> list[Any]:
    """The routers of a model."""
    from megatron.core.transformer.moe.router import TopKRouter

    return [module for module in chunk.modules() if isinstance(module, TopKRouter)]


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
        from megatron_r3.integrations import MicrobatchRoutes

        found = dict(self._saved)
        for hook in (getattr(router, "router_replay", None) for router in routers_of(self._chunk)):
            for name in self._KEPT:
                self._add(found, getattr(hook, name, None))
            for tensor in (t for name in self._QUEUES for t in getattr(hook, name, ())):
                self._add(found, tensor)
        for routes in gc.get_objects():
            if type(routes) is MicrobatchRoutes:
                live_T = routes.live_T
                masks = [live_T] if isinstance(live_T, torch.Tensor) else [*(live_T or {}).values()]
                for tensor in (*routes.ids.values(), *masks, routes.padding_T, routes.counted_T):
                    self._add(found, tensor)
        self.most = max(self.most, sum(found.values()))

    @staticmethod
    def _add(found: dict[int, int], tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point():
            memory = tensor.untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
