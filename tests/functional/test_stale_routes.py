"""Rollouts of an old policy take other routes than their own: --moe-router-replay-max-lag.

What each router did is compared, token by token, with the store, with its own live choice, and with
what it did in the pass of the old policy.

Shape suffixes (docs/glossary.md): E, K, L, T.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training import Policy, parts, steps_on, train

from megatron_r3.data.store import RolloutStore, write_shard

STEPS = 2
TWO = ["--rollouts-old-policy", "trainer", "--rollouts-mini-steps", str(STEPS)]


@dataclass
class Forward:
    """One forward pass over a micro-batch.

    Attributes:
        updates: whether it belongs to an update; else to the pass of the old policy.
        rows_T: row ids, in the order of the router.
        maps: for each layer number the routing map `[T, E]`, and that of its live choice.
    """

    updates: bool
    rows_T: np.ndarray
    maps: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


def forwards(rank: int, argv: list[str]) -> list[Forward]:
    """Train, and keep what each router did."""
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_r3.train import collection_pass, step

    seen: list[Forward] = []
    run_forward, route = step.run_forward, TopKRouter.forward

    def run(forward: Any, batch: Any, host: Any, microbatch: Any) -> Any:
        rows_T = host["rows"].transpose(0, 1).reshape(-1).numpy()
        seen.append(Forward(torch.is_grad_enabled(), rows_T))
        return run_forward(forward, batch, host, microbatch)

    def keep(self: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        result = route(self, hidden, *args, **kwargs)
        with torch.no_grad():
            logits_TE = self.gating(hidden).reshape(result[1].shape)
        best = logits_TE.topk(self.topk, dim=1).indices
        live_TE = torch.zeros_like(result[1]).scatter(1, best, True)
        seen[-1].maps[self.layer_number] = (result[1].detach().numpy(), live_TE.numpy())
        return result

    step.run_forward = collection_pass.run_forward = run
    TopKRouter.forward = keep
    train(rank, argv)
    return seen


def store_of_two_policies(policy: Policy, folder: Path) -> Path:
    """Pairs of rollouts of policy version 0 and of version 1 in turn, with rewards 0 and 1."""
    info, shards = parts(policy)
    rollouts = [
        replace(rollout, policy_version=i // 2 % 2, reward=i % 2)
        for shard in shards
        for i, rollout in enumerate(shard)
    ]
    write_shard(folder / "store", replace(info, router_fingerprint=()), rollouts)
    return folder / "store"


@pytest.mark.parametrize("other", ["live", "old-policy"])
def test_stale_rollouts_take_other_routes(patched, policy, tmp_path, other):
    path, log = store_of_two_policies(policy, tmp_path), tmp_path / "log.jsonl"
    store = RolloutStore([path])
    argv = steps_on(policy, path, STEPS, *TWO, "--rollouts-log", str(log))
    argv += ["--moe-router-replay-stale-source", other, "--moe-router-replay-max-lag"]
    (seen,) = patched.run(forwards, 1, [*argv, "0"], timeout_s=120)
    taken, differs = compare(store, seen, other)
    assert taken["rollout"] > 100
    assert taken[other] > 100
    assert differs["rollout"], "the live router would have done as the store says"
    assert differs[other], "the stale tokens would have done so without the option"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        assert line["routes dispatched as recorded"] == 1
        assert line["update/policy lag max"] == 1
        assert "router mismatch" in line
    # in its second step the trainer has moved away from the rollouts, which is no fault of theirs
    assert ["router mismatch/alarms" in line for line in lines] == [True, False]
    shares = [[line[f"update/routes {n}"] for n in NAMES] for line in lines]
    tokens = sum(taken.values())
    mean = np.mean(shares, axis=0)  # of two steps with about as many tokens
    assert mean == pytest.approx([taken[n] / tokens for n in NAMES.values()], abs=0.05)
    assert all(0 < share[0] < 1 and sum(share) == pytest.approx(1) for share in shares)

    # control: no rollout is more than one version old
    log.unlink()
    (fresh,) = patched.run(forwards, 1, [*argv, "1"], timeout_s=120)
    with pytest.raises(AssertionError, match=r"row .* layer"):
        compare(store, fresh, other)
    assert all(
        json.loads(line)["update/routes from rollout"] == 1 for line in log.read_text().splitlines()
    )


NAMES = {"from rollout": "rollout", "from old policy": "old-policy", "live": "live"}


def compare(
    store: RolloutStore, seen: list[Forward], other: str
) -> tuple[dict[str, int], dict[str, int]]:
    """Check each token of the old policy's pass, where stale ones are live, and of the updates.

    Returns:
        Of the updates: for each source, how many tokens took its routes, and how many (token,
        layer) pairs of them would have taken other ones: of the live router or, where they are
        live, of their rollout.
    """
    passed = {
        (layer, row): map_TE[token]
        for one in seen
        if not one.updates
        for layer, (map_TE, _) in one.maps.items()
        for token, row in enumerate(one.rows_T.tolist())
    }
    rollouts = [store.rollout(index) for index in range(len(store))]
    taken, differs = dict.fromkeys(NAMES.values(), 0), dict.fromkeys(NAMES.values(), 0)
    for one in seen:
        for token, row in enumerate(one.rows_T.tolist()):
            if row < 0:
                continue
            index, at = store.locate(row)
            is_fresh = rollouts[index].policy_version == 1
            source = "rollout" if is_fresh else other if one.updates else "live"
            taken[source] += int(one.updates)
            for number, (layer, (map_TE, live_TE)) in enumerate(sorted(one.maps.items())):
                of_store_E = np.zeros(map_TE.shape[1], bool)
                of_store_E[rollouts[index].routes.ids_LTK[number, at]] = True
                want_E = {
                    "rollout": of_store_E,
                    "live": live_TE[token],
                    "old-policy": passed[layer, row],
                }[source]
                assert (map_TE[token] == want_E).all(), f"row {row}, layer {layer}"
                without_E = of_store_E if source == "live" else live_TE[token]
                differs[source] += int(one.updates and (want_E != without_E).any())
    return taken, differs
