"""Freed memory that stays is not cleared by the system again."""

import subprocess
import sys

import pytest

CODE = """
import resource, sys
import numpy as np
from megatron_r3.collect.writing import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()


def shard():
    arrays = [np.ones(1 << 20, np.uint8) for _ in range(24)]
    del arrays


for _ in range(3):
    shard()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    shard()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how):
    done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_pages_are_not_asked_for_again():
    pages = 3 * 24 * (1 << 20) // 4096
    assert faults("keep") < pages / 10
    assert faults("do not") > pages / 10
