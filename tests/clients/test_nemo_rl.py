"""NeMo-RL's own training code, unchanged, replays through megatron_r3."""

from __future__ import annotations

import pytest
from framework_cases import CASES
from router_replay_client import check, check_off

from proof.fidelity.rig.worker import TreeWorker


@pytest.mark.parametrize("case", CASES)
def test_nemo_rl_replays(nemo_rl: TreeWorker, case: str) -> None:
    check(nemo_rl, "nemo_rl", case)


@pytest.mark.parametrize("case", ["1", "full", "EP2", "PP2 full"])
def test_without_the_import_nemo_rl_is_as_on_the_unpatched_tree(nemo_rl, nemo_rl_unpatched, case):
    check_off(nemo_rl, nemo_rl_unpatched, "nemo_rl", case)
