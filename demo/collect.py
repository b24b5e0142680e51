"""The demo's rollouts, sampled by `megatron-r3 rollouts collect`.

    python -m demo.collect --engine vllm --model DIR --out build/collected

With vllm or sglang a real server of the model is started on this machine's CPU, and stopped at the
end. With megatron the tree --megatron serves --checkpoint, which must have the model's weights.
The model is any transformers MoE directory that the engine runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from demo import megatron_server, sglang_server, task, vllm_server
from demo.installation import BUILD, ServerError
from demo.server_process import run_server

ROOT = Path(__file__).parents[1]
SERVERS = {"vllm": vllm_server, "sglang": sglang_server}
ENGINES = ("transformers", *SERVERS, "megatron")
NUM_PROMPTS, SAMPLES_PER_PROMPT = 64, 8
FIRST_PROMPT = 10_000_000  # far from the problems of the training


def collect_command(engine: str, model: Path, prompts: Path, store: Path) -> list[str]:
    """The command that collects; for a server the caller adds `--url`."""
    arguments = ["--engine", engine, "--model", model, "--prompts", prompts, "--out", store]
    arguments += ["--n", SAMPLES_PER_PROMPT, "--max-tokens", task.MAX_ANSWER]
    if engine != "megatron":  # Megatron's server has one seed for all requests
        arguments += ["--seed", 1]
    words = [sys.executable, "-m", "megatron_r3.cli", "rollouts", "collect"]
    return [*words, *map(str, arguments), "--reward", "demo.task:reward"]


def main() -> int:
    """Collect; return the status of the command, 1 without a server, 130 after ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--model", type=Path, required=True, help="a transformers directory")
    parser.add_argument("--out", type=Path, required=True, help="gets prompts.jsonl and rollouts/")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, metavar="N")
    parser.add_argument("--megatron", type=Path, help="with megatron: a patched tree")
    parser.add_argument("--checkpoint", type=Path, help="with megatron: what the server loads")
    args = parser.parse_args()
    if args.engine == "megatron" and not (args.megatron and args.checkpoint):
        parser.error("--engine megatron needs --megatron TREE and --checkpoint DIR")
    prompts, store = args.out / "prompts.jsonl", args.out / "rollouts"
    shutil.rmtree(store, ignore_errors=True)
    args.out.mkdir(parents=True, exist_ok=True)
    task.write_prompts(prompts, args.prompts, FIRST_PROMPT)
    collect = collect_command(args.engine, args.model, prompts, store)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        with ExitStack() as stack:
            if args.engine in SERVERS:
                model = args.model.resolve()
                words, environment = SERVERS[args.engine].template(model)
                values = {"model": str(model), "version": "model"}
                log = BUILD / f"{args.engine}.log"
                server = run_server(args.engine, words, values, environment, log)
                collect += ["--url", stack.enter_context(server)]
            elif args.engine == "megatron":
                server = megatron_server.serve(args.checkpoint, args.megatron)
                collect += ["--url", stack.enter_context(server)]
            else:
                env["OMP_NUM_THREADS"] = "1"  # a tiny model: threads would wait for each other
            return subprocess.run(collect, env=env, check=False).returncode
    except KeyboardInterrupt:
        return 130
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
