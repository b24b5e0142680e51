"""The truth test (docs/truth.md) of some rollouts of each shard, before the shard is stored.

The rollouts are compared with transformers under the policy that sampled them. A verified push
shows that the sampler computes the policy; the truth test shows that each row of routes which the
sampler returns belongs to its token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatron_r3.collect.engine_agreement import compare_rollouts
from megatron_r3.data.engines.shape import EngineError
from megatron_r3.data.store import Rollout, StoreInfo
from megatron_r3.data.truth import examine
from megatron_r3.loop.published import PublishedPolicy, version_name


def examine_shard(
    policy: PublishedPolicy,
    number: int,
    note: Callable[..., None],
    shard: Sequence[Rollout],
    info: StoreInfo,
) -> None:
    """Make the truth test of some of a shard's rollouts, and write the event `examined`.

    Args:
        policy: the policy that sampled the shard.
        number: how many rollouts of the shard are examined.
        note: writes an event; called with the event's name and fields.
        shard: all rollouts of the shard.
        info: the store's description of the model.

    Raises:
        ValueError: the test has an alarm, or transformers failed.
    """
    some = np.unique(np.linspace(0, len(shard) - 1, min(number, len(shard))).astype(int))
    named = {f"rollout {shard[i].group}, sample {shard[i].sample}": shard[i] for i in some.tolist()}
    # With the previous policy the test can tell rows of older weights from other faults.
    previous = policy.path.parent / version_name(max(0, policy.version - 1))
    before = previous if policy.version and previous.is_dir() else None
    try:
        agreement = compare_rollouts(named, info, policy.path, before, "the shard")
    except EngineError as error:  # transformers failed here: sampling again would not help
        raise ValueError(f"the truth test of policy {policy.version}: {error}") from error
    report = examine(agreement.compared, info.moe_layers, model=f"policy {policy.version}")
    numbers = agreement.numbers(report)
    note(
        "examined",
        version=policy.version,
        rollouts=numbers["rollouts"],
        rows=numbers["rows"],
        mismatch=float(report.tables.all_rows.share),
        abs_dlogp=numbers["abs_dlogp"],
        alarms=[str(alarm) for alarm in report.alarms],
    )
    if report.alarms:
        raise ValueError(
            f"the truth test of {numbers['rollouts']} rollouts of policy {policy.version}: "
            f"{'; '.join(map(str, report.alarms))}. The shard's {len(shard)} rollouts are not "
            "stored (docs/truth.md)"
        )
