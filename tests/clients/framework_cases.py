"""The cases that three frameworks, written for RouterReplay, are asked alike, and their batches.

Shape suffixes (docs/glossary.md): T.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from replay_layouts import LAYOUTS as OTHER_LAYOUTS

from proof.fidelity.tiny import EXPERTS, LAYERS, TOPK, VOCABULARY

LENGTHS = [[9, 15], [6, 12]]  # of the samples of each micro-batch
MICROBATCHES = len(LENGTHS)
LAYOUTS = {**OTHER_LAYOUTS, "CP2": (2, {"context_parallel_size": 2})}
LONGEST = 16  # what a batch with padding is padded to


@dataclass(frozen=True)
class Case:
    """A layout and the options of a model.

    Attributes:
        layout: a key of LAYOUTS.
        recompute: a key of `replay_layouts.RECOMPUTE`.
        missing: whether micro-batch 0 has rows without a route.
        options: of the TransformerConfig.
    """

    layout: str = "1"
    recompute: str = "full"
    missing: bool = False
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "1": Case(recompute="none"),
    "full": Case(),
    "moe": Case(recompute="moe"),
    "EP2": Case("EP2"),
    "TP2 SP": Case("TP2 SP"),
    "CP2": Case("CP2"),
    # the first stage has two micro-batches in flight: forward, forward, backward, backward
    "PP2": Case("PP2", "none"),
    "PP2 full": Case("PP2"),
    "dense first": Case(options={"moe_layer_freq": [0, 1, 1, 1]}),
    "MTP": Case(options={"mtp_num_layers": 1}),
    "expert bias": Case(
        options={"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    ),
    "fusion": Case(options={"moe_router_fusion": True}),
    "missing": Case(missing=True),
    "CP2 missing": Case("CP2", missing=True),
}
# as many layers of a rank replay in the cases that are not named here
REPLAYED = {"PP2": LAYERS // 2, "PP2 full": LAYERS // 2, "dense first": LAYERS - 1}


@dataclass
class Data:
    """Two micro-batches of two samples.

    Attributes:
        tokens: for each micro-batch and sample `[T]`; no token comes twice in a micro-batch, so
            that a token says which row it is.
        routes: for each micro-batch and sample int64 `[T, L, K]`, as an engine returns them. No
            live router would choose them.
    """

    tokens: list[list[torch.Tensor]] = field(default_factory=list)
    routes: list[list[torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        for lengths in LENGTHS:
            order = torch.randperm(VOCABULARY - 1, generator=generator) + 1  # 0 is padding
            self.tokens.append(list(order[: sum(lengths)].split(lengths)))
            scores = torch.rand(sum(lengths), LAYERS, EXPERTS, generator=generator)
            self.routes.append(list(scores.topk(TOPK).indices.split(lengths)))

    def rows_of(self, number: int, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of a micro-batch in the order of its routers, from the tokens `[B, S]`."""
        row_of = torch.full((VOCABULARY,), -1)
        whole_T = torch.cat(self.tokens[number])
        row_of[whole_T] = torch.arange(len(whole_T))
        return row_of[tokens].transpose(0, 1).reshape(-1)
