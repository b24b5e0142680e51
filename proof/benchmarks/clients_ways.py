"""Ways to replay in a forward step that is written by hand, each as its own users would write it.

All of them begin with the routes as an engine returns them: an int16 array for each sample. What a
way does with them belongs to its step: packing, checks, copies, plans. Megatron and the frameworks
are imported only inside the functions.

Shape suffixes (docs/glossary.md): B, L, T, K, S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron_r3 import ModelRoutes, RouteArrays, replaying
from proof.benchmarks.clients_model import EXPERTS, LAYERS, LONGEST, MICROBATCHES, TOPK, Batch

Run = Callable[..., torch.Tensor]  # runs the model on the micro-batch; takes more arguments of it


@dataclass
class Moved:
    """The bytes of routes that a way copies to the device. A copy is made where nothing else is."""

    num_bytes: int = 0

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device."""
        self.num_bytes += tensor.nbytes
        return tensor.to(torch.device("cuda"), non_blocking=True, copy=True)


class Live:
    """Without replay."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.moved = batch, Moved()

    def begin_step(self) -> None:
        """What is done once, before the micro-batches of a step."""

    def forward(self, chunk: Any, samples: range, run: Run) -> torch.Tensor:
        """One forward pass on the packed samples."""
        return run()

    def end_step(self) -> None:
        """What is done once, after the last backward pass of a step."""


class ByHand(Live):
    """Upstream's calls, as its docstrings say them, with one copy to the device."""

    def forward(self, chunk: Any, samples: range, run: Run) -> torch.Tensor:
        """Targets, action, pass, action."""
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        # the token without a route needs one: distinct experts, which the dispatcher relies on
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
        """Without recompute nothing takes from upstream's queues."""
        from megatron.core.transformer.moe.router_replay import RouterReplay

        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()


class SkyRL(Live):
    """SkyRL's helpers, called as its `megatron_model_wrapper.py` calls them."""

    def begin_step(self) -> None:
        """Pad the routes of the batch, as its `preprocess.py` does, and clear what is left over."""
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
        """Layout, targets and action, pass, action."""
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
        """As the end of its `router_replay_schedule`."""
        from skyrl.backends.skyrl_train.utils import replay_utils

        replay_utils.clear_router_replay()


class Native(Live):
    """`replaying`, from arrays on the host.

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
            # the last token has no route
            self._rows.append(np.append(np.arange(first, first + len(route)), -1))
            first += len(route)

    def forward(self, chunk: Any, samples: range, run: Run) -> torch.Tensor:
        """Routes of the micro-batch, and a block."""
        rows_BS = torch.from_numpy(np.concatenate([self._rows[i] for i in samples]))[None]
        with replaying(self.model_routes.microbatch(self._source, rows_BS)):
            return run()


@dataclass
class Packed:
    """The tokens of one micro-batch on the device, for a model that reads packed sequences."""

    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    bounds: Any = field(repr=False)

    @classmethod
    def of(cls, batch: Batch, samples: range) -> Packed:
        """Pack samples one behind the other."""
        from megatron.core.packed_seq_params import PackedSeqParams

        parts = [batch.tokens[index] for index in samples]
        lengths = [len(part) for part in parts]
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        tokens = torch.cat(parts)[None]
        bounds = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            cu_seqlens_q_padded=ends,
            cu_seqlens_kv_padded=ends,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        return cls(tokens, positions, tokens.roll(-1, 1), bounds)


class HandWritten:
    """A step of Megatron's schedule around one of the ways above.

    Args:
        way: how each forward pass replays.
        chunk: the model.
        on_forward: called before each forward pass.
        on_loss: called between a forward pass and its backward pass.
    """

    def __init__(self, way: Live, chunk: Any, on_forward: Any, on_loss: Any) -> None:
        self.way, self.chunk = way, chunk
        self.on_forward, self.on_loss = on_forward, on_loss

    def step(self) -> float:
        """Forward and backward passes of all micro-batches; returns the sum of the losses."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        losses: list[torch.Tensor] = []

        def loss_function(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            self.on_loss()
            losses.append(output.detach().mean())
            return output.mean(), {}

        def forward_step(iterator: Any, chunk: Any) -> Any:
            samples = next(iterator)
            self.on_forward()
            packed = Packed.of(self.way.batch, samples)

            def run(**more: Any) -> torch.Tensor:
                output: torch.Tensor = chunk(
                    packed.tokens,
                    packed.positions,
                    None,
                    labels=packed.labels,
                    packed_seq_params=packed.bounds,
                    **more,
                )
                return output

            return self.way.forward(chunk, samples, run), loss_function

        self.way.begin_step()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(self.way.batch.microbatches()),
            model=self.chunk,
            num_microbatches=MICROBATCHES,
            seq_length=LONGEST,
            micro_batch_size=1,
            forward_only=False,
        )
        self.way.end_step()
        return float(torch.stack(losses).sum())
