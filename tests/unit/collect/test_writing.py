"""What a shelf writes: whole groups, and none of a group that lost a sample if so asked."""

import pytest
from stored import INFO, make_rollout

from megatron_r3.collect.prompts import Prompt
from megatron_r3.collect.writing import Shelf
from megatron_r3.data.store import RolloutStore


def groups(tmp_path, whole_groups, lost):
    """The (group, sample) pairs that are stored of two groups of two, where one sample is lost."""
    prompts = [Prompt(f"prompt {group}", group, [1, 2], {}) for group in range(2)]
    shelf = Shelf(tmp_path / "store", INFO, prompts, 2, whole_groups=whole_groups)
    shelf.expect([0, 0, 1, 1])
    for group in range(2):
        for sample in range(2):
            one = make_rollout(6, group=group, sample=sample)
            shelf.take(group, [] if (group, sample) == lost else [one])
    shelf.store()
    store = RolloutStore([tmp_path / "store"])
    return [(r.group, r.sample) for r in map(store.rollout, range(len(store)))]


@pytest.mark.parametrize("lost", [(0, 0), (0, 1)])
def test_a_group_that_lost_a_sample_is_left_out_if_so_asked(tmp_path, lost):
    assert groups(tmp_path, True, lost) == [(1, 0), (1, 1)]


def test_else_what_is_there_is_stored(tmp_path):
    assert groups(tmp_path, False, (0, 1)) == [(0, 0), (1, 0), (1, 1)]
