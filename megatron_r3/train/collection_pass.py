"""A forward-only pass over the rollouts of a collection, in the training's layout.

Shape suffixes (docs/glossary.md): B, S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from megatron_r3.replay.microbatch import MicrobatchRoutes
from megatron_r3.train.dataset import RolloutDataset
from megatron_r3.train.forward import forward_only, on_device, run_forward
from megatron_r3.train.lookahead import Prepared
from megatron_r3.train.old_policy import OldPolicy
from megatron_r3.train.options import RolloutOptions
from megatron_r3.train.policy_head import Policy


class CollectionPass:
    """Runs a model over each collection, and keeps what the pass finds.

    Attributes:
        policy: the log-probs that the pass found, and the routes if the updates need them.
        data: the samples; set when `pretrain()` asks for the training data.
    """

    def __init__(self, options: RolloutOptions) -> None:
        self.options = options
        self.policy = OldPolicy()
        self.data: RolloutDataset | None = None

    def forward(
        self,
        model: Any,
        prepared: Prepared,
        policy: Policy,
        microbatch: MicrobatchRoutes | None = None,
    ) -> tuple[Any, Callable[..., Any]]:
        """Run the forward pass of one micro-batch.

        Args:
            policy: how logits become log-probs.
            microbatch: the routes to replay; None for a live pass.

        Returns:
            The model's output, and a function that keeps the log-probs of this output. Megatron's
            schedule calls the function on the last pipeline stage.
        """
        host = prepared.batch
        batch = on_device(host)
        policy.attach(batch["labels"])
        output = run_forward(model, batch, host, microbatch)

        def keep(output_BS: Tensor, non_loss_data: bool) -> None:
            policy.check_used()
            self.policy.add_logprobs(host["rows"], -output_BS.float())

        return output, keep

    def _run(self, models: list[Any], forward_step: Callable[..., Any], collection: int) -> None:
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        options = self.options
        self.policy.begin(collection)
        forward_only(
            models,
            forward_step,
            lambda: self._batches(collection),
            num_microbatches=options.use.schedule.mini_steps * get_num_microbatches(),
            seq_length=options.seq_length,
            micro_batch_size=options.micro_batch_size,
        )
        self.policy.finish()

    def _batches(self, collection: int) -> Iterator[dict[str, Tensor]]:
        """This rank's micro-batches of a collection, in the order in which updates use them.

        Example with 2 data-parallel ranks and micro-batches of 2: rank 0 has the samples 0 1, 4 5,
        8 9, ..., as Megatron's MegatronPretrainingSampler shares them out.
        """
        from megatron.core import mpu

        assert self.data is not None, "pretrain() has not asked for the training data"
        size = self.options.micro_batch_size
        ranks, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
        schedule = self.options.use.schedule
        samples = schedule.of_collection(collection)
        for first in range(samples.start + rank * size, samples.stop, ranks * size):
            chosen = [schedule.mixed(i) for i in range(first, first + size)]
            yield default_collate([self.data.of_store(i) for i in chosen])
