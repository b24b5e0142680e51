"""ms-swift's own GRPO trainer, unchanged, replays through megatron_r3."""

from __future__ import annotations

import pytest
from router_replay_client import CASES, check, check_off

from fidelity.rig.worker import TreeWorker


@pytest.mark.parametrize("case", [name for name in CASES if name != "missing"])
def test_ms_swift_replays(ms_swift: TreeWorker, case: str) -> None:
    check(ms_swift, "ms_swift", case)


@pytest.mark.parametrize("case", ["1", "full", "EP2", "PP2 full"])
def test_without_the_import_ms_swift_is_as_on_the_unpatched_tree(
    ms_swift: TreeWorker, ms_swift_unpatched: TreeWorker, case: str
) -> None:
    check_off(ms_swift, ms_swift_unpatched, "ms_swift", case)
