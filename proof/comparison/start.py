"""The starting policy of all runs, made once, and the Megatron arguments of its shape and training.

A policy that has learnt from some wrong labels gives wrong answers too. A few more steps on right
labels make most of its answers right. If a sampler adds noise to the routers of this policy, few
answers are right: such mistakes come from the routing, and there replay can matter.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from demo import process
from megatron_r3.cpu import CPU_ARGS
from proof.comparison.task import SEQ_LENGTH, VOCAB_SIZE

ROOT = Path(__file__).parents[2]
MODEL = f"""
--num-layers 4 --hidden-size 32 --num-attention-heads 4
--group-query-attention --num-query-groups 4 --kv-channels 8 --qk-layernorm
--ffn-hidden-size 64 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
--position-embedding-type rope --rotary-base 10000 --untie-embeddings-and-output-weights
--num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 32
--moe-token-dispatcher-type alltoall --attention-dropout 0 --hidden-dropout 0
--seq-length {SEQ_LENGTH} --max-position-embeddings 32
--tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 8
--clip-grad 1.0 --weight-decay 0 --eval-iters 0 --eval-interval 1000
--num-workers 0 --log-interval 1 --ckpt-format torch_dist
""".split()
_TRAIN = """
--micro-batch-size 64 --global-batch-size 64 --lr-decay-style linear --adam-beta2 0.98
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --save-interval 100000
--seed 1234
""".split()
# first on labels of which 12 % are wrong, then on right ones
_LEARN = (
    "--wrong-labels 0.12 --train-iters 400 --lr 3e-3 --min-lr 3e-4 --lr-warmup-iters 40".split()
)
_SHARPEN = "--wrong-labels 0 --train-iters 60 --lr 2e-3 --min-lr 1e-4 --lr-warmup-iters 10".split()


def make(out: Path, megatron: Path) -> None:
    """Train and export the policy, unless `out` is there.

    Args:
        out: the folder, with Megatron's `checkpoint`, and a transformers directory for each dtype
            of a sampler: `bfloat16`, and `float32` without weights. A run takes the config from
            one of these directories, and the weights from what the trainer publishes.
        megatron: a patched tree.

    Raises:
        demo.process.Failed: a training or the export failed; the message has the end of the log.
    """
    if out.exists():
        print(f"starting policy: {out} is there", flush=True)
        return
    # `out` gets its name last, so it never has half of a policy
    new = out.with_name(f"{out.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    learnt, checkpoint = str(new / "learnt"), str(new / "checkpoint")
    again = ["--load", learnt, "--finetune", "--no-load-optim", "--no-load-rng"]
    export = ["--micro-batch-size", "1", "--load", checkpoint, "--hf-export", str(new / "bfloat16")]
    steps = {
        "learn": ("proof/comparison/task.py", [*_TRAIN, *_LEARN, "--save", learnt]),
        "sharpen": ("proof/comparison/task.py", [*_TRAIN, *_SHARPEN, *again, "--save", checkpoint]),
        "export": ("megatron_r3/weights/hf.py", export),
    }
    env = {"PYTHONPATH": f"{megatron}:{ROOT}", "OMP_NUM_THREADS": "1"}
    for name, (script, more) in steps.items():
        log = new / "logs" / f"{name}.log"
        print(f"starting policy: {name}, log {log}", flush=True)
        command = [sys.executable, "-m", "megatron_r3.cpu", str(ROOT / script)]
        process.run([*command, *CPU_ARGS, *MODEL, *more], log, env, lambda line: None)
    (new / "float32").mkdir()
    config = json.loads((new / "bfloat16" / "config.json").read_text())
    (new / "float32" / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    new.rename(out)
