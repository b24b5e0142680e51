"""The routes of a micro-batch on the host are those of the source, whoever made its arrays.

Shape suffixes (docs/glossary.md): K, L, T.
"""

import numpy as np
import pytest
import torch

from megatron_r3.replay.host_routes import RouteArrays, read_routes


class OwnArrays:
    """A source that writes its ids into no memory of others."""

    def __init__(self, source):
        self.info, self._source = source.info, source

    def routes(self, rows_T, layers, into_LTK=None):
        return self._source.routes(rows_T, layers)


@pytest.fixture
def full_of_99(monkeypatch):
    """New memory of torch has 99 in each byte, and not zeros by chance."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(99))


@pytest.mark.parametrize("experts", [8, 300])
@pytest.mark.parametrize("kind", [lambda source: source, OwnArrays])
def test_every_id_is_that_of_the_source(full_of_99, experts, kind):
    rng = np.random.default_rng(0)
    ids_LTK = rng.permuted(np.tile(np.arange(experts), (2, 5, 1)), axis=2)[..., :2]
    recorded_T = np.array([True, True, False, True, True])
    source = kind(RouteArrays(ids_LTK, experts, [0, 3], recorded_T))
    rows_T = torch.tensor([4, -1, 0, 2])
    found = read_routes(source, rows_T, [4, 1], None)
    assert found.ids_LTK[:, [0, 2]].tolist() == ids_LTK[[1, 0]][:, [4, 0]].tolist()
    assert found.ids_LTK[:, 1].tolist() == [[0, 1], [0, 1]]  # padding has experts of its own
    assert found.padding_T.tolist() == [False, True, False, False]
    assert found.live_T.tolist() == [False, False, False, True]


@pytest.mark.parametrize(("experts", "dtype"), [(8, np.int64), (300, np.uint8)])
def test_ids_of_another_type_are_refused(experts, dtype):
    """In a byte 300 would be 44."""
    source = OwnArrays(RouteArrays(np.array([[[0, 1]]]), experts, [0]))
    read_routes(source, torch.tensor([0]), [1], None)
    own = source.routes
    source.routes = lambda *given: (own(*given)[0].astype(dtype), own(*given)[1])
    with pytest.raises(ValueError, match=f"OwnArrays.routes: ids are {np.dtype(dtype)}; those of"):
        read_routes(source, torch.tensor([0]), [1], None)


def test_padding_alone_needs_no_rows():
    source = RouteArrays(np.zeros((1, 0, 2), int), 4, [0])
    found = read_routes(source, torch.tensor([-1, -1]), [1], None)
    assert found.padding_T.all()
    assert found.ids_LTK.tolist() == [[[0, 1], [2, 3]]]
