"""Megatron's own inference server on this machine's CPU, for the time of a `with` block.

Nothing is installed: the Megatron tree that trains also samples.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from demo.installation import BUILD
from demo.model import arguments
from demo.server_process import run_server
from demo.task import EOS, NUM_DIGITS

ROOT = Path(__file__).parents[1]
# A cache block has 64 tokens, enough for any request of the demo; upstream's default is 256.
SERVER = f"""
--moe-enable-routing-replay --bf16 --micro-batch-size 1 --moe-router-load-balancing-type none
--null-tokenizer-eod-id {EOS} --host 127.0.0.1 --port {{port}}
--inference-max-seq-length 64 --inference-dynamic-batching-block-size 64
--inference-dynamic-batching-buffer-size-gb 0.05 --inference-dynamic-batching-max-requests 32
""".split()
assert NUM_DIGITS[1] * 2 + 4 < 64


@contextmanager
def serve(
    checkpoint: Path, tree: Path, build: Path = BUILD, pipeline_stages: int = 1
) -> Iterator[str]:
    """Run a server of a checkpoint while the block runs; yields its address.

    Args:
        checkpoint: a checkpoint of the demo's model.
        tree: a patched Megatron-LM of 0.19 or later.
        build: the folder of the log, megatron.log.
        pipeline_stages: the number of stages, each in a process of its own.

    Raises:
        ServerError: the server does not come up; the message has the end of its log.
    """
    script = ROOT / "megatron_r3" / "loop" / "serve.py"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr"]
    words += ["127.0.0.1", "--nproc-per-node", str(pipeline_stages)]
    words += ["-m", "megatron_r3.cpu", str(script)]
    words += arguments(SERVER, ["--load", "{checkpoint}"])
    words += ["--pipeline-model-parallel-size", str(pipeline_stages)]
    env = {"PYTHONPATH": f"{tree.resolve()}:{ROOT}", "OMP_NUM_THREADS": "1"}
    values = {"checkpoint": str(checkpoint.resolve())}
    with run_server("Megatron", words, values, env, build / "megatron.log") as url:
        yield url
