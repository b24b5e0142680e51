"""NeMo-RL's own Megatron training code on this rank: `megatron_forward_backward`, and its replay.

Real are all modules of NeMo-RL that are imported here, with these exceptions:

- `nemo_rl.models.generation` is a package without its `__init__`, which imports vLLM's worker.
- `nemo_rl.utils.logger` is empty, because it imports MLflow, Weights & Biases and SwanLab.
- `megatron.bridge`, which needs Transformer Engine, has the names that are imported. They are
  types of annotations, and a function for models that split context parallelism themselves.
- transformers says that it is 5.11 while `nemo_rl.models.policy` is imported, which refuses later
  ones for a tokenizer's sake.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
import transformers
from framework_cases import LONGEST
from router_replay_client import Client


def _empty(name: str, path: list[str] | None = None, **names: Any) -> None:
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = path or []
    vars(module).update(names)


_nemo_rl = importlib.util.find_spec("nemo_rl")
assert _nemo_rl is not None
assert _nemo_rl.origin is not None
_models = Path(_nemo_rl.origin).parent / "models"
_empty("nemo_rl.models.generation", [str(_models / "generation")])
_empty("nemo_rl.utils.logger", Logger=object)
for _name in ("", ".models", ".training", ".training.utils"):
    _empty(f"megatron.bridge{_name}")
_empty("megatron.bridge.models.model_provider", ModelProviderMixin=object)
_empty("megatron.bridge.training.config", ConfigContainer=object)
_empty("megatron.bridge.training.state", GlobalState=object)
_empty(
    "megatron.bridge.training.utils.packed_seq_utils",
    get_packed_seq_cp_partition_indices=NotImplemented,
)
_version, transformers.__version__ = transformers.__version__, "5.11.0"
import nemo_rl.models.policy  # noqa: E402, F401

transformers.__version__ = _version

from nemo_rl.algorithms.loss.loss_functions import NLLLossFn  # noqa: E402
from nemo_rl.distributed.batched_data_dict import BatchedDataDict  # noqa: E402
from nemo_rl.models.megatron import data, router_replay, train  # noqa: E402

CONFIG: dict[str, Any] = {
    "sequence_packing": {"enabled": False},  # True with context parallelism, which needs it
    "router_replay": {"enabled": True},
    "generation": {"backend": "vllm"},
    "megatron_cfg": {"enabled": True},
}


class Framework(Client):
    """NeMo-RL's policy worker; the order of calls is that of megatron_policy_worker.py."""

    def make_ready(self) -> None:
        """`validate_and_set_config` of setup.py, line 596; it patches upstream's class."""
        if self.replays:
            router_replay.validate_router_replay_config(CONFIG)

    def set_replay(self, config: Any) -> None:
        """setup.py, line 1023."""
        config.moe_enable_routing_replay = router_replay.router_replay_enabled(CONFIG)

    def microbatches(self, routes: list[list[torch.Tensor]] | None) -> list[Any]:
        """Padded on the right, as NeMo-RL's batches are."""
        made = []
        for number, samples in enumerate(self.data.tokens):
            shape = (len(samples), LONGEST)
            ids, mask = torch.zeros(shape).long(), torch.zeros(shape)
            for index, tokens_T in enumerate(samples):
                ids[index, : len(tokens_T)] = tokens_T
                mask[index, : len(tokens_T)] = torch.cos(torch.arange(len(tokens_T)))
            batch = BatchedDataDict(
                {
                    "input_ids": ids,
                    "input_lengths": torch.tensor([len(tokens_T) for tokens_T in samples]),
                    "token_mask": mask,
                    "sample_mask": torch.ones(len(samples)),
                }
            )
            if routes is not None:
                like = routes[number][0]
                batch["routed_experts"] = torch.zeros(*shape, *like.shape[1:]).short()
                for index, ids_TLK in enumerate(routes[number]):
                    batch["routed_experts"][index, : len(ids_TLK)] = ids_TLK.short()
            made.append(batch)
        return made

    def step(self, routes: list[list[torch.Tensor]] | None, forward_only: bool) -> Any:
        """`train` or `get_logprobs` of the worker, lines 1492 to 1516 and 1879 to 1893."""
        batches, is_packed = self.microbatches(routes), self.case.layout == "CP2"
        config = {**CONFIG, "sequence_packing": {"enabled": is_packed}}
        processed = data.make_processed_microbatch_iterator(
            iter(batches),
            config,
            seq_length_key="input_lengths" if is_packed else None,
            pad_individual_seqs_to_multiple_of=4 if is_packed else 1,
            pad_packed_seq_to_multiple_of=1,
            straggler_timer=None,
            pad_full_seq_to=None,
        )
        after = (
            train.LogprobsPostProcessor(config)
            if forward_only
            else train.LossPostProcessor(NLLLossFn(), config, num_microbatches=len(batches))
        )
        results = train.megatron_forward_backward(
            model=self.chunk,
            data_iterator=processed,
            num_microbatches=len(batches),
            seq_length=LONGEST,
            mbs=2,
            post_processing_fn=after,
            forward_only=forward_only,
            global_valid_seqs=torch.tensor(4),
            global_valid_toks=torch.tensor(42),
            use_router_replay=routes is not None,
            router_replay_train=routes is not None and not forward_only,
        )
        return None if forward_only else [one["loss"] for one in results]
