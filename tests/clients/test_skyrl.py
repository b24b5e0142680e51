"""SkyRL's own worker, unchanged, replays through megatron_r3."""

from __future__ import annotations

import pytest
from router_replay_client import CASES, check, check_off

from fidelity.rig.worker import TreeWorker


# SkyRL has no sentinel for a row without a route: its padding rows are routes.
@pytest.mark.parametrize("case", [name for name in CASES if name != "missing"])
def test_skyrl_replays(skyrl: TreeWorker, case: str) -> None:
    check(skyrl, "skyrl", case)


@pytest.mark.parametrize("case", ["1", "full", "EP2", "PP2 full"])
def test_without_the_import_skyrl_is_as_on_the_unpatched_tree(
    skyrl: TreeWorker, skyrl_unpatched: TreeWorker, case: str
) -> None:
    check_off(skyrl, skyrl_unpatched, "skyrl", case)
