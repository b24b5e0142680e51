"""The trainer's probe: log-probs and live routes of fixed tokens, in the layout of the training.

The probe is published with the policy. A sampler that gets the policy must compute the same
log-probs and routes (megatron_r3/loop/probe.py).

Shape suffixes (docs/glossary.md): B, K, L, N, M, S, T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_r3.loop.probe import Probe, probe_tokens
from megatron_r3.replay.layers import local_routers, unwrapped
from megatron_r3.replay.microbatch import MicrobatchRoutes
from megatron_r3.replay.rank_layout import RankLayout
from megatron_r3.replay.rows import PADDING
from megatron_r3.train.forward import forward_only, on_device, run_forward
from megatron_r3.train.options import RolloutOptions
from megatron_r3.train.policy_head import Policy, install
from megatron_r3.weights.all_ranks import everyones

_FIELDS = ("tokens", "labels", "position_ids", "rows", "loss_mask")


class ProbePass:
    """Runs the probe's tokens through the model.

    Args:
        options: the options of the training.
        vocab_size: the sampler's vocabulary size, without padding.
        observe: puts a hook into a router, by which the router takes part in the active
            micro-batch; called with the router and its layer number.
    """

    def __init__(
        self, options: RolloutOptions, vocab_size: int, observe: Callable[[Any, int], None]
    ) -> None:
        self.options, self.vocab_size, self._observe = options, vocab_size, observe
        self._layout = RankLayout(options.sequence_parallel)
        self.tokens_MN = probe_tokens(vocab_size, options.seq_length)
        self._logprobs: list[tuple[Tensor, Tensor]] = []  # rows and values
        self._routes: list[tuple[int, np.ndarray, Tensor]] = []  # layer number, rows, ids

    def run(self, models: list[Any]) -> Probe | None:
        """The probe under the current weights on rank 0, None on other ranks. All ranks call it."""
        self._logprobs, self._routes = [], []
        size, stages = self.options.micro_batch_size, 1
        if len(models) > 1:  # interleaved: there must be a multiple of `stages` micro-batches
            from megatron.core import mpu

            stages = mpu.get_pipeline_model_parallel_world_size()
        count = -(-len(self.tokens_MN) // (size * stages)) * stages
        forward_only(
            models,
            self._forward,
            lambda: self._batches(count),
            num_microbatches=count,
            seq_length=self.options.seq_length,
            micro_batch_size=size,
        )
        return self._gather()

    def _batches(self, count: int) -> Iterator[dict[str, Tensor]]:
        """Micro-batches with the sequences padded to S; the last ones may be padding alone."""
        size, (num, length) = self.options.micro_batch_size, self.tokens_MN.shape
        for first in range(0, count * size, size):
            shape = (size, self.options.seq_length)
            batch = {name: torch.zeros(shape, dtype=torch.int64) for name in _FIELDS}
            batch["rows"][:] = PADDING
            batch["position_ids"][:] = torch.arange(shape[1])
            batch["loss_mask"] = torch.zeros(shape)
            for i, sequence in enumerate(range(first, min(first + size, num))):
                tokens = torch.from_numpy(self.tokens_MN[sequence])
                batch["tokens"][i, :length] = tokens
                batch["labels"][i, : length - 1] = tokens[1:]
                batch["rows"][i, :length] = torch.arange(length) + sequence * length
            yield batch

    def _forward(
        self, data_iterator: Iterator[dict[str, Tensor]], model: Any
    ) -> tuple[Any, Callable[..., Any]]:
        host = self._layout.split(next(data_iterator), _FIELDS)
        layers, topk = self._observed_layers(unwrapped(model)), self.options.topk
        rows_T = self._layout.router_order(host["rows"])
        microbatch = None
        if layers:
            # every token is routed live, and `microbatch.ids` gets the chosen experts
            ids_TK = torch.zeros(len(rows_T), topk, dtype=torch.int16, device="cuda")
            all_T = torch.ones(len(rows_T), dtype=torch.bool, device="cuda")
            ids = dict.fromkeys(layers, ids_TK)
            microbatch = MicrobatchRoutes(ids, live_T=all_T, checked=True)
        padded = self.options.padded_vocab_size
        policy = Policy(vocab_size=None if self.vocab_size == padded else self.vocab_size)
        batch = on_device(host)
        policy.attach(batch["labels"])
        output = run_forward(model, batch, host, microbatch)
        if microbatch is not None:
            for layer, chosen_TK in microbatch.ids.items():
                self._routes.append((layer, rows_T.numpy(), chosen_TK))

        def keep(output_BS: Tensor, non_loss_data: bool) -> None:
            policy.check_used()
            self._logprobs.append((host["rows"], -output_BS.float()))

        return output, keep

    def _observed_layers(self, chunk: torch.nn.Module) -> list[int]:
        """The numbers of a model chunk's MoE layers; afterwards each of their routers has a hook.

        The hook puts the router's choice into `MicrobatchRoutes.ids`.
        """
        install(chunk)
        routers = local_routers(chunk)
        for number, router in routers.items():
            if router.router_replay is None:
                self._observe(router, number)
        return sorted(routers)

    def _gather(self) -> Probe | None:
        mine = (
            [
                (rows.numpy().ravel(), values.cpu().numpy().ravel())
                for rows, values in self._logprobs
            ],
            [(layer, rows, ids.cpu().numpy()) for layer, rows, ids in self._routes],
        )
        everyone = everyones(mine)
        if torch.distributed.get_rank():
            return None
        num, length = self.tokens_MN.shape
        values = np.zeros(num * length, np.float32)
        is_computed = np.zeros(num * length, bool)
        layers = sorted({layer for _, routes in everyone for layer, _, _ in routes})
        ids = np.zeros((len(layers), num * length, self.options.topk), np.uint16)
        for logprobs, routes in everyone:
            for rows, some in logprobs:
                values[rows[rows >= 0]] = some[rows >= 0]
                is_computed[rows[rows >= 0]] = True
            for layer, rows, chosen in routes:
                ids[layers.index(layer), rows[rows >= 0]] = chosen[rows >= 0]
        # position t predicts token t + 1; no position predicts the first token
        logprobs_MN = np.zeros((num, length), np.float32)
        logprobs_MN[:, 1:] = values.reshape(num, length)[:, :-1]
        # NaN is allowed here: if it comes from a weight, writing the weights names that weight.
        assert is_computed.all(), "some log-probs of the probe were computed by no rank"
        routes_LMNK = ids.reshape(len(layers), num, length, self.options.topk)
        return Probe(self.tokens_MN, logprobs_MN, routes_LMNK)
