"""Rollouts that the tests of the store write."""

import numpy as np

from megatron_r3.routes import Routes
from megatron_r3.store import Rollout, RolloutStore, StoreInfo


def opened(directory):
    """A store, every byte of it checked."""
    store = RolloutStore([directory])
    store.verify()
    return store


INFO = StoreInfo(16, 4, (1, 2, 5), "vllm", "0.30.0", "tiny", ("aa", "bb", "cc"))


def make_rollout(num_tokens, seed=0, experts=16, group=0, reward=1.0):
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(experts)[:4] for _ in range(3 * (num_tokens - 1))]
    routes = Routes.from_array(np.array(rows).reshape(3, num_tokens - 1, 4), experts)
    response = np.arange(num_tokens) >= 2
    logprobs = np.where(response, -rng.random(num_tokens), 0).astype(np.float32)
    tokens = rng.integers(0, 50, num_tokens).astype(np.int32)
    return Rollout(tokens, response, logprobs, reward, group, 7, routes)


ROLLOUTS = [make_rollout(n, seed=n, group=n % 2, reward=n / 10) for n in (5, 9, 3, 12, 4)]
