"""The record of the old policy: written by some ranks, read by others, and removed when unneeded.

Shape suffixes (docs/glossary.md): K, T.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_r3.data.store.schema import StoreError
from megatron_r3.train.old_policy import OldPolicy, collection_folder, remove_unneeded

ABOUT = {"order": "single", "rollouts": "0 to 3"}


def recorded(rows_T: list[int], layer: int = 3, collection: int = 2) -> OldPolicy:
    """What a rank found for its rows: the log-prob of row r is -r / 10, its route (r, r + 1)."""
    policy = OldPolicy()
    policy.begin(collection)
    rows = torch.tensor(rows_T)
    policy.add_logprobs(rows[None], -rows[None] / 10)
    policy.add_routes(rows, {layer: torch.stack([rows, rows + 1], 1).to(torch.int16)})
    policy.finish()
    return policy


def written(folder: Path, number: str = "a") -> Path:
    """The record of two ranks, which share the row 4, and have padding."""
    recorded([7, 4, -1, 5]).write(folder, 0, ABOUT, number)
    recorded([-1, 4, 6]).write(folder, 1, ABOUT, number)
    return folder


def test_values_are_found_by_row_and_padding_is_zero() -> None:
    policy = recorded([7, 4, -1, 5])
    got = policy.logprobs(torch.tensor([[5, -1], [4, 7]]))
    assert torch.equal(got, torch.tensor([[-0.5, 0.0], [-0.4, -0.7]]))
    ids_TK = policy.routes(3, np.array([7, -1, 5]))
    assert ids_TK.tolist() == [[7, 8], [0, 0], [5, 6]]
    with pytest.raises(AssertionError, match=r"no old log-probs of row \[6\]"):
        policy.logprobs(torch.tensor([[6]]))


def test_other_ranks_read_what_they_need(tmp_path: Path) -> None:
    policy = OldPolicy()
    policy.read(written(tmp_path), 2, np.array([4, 6]), [3], ABOUT, "a")
    assert torch.equal(policy.logprobs(torch.tensor([[6, 4]])), torch.tensor([[-0.6, -0.4]]))
    assert policy.routes(3, np.array([6])).tolist() == [[6, 7]]
    policy.wait_for(2)  # returns at once


def test_files_of_another_pass_are_left_alone(tmp_path: Path) -> None:
    """They are of an earlier training with more ranks: the same rollouts, other weights."""
    folder = written(tmp_path)
    stale = OldPolicy()
    stale.begin(2)
    stale.add_logprobs(torch.tensor([[4, 5]]), torch.tensor([[-9.0, -9.0]]))
    stale.finish()
    stale.write(folder, 2, ABOUT, "b")
    policy = OldPolicy()
    policy.read(folder, 2, np.array([4, 5]), [3], ABOUT, "a")
    assert torch.equal(policy.logprobs(torch.tensor([[4, 5]])), torch.tensor([[-0.4, -0.5]]))
    policy.read(folder, 2, np.array([4, 5]), [], ABOUT, "b")  # control: the number decides
    assert policy.logprobs(torch.tensor([[4]])).item() == -9.0


def test_a_record_that_is_not_the_checkpoints_is_refused(tmp_path: Path) -> None:
    rows = np.array([4, 5, 6, 7])

    def read(folder: Path, rows: np.ndarray = rows, number: str = "a", **about: str) -> None:
        OldPolicy().read(folder, 2, rows, [3], ABOUT | about, number)

    with pytest.raises(StoreError, match="has no record of the old policy"):
        read(tmp_path / "none")
    folder = written(tmp_path / "whole")
    read(folder)
    with pytest.raises(StoreError, match="has no record of the old policy"):
        read(folder, number="b")
    with pytest.raises(StoreError, match='order "single" there, "packs" here'):
        read(folder, order="packs")
    with pytest.raises(StoreError, match="1 of 5 tokens have no log-probs here"):
        read(folder, np.array([*rows, 8]))
    with pytest.raises(StoreError, match="4 of 4 tokens have no routes of layer 5 here"):
        OldPolicy().read(folder, 2, rows, [3, 5], ABOUT, "a")
    recorded([6]).write(folder, 1, ABOUT, "b")  # rank 1 of another training, from other weights
    read(folder, np.array([4, 5, 7]))  # rank 0 has these
    with pytest.raises(StoreError, match="1 of 4 tokens have no log-probs here"):
        read(folder)
    file = folder / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(StoreError, match=r"rank-00000\.safetensors: cannot be read"):
        read(folder)


def test_a_record_stays_while_a_checkpoint_needs_it(tmp_path: Path) -> None:
    """4 steps a collection: 6 lies in that of 4, 8 begins one, 13 lies in that of 12."""
    elsewhere = tmp_path / "saved" / "non_persistent"
    for folder, iteration in ((tmp_path / "saved", 6), (tmp_path / "saved", 8), (elsewhere, 13)):
        (folder / f"iter_{iteration:07d}").mkdir(parents=True)
    for began_at in (0, 4, 8, 12, 16):
        collection_folder(tmp_path / "saved", began_at).mkdir(parents=True)

    def left() -> list[str]:
        return sorted(path.name[-2:] for path in (tmp_path / "saved" / "old-policy").iterdir())

    both = (str(tmp_path / "saved"), str(elsewhere))
    remove_unneeded(tmp_path / "saved", both, 16, 4)
    assert left() == ["04", "12", "16"]
    remove_unneeded(tmp_path / "saved", both[:1], 16, 4)  # control: one directory not looked at
    assert left() == ["04", "16"]
