"""SkyRL's own Megatron worker on this rank: `MegatronModelWrapper`, and its replay helpers.

Real are all modules of SkyRL that are imported here, with one exception: `skyrl.backends` is a
package without its `__init__`, which imports the Tinker server's API, whose pydantic models need
Python 3.12.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
from framework_cases import LONGEST
from router_replay_client import Client

_skyrl = importlib.util.find_spec("skyrl")
assert _skyrl is not None
assert _skyrl.origin is not None
sys.modules["skyrl.backends"] = _package = types.ModuleType("skyrl.backends")
_package.__path__ = [str(Path(_skyrl.origin).parent / "backends")]

from skyrl.backends.skyrl_train.mtp.native_loss_patch import disable_native_mtp_loss  # noqa: E402
from skyrl.backends.skyrl_train.utils import replay_utils  # noqa: E402
from skyrl.backends.skyrl_train.workers.megatron import megatron_model_wrapper  # noqa: E402
from skyrl.train.config import TrainerConfig  # noqa: E402


class Framework(Client):
    """SkyRL's worker; the order of calls is that of megatron_worker.py.

    Attributes:
        remove_padding: SkyRL's `remove_microbatch_padding`, True by default.
    """

    remove_padding = True

    def make_ready(self) -> None:
        """`init_configs` and `init_model`, lines 490 to 545 and 918 to 925."""
        if self.case.options.get("mtp_num_layers"):
            disable_native_mtp_loss()
        if self.replays:
            replay_utils.patch_topk_router_expert_bias_padding_mask()
            replay_utils.patch_topk_router_layer_number()

    def after_model(self) -> None:
        config = TrainerConfig()
        config.remove_microbatch_padding = self.remove_padding
        self.wrapper = megatron_model_wrapper.MegatronModelWrapper(config, [self.chunk])

    def microbatches(self, routes: list[list[torch.Tensor]] | None) -> list[dict[str, Any]]:
        """What `forward_backward` of the worker hands to the wrapper, lines 1040 to 1075."""
        made = []
        for number, samples in enumerate(self.data.tokens):
            shape = (len(samples), LONGEST)
            sequences, mask = torch.zeros(shape).long(), torch.zeros(shape).long()
            for index, tokens_T in enumerate(samples):  # padding is on the left
                sequences[index, -len(tokens_T) :] = tokens_T
                mask[index, -len(tokens_T) :] = 1
            positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
            indices = None
            if routes is not None:
                like = routes[number][0]
                indices = replay_utils.make_replay_padding_indices(
                    (*shape, *like.shape[1:]), dtype=torch.int16
                )
                for index, ids_TLK in enumerate(routes[number]):
                    indices[index, -len(ids_TLK) :] = ids_TLK.short()
            weights = torch.cos(torch.arange(LONGEST - 1.0)).expand(len(samples), -1)
            made.append(
                {
                    "sequences": sequences,
                    "attention_mask": mask,
                    "position_ids": positions,
                    "num_actions": LONGEST - 1,
                    "old_action_log_probs": None,
                    "base_action_log_probs": None,
                    "advantages": None,
                    "loss_mask": weights * mask[:, 1:] * mask[:, :-1],
                    "rollout_action_logprobs": None,
                    "response_mask": mask[:, 1:],
                    "rollout_expert_indices": indices,
                    "router_padding_mask": None if routes is None else mask == 0,
                    "sub_seq_lengths": None,
                    "num_microbatches": len(self.data.tokens),
                }
            )
        return made

    def step(self, routes: list[list[torch.Tensor]] | None, forward_only: bool) -> Any:
        """The log-prob pass, or an update, of the wrapper."""
        given = (self.microbatches(routes), LONGEST, 2)
        if forward_only:
            self.wrapper.forward(*given)
            return None
        metrics = self.wrapper.forward_backward_mini_batch(*given, loss_fn="cross_entropy")
        return [one["loss"] for one in metrics]
