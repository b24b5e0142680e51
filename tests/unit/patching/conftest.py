"""The tiny upstream that every test of patching may break."""

import pytest
from patching_upstream import make_upstream


@pytest.fixture
def upstream(tmp_path):
    return make_upstream(tmp_path)
