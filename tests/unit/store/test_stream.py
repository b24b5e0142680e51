"""The file writer: many pieces, and systems that write less than they were asked to."""

import os

import numpy as np
import pytest
from safetensors.numpy import load_file

from megatron_r3.store import writer

PIECES = [np.arange(i % 7, dtype=np.uint8) for i in range(3000)]  # empty ones too


def written(path):
    whole = np.concatenate(PIECES)
    routes = writer.Streamed(whole.dtype, whole.shape, [PIECES[:2500], PIECES[2500:]])
    with path.open("wb", buffering=0) as file:
        written = writer.write_tensors(file, {"routes": routes}, {"crc32": "9" * 10})
        written.write_header({"crc32": str(written.crc32["routes"])})
    return load_file(path)["routes"]


def test_more_pieces_than_a_system_takes_at_once(tmp_path):
    assert len(PIECES) > os.sysconf("SC_IOV_MAX")
    assert np.array_equal(written(tmp_path / "file"), np.concatenate(PIECES))


@pytest.mark.parametrize("most", [1, 1000])
def test_a_short_write_is_gone_on_with(tmp_path, monkeypatch, most):
    def short(descriptor, pieces):
        return os.write(descriptor, b"".join(pieces)[:most])

    monkeypatch.setattr(writer.os, "writev", short)
    assert np.array_equal(written(tmp_path / "file"), np.concatenate(PIECES))
