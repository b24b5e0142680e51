"""The staging code of the docs copies a store to a bucket and back without a change.

fsspec's own file system in memory stands for a bucket; torch requires fsspec, so it is there.

Shape suffixes (docs/glossary.md): N.
"""

import os

import fsspec
import numpy as np
from docs_pages import ROOT, blocks
from stored import INFO, ROLLOUTS, opened

from megatron_r3.data.store import write_shard

PAGE = ROOT / "docs" / "scale.md"


def test_the_staging_code_of_the_docs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in blocks(PAGE.read_text(), "python") if "fsspec" in block]
    code = code.replace("s3://BUCKET/rollouts", "memory://bucket/rollouts")
    bucket = fsspec.filesystem("memory")
    for number in range(2):
        path = write_shard(tmp_path / "source", INFO, ROLLOUTS[3 * number : 3 * number + 3])
        bucket.put_file(path, f"/bucket/rollouts/{path.name}")
        bucket.pipe_file("/bucket/rollouts/.shard-abc.tmp", b"half")
        exec(code, {})
    store = opened(tmp_path / "rollouts")
    assert sorted(os.listdir("rollouts")) == sorted(os.listdir("source"))
    assert len(store) == len(ROLLOUTS)
    for number, rollout in enumerate(ROLLOUTS):
        assert np.array_equal(store.fields(number)["tokens"], rollout.tokens_N)
    before = os.stat("rollouts/shard-00000.safetensors")
    exec(code, {})
    assert os.stat("rollouts/shard-00000.safetensors") == before
