"""What several unit tests share."""

import hypothesis
import pytest
import torch
from patching_upstream import make_upstream
from stored import INFO, ROLLOUTS

from megatron_r3.data.store import write_shard

# An example may wait for a core: how long one takes says nothing about what is tested.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture
def one_thread():
    """Tiny matrices: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def store_dir(tmp_path):
    write_shard(tmp_path / "s", INFO, ROLLOUTS[:2])
    write_shard(tmp_path / "s", INFO, ROLLOUTS[2:])
    return tmp_path / "s"


@pytest.fixture
def upstream(tmp_path):
    """The tiny upstream that every test of patches may break."""
    return make_upstream(tmp_path)


@pytest.fixture
def _one_rank():
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()
