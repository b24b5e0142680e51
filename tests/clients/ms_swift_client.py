"""ms-swift's own GRPO trainer on this rank: `train_step`, `forward_step`, and its replay helpers.

Real are all modules of ms-swift that are imported here. Of mcore-bridge, with which ms-swift builds
its models, real are `utils`, the class of its block of layers and that of its router: the model
here is made of them. The rest of mcore-bridge needs Transformer Engine: names without content.

The trainer is made without its `__init__`, which would load a Hugging Face checkpoint, start an
optimizer and an inference engine.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from types import SimpleNamespace
from typing import Any

import torch
from framework_cases import LONGEST
from router_replay_client import Client

_spec = importlib.util.find_spec("mcore_bridge")
assert _spec is not None
assert _spec.submodule_search_locations
_folder = _spec.submodule_search_locations[0]


def _without_init(name: str, **names: Any) -> types.ModuleType:
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = ["/".join([_folder, *name.split(".")[1:]])]
    vars(module).update(names)
    return module


_bridge = _without_init("mcore_bridge")
import mcore_bridge.utils as _utils  # noqa: E402

for _name in ("set_random_seed", "split_cp_inputs", "unwrap_model"):
    setattr(_bridge, _name, getattr(_utils, _name))
for _name in ("GPTBridge", "LoraParallelLinear", "ModelConfig"):
    setattr(_bridge, _name, type(_name, (), {}))
_bridge.get_mcore_model = _bridge.hf_to_mcore_config = NotImplemented
_without_init(
    "mcore_bridge.model", get_mcore_model_type=NotImplemented, get_model_meta=NotImplemented
)
_without_init("mcore_bridge.model.modules")

from mcore_bridge.model.modules.topk_router import TopKRouter  # noqa: E402
from mcore_bridge.model.modules.transformer_block import TransformerBlock  # noqa: E402
from megatron.core.models.gpt import gpt_model  # noqa: E402
from megatron.core.transformer.moe import moe_layer  # noqa: E402
from swift.megatron.trainers.grpo_trainer import MegatronGRPOTrainer  # noqa: E402
from swift.megatron.utils import apply_router_replay_patch, router_replay_utils  # noqa: E402
from swift.rlhf_trainers import utils as rlhf_utils  # noqa: E402

FIRST = torch.tensor([0])


def answered(ids_TLK: torch.Tensor) -> torch.Tensor:
    """What an engine returns: no row for a last token that has no route."""
    return ids_TLK[:-1] if int(ids_TLK[-1, 0, 0]) < 0 else ids_TLK


class Framework(Client):
    """ms-swift's trainer.

    Attributes:
        padding_free: ms-swift's option, True by default for Megatron: a micro-batch is one row.
        mode: ms-swift's `router_replay_mode`.
    """

    padding_free, mode, forwards = True, "R3", 2

    def make_ready(self) -> None:
        """`BaseMegatronTrainer.__init__`, base.py line 75; mcore-bridge's block and router."""
        # There is no CUDA, and swift does not ask the module of Megatron that says so.
        router_replay_utils.device_name = "cpu"
        if self.replays:
            apply_router_replay_patch()
        gpt_model.TransformerBlock = TransformerBlock  # ModelLoader._patch_transformer_block
        moe_layer.MoESubmodules.router = TopKRouter  # ModelLoader._replace_router

    def after_model(self) -> None:
        assert type(self.chunk.decoder) is TransformerBlock
        sizes = {"pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 1, **self.sizes}
        trainer = object.__new__(MegatronGRPOTrainer)
        trainer.args = SimpleNamespace(
            **sizes,
            task_type="causal_lm",
            padding_free=self.padding_free,
            context_parallel_size=1,
            cp_partition_mode="zigzag",
            attention_backend="local",
            is_multimodal=False,
            router_replay_mode=self.mode,
            num_microbatches=len(self.data.tokens),
            seq_length=LONGEST,
            micro_batch_size=2,
            global_batch_size=4,
            report_to=[],
        )
        trainer.enable_routing_replay = self.replays
        trainer.micro_batch_size, trainer.temperature, trainer.compute_entropy = 2, 1.0, False
        trainer.wrapped_models = trainer.unwrapped_models = [self.chunk]
        trainer.beta, trainer.use_teacher_api = 0.0, False
        trainer._has_teacher_explicit = trainer._is_dynamic_self_distillation = False
        trainer.template = SimpleNamespace(
            padding_free=self.padding_free, padding_side="right", data_collator=self.collate
        )
        trainer.loss_func = self.loss
        trainer._replace_data_iterator = lambda iterator: iterator
        # What is not looked at here: an optimizer, and its buffers of gradients.
        self.chunk.zero_grad_buffer = lambda: None
        trainer.optimizer = SimpleNamespace(
            zero_grad=lambda: None, step=lambda: (True, torch.zeros(1), None)
        )
        trainer.opt_param_scheduler = SimpleNamespace(step=lambda increment: None)
        self.trainer = trainer

    def without_some(self, routes: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """vLLM does not forward the last token; ms-swift then fills in expert 0, K times."""
        kept = [[one.clone() for one in each] for each in routes]
        for one in kept[0]:
            one[-1] = -1
        return kept

    def collate(self, encoded: list[dict[str, Any]], padding_to: int | None) -> dict[str, Any]:
        """As ms-swift's template: one row of all samples, or a row for each, padded."""
        rows = {
            "input_ids": [one["input_ids"] for one in encoded],
            "labels": [one["input_ids"].clone().index_fill(0, FIRST, -100) for one in encoded],
            "position_ids": [torch.arange(one["length"]) for one in encoded],
        }
        if self.padding_free:
            packed = {name: torch.cat(row).unsqueeze(0) for name, row in rows.items()}
            return {**packed, "seq_lens": [one["length"] for one in encoded]}
        fill = {"input_ids": 0, "labels": -100, "position_ids": 0}
        padded = {name: torch.full((len(encoded), LONGEST), fill[name]) for name in rows}
        for name, row in rows.items():
            for index, one in enumerate(row):
                padded[name][index, : len(one)] = one
        return padded

    def microbatches(self, routes: list[list[torch.Tensor]] | None) -> list[dict[str, Any]]:
        """Rollouts, collated, with ms-swift's log-prob pass over each: `_maybe_compute_logps`."""
        made = []
        for number, tokens in enumerate(self.data.tokens):
            samples = [
                SimpleNamespace(
                    encoded={"input_ids": tokens_T, "length": len(tokens_T)},
                    routed_experts=None if routes is None else answered(routes[number][index]),
                    is_truncated=False,
                    rollout_logprobs=None,
                )
                for index, tokens_T in enumerate(tokens)
            ]
            inputs, batch = rlhf_utils.collate_to_grpo_micro_batch(
                samples,
                self.trainer.template,
                device=torch.device("cpu"),
                router_replay_mode=self.mode if self.replays else "disabled",
            )
            given = {**inputs, "grpo_batch": batch}
            made.append(self.trainer._maybe_compute_logps(given))
        return made

    def step(self, routes: list[list[torch.Tensor]] | None, forward_only: bool) -> Any:
        """The log-prob pass, and ms-swift's `train_step` after it."""
        batches = self.microbatches(routes)
        if forward_only:
            return None
        metrics, _, _ = self.trainer.train_step(iter(batches))
        return [one["loss"] for one in metrics]

    def loss(self, log_probs: torch.Tensor, data: Any) -> Any:
        """In place of GRPO's: a weight for each position, so that each log-prob counts."""
        weights = torch.cos(torch.arange(log_probs.shape[1]))
        mask = data["grpo_batch"].completion_mask
        loss = (log_probs.masked_fill(~mask, 0) * weights).sum()
        return loss, {"loss": loss.detach()}
