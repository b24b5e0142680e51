"""SkyRL's own worker, unchanged, replays through megatron_r3.

Shape suffixes (docs/glossary.md): E, T.
"""

from __future__ import annotations

import pytest
import torch
from framework_cases import CASES, Data
from router_replay_client import by_itself, check, check_off, step_dropped_in

from proof.fidelity.rig.worker import TreeWorker


# SkyRL has no sentinel for a row without a route: its padding rows are routes.
@pytest.mark.parametrize("case", [name for name in CASES if "missing" not in name])
def test_skyrl_replays(skyrl: TreeWorker, case: str) -> None:
    check(skyrl, "skyrl", case)


@pytest.mark.parametrize("case", ["1", "full", "EP2", "PP2 full"])
def test_without_the_import_skyrl_is_as_on_the_unpatched_tree(skyrl, skyrl_unpatched, case):
    check_off(skyrl, skyrl_unpatched, "skyrl", case)


def test_without_packing_skyrl_replays_the_routes_of_other_tokens(skyrl: TreeWorker) -> None:
    """SkyRL's own, pinned here: with upstream's class and with the import alike.

    With `remove_microbatch_padding=False` a micro-batch is [B, S]; `_split_replay_indices` flattens
    its routes sample by sample, and Megatron's routers see it token by token:

        routes   sample 0 token 0, sample 0 token 1, ...
        tokens   sample 0 token 0, sample 1 token 0, ...
    """
    given = ("skyrl", CASES["full"])
    ours, theirs = (
        skyrl.run(what, 1, *given, remove_padding=False)[0] for what in (step_dropped_in, by_itself)
    )
    assert len(ours.maps) == len(theirs.maps) == 16
    assert ours.wrong(Data().routes) == theirs.wrong(Data().routes) == 16
    for our, their in zip(ours.maps, theirs.maps, strict=True):
        assert torch.equal(our.map_TE, their.map_TE)
