"""The starting policy of all runs, made once, and the Megatron arguments of its shape and training.

A policy that has learnt from wrong labels is unsure of itself. A few more steps on right ones make
it sharp: it is right in most answers, and a sampler that routes with noise is right in few. Then
what the sampler gets wrong comes from its routing, which is where replay can matter.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

from demo import process
from megatron_r3.cpu import CPU_ARGS
from proof.comparison.task import SEQ_LENGTH, VOCAB_SIZE

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
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
LEARN = "--wrong-labels 0.12 --train-iters 400 --lr 3e-3 --min-lr 3e-4 --lr-warmup-iters 40".split()
SHARPEN = "--wrong-labels 0 --train-iters 60 --lr 2e-3 --min-lr 1e-4 --lr-warmup-iters 10".split()
# what all arms share; --seed is that of the run
UPDATE = """
--micro-batch-size 32 --global-batch-size 32 --rollouts-mini-steps 2 --lr 4e-4
--lr-decay-style constant --calculate-per-token-loss --moe-router-load-balancing-type none
--rollouts-old-policy trainer --moe-router-replay-log-mismatch-interval 1
""".split()
DTYPES = ("bfloat16", "float32")


class StartingPolicy:
    """The files of the starting policy.

    Args:
        out: the folder that has them, or will have them.
        megatron: a patched tree.

    Attributes:
        checkpoint: Megatron's.
    """

    def __init__(self, out: Path, megatron: Path) -> None:
        self.out, self.megatron = out, megatron
        self.checkpoint = out / "checkpoint"

    def hf(self, dtype: str) -> Path:
        """The transformers directory whose dtype all policies of a run take over."""
        return self.out / f"hf-{dtype}"

    def make(self, learn: list[str] = LEARN, sharpen: list[str] = SHARPEN) -> None:
        """Train and export the policy, if it is not there as these arguments and sources make it.

        Args:
            learn, sharpen: arguments of the two trainings; without any there is no second one.

        Raises:
            demo.process.Failed: a training or the export failed; with the end of its log.
        """
        stamp, digest = self.out / "done", self._digest(learn, sharpen)
        if stamp.exists() and stamp.read_text() == digest:
            print(f"starting policy: {self.out} is there", flush=True)
            return
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)
        script, save = HERE / "pretrain.py", ["--save", str(self.checkpoint)]
        if sharpen:
            learnt = str(self.out / "learnt")
            self._megatron("learn", script, [*_TRAIN, *learn, "--save", learnt])
            begin = ["--load", learnt, "--finetune", "--no-load-optim", "--no-load-rng"]
            self._megatron("sharpen", script, [*_TRAIN, *sharpen, *begin, *save])
        else:
            self._megatron("learn", script, [*_TRAIN, *learn, *save])
        export = ["--micro-batch-size", "1", "--load", str(self.checkpoint), "--hf-export"]
        bf16, float32 = map(self.hf, DTYPES)
        script = ROOT / "megatron_r3" / "weights" / "hf.py"
        self._megatron("export", script, [*export, str(bf16)])
        _with_dtype(bf16, float32, "float32")
        stamp.write_text(digest)

    def _megatron(self, name: str, script: Path, more: list[str]) -> None:
        log = self.out / "logs" / f"{name}.log"
        print(f"starting policy: {name}, log {log}", flush=True)
        command = [sys.executable, "-m", "megatron_r3.cpu", str(script), *CPU_ARGS, *MODEL, *more]
        env = {"PYTHONPATH": f"{self.megatron}:{ROOT}", "OMP_NUM_THREADS": "1"}
        process.run(command, log, env, lambda line: None)

    def _digest(self, learn: list[str], sharpen: list[str]) -> str:
        sources = [(HERE / name).read_text() for name in ("task.py", "pretrain.py")]
        text = json.dumps([*CPU_ARGS, *MODEL, *_TRAIN, *learn, *sharpen, *sources])
        return hashlib.sha256(text.encode()).hexdigest()


def _with_dtype(source: Path, target: Path, dtype: str) -> None:
    """Copy a transformers directory without its weights, with another dtype in its config.

    The loop takes config and tokenizer from it; the weights of all policies, also of policy 0, are
    those that the trainer publishes.
    """
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n")
