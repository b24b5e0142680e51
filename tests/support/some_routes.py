"""Routes, scores and a router's question for tests of a micro-batch, without a model.

Shape suffixes (docs/glossary.md): E, T.
"""

import torch

T, E, K = 6, 8, 3


def scores(seed=0):
    return torch.randn(T, E, generator=torch.Generator().manual_seed(seed))


def live(scores_TE):
    return lambda: torch.topk(scores_TE, K, dim=1)


def some_routes(seed=1):
    return scores(seed).topk(K, dim=1).indices.to(torch.uint8)


def chosen(microbatch, scores_TE, layer=1):
    return microbatch.topk(layer, scores_TE, K, live(scores_TE))[1].sort(dim=1).values
