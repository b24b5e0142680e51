"""The demo's default sampler: transformers with a KV cache, in a process of its own.

    python -m demo.hf_sampler --model DIR --prompts prompts.jsonl --n 8 --out samples.npz

It samples at temperature 1 and records what a rollout engine records: the log-probability of every
sampled token and the experts that every forwarded token took.

Shape suffixes: B sequences, P prompt tokens, N tokens, G response tokens, T rows, L MoE layers,
V vocabulary, K top-k.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_r3.engines.conversation import EngineError, Sample, write_samples
from megatron_r3.engines.shape import ModelShape
from megatron_r3.engines.transformers import CapturedRoutes, capture_routes
from megatron_r3.routes import Routes


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue; rollouts of one group share a prompt."""

    tokens: list[int]
    group: int


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts from JSON lines `{"prompt": [ids], "group": n}`; no group: the line's number.

    Raises:
        EngineError: naming the file and the line.
    """
    prompts = []
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
            tokens = [int(token) for token in entry["prompt"]]
            prompts.append(Prompt(tokens, int(entry.get("group", number))))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise EngineError(f"{path}, line {number + 1}: not a prompt ({error})") from error
        if not tokens:
            raise EngineError(f"{path}, line {number + 1}: the prompt is empty")
    if not prompts:
        raise EngineError(f"{path}: no prompts")
    return prompts


def progress(what: str, done: int, total: int) -> None:
    """Show how far it is, on one line of stderr that is written again and again."""
    end = "\n" if done == total else ""
    print(f"\r{what}: {done}/{total}", end=end, file=sys.stderr, flush=True)


def load_model(path: str | Path) -> Any:
    """A model directory in bf16, its experts run one after the other in a fixed order."""
    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.bfloat16,
        experts_implementation="eager",
        attn_implementation="eager",
        local_files_only=True,
    )
    return model.eval()


def eos_ids(model: Any) -> tuple[int, ...]:
    """The tokens that end a response, as the model's directory says."""
    ids = model.generation_config.eos_token_id
    ids = model.config.eos_token_id if ids is None else ids
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)


def sample(
    model: Any,
    shape: ModelShape,
    prompts: Sequence[Prompt],
    n: int,
    max_new_tokens: int,
    seed: int,
    batch_size: int = 256,
    report: Callable[[int, int], None] | None = None,
) -> list[Sample]:
    """Continue every prompt `n` times; prompts of one length run together.

    Args:
        model: from `load_model`.
        shape: its MoE layers.
        prompts: what to continue.
        n: samples for each prompt.
        max_new_tokens: most tokens of a response.
        seed: the same seed, prompts and batch size give the same samples.
        batch_size: most sequences of one forward call.
        report: called with sequences done and sequences in all.

    Returns:
        Samples in the order of the prompts, the `n` of one prompt together.
    """
    vocabulary = int(model.config.vocab_size)
    for index, prompt in enumerate(prompts):
        if not 0 <= min(prompt.tokens) <= max(prompt.tokens) < vocabulary:
            raise EngineError(f"prompt {index}: token ids go from 0 to {vocabulary - 1}")
    generator = torch.Generator().manual_seed(seed)
    stop = torch.tensor(eos_ids(model), dtype=torch.long)
    found: dict[int, Sample] = {}
    order = [i for i in range(len(prompts)) for _ in range(n)]
    with capture_routes(model) as captured, torch.inference_mode():
        if captured.moe_layers != shape.moe_layers:
            raise EngineError(
                f"routers in layers {captured.moe_layers}, MoE layers {shape.moe_layers}"
            )
        for batch in _batches(order, prompts, batch_size):
            ids_BP = torch.tensor([prompts[order[slot]].tokens for slot in batch])
            made = _continue(model, captured, shape, ids_BP, max_new_tokens, stop, generator)
            for slot, one in zip(batch, made, strict=True):
                found[slot] = replace(one, group=prompts[order[slot]].group)
            if report is not None:
                report(len(found), len(order))
    return [found[slot] for slot in range(len(order))]


def _batches(order: list[int], prompts: Sequence[Prompt], batch_size: int) -> Iterable[list[int]]:
    by_length: dict[int, list[int]] = {}
    for slot, prompt in enumerate(order):
        by_length.setdefault(len(prompts[prompt].tokens), []).append(slot)
    for _, slots in sorted(by_length.items()):
        for first in range(0, len(slots), batch_size):
            yield slots[first : first + batch_size]


def _continue(
    model: Any,
    captured: CapturedRoutes,
    shape: ModelShape,
    ids_BP: Tensor,
    max_new_tokens: int,
    stop: Tensor,
    generator: torch.Generator,
) -> list[Sample]:
    """One batch. A sequence that has ended runs on until all have; what it then does is cut."""
    cache, step_BS = None, ids_BP
    tokens, logprobs, routes = [ids_BP], [], []
    ended_B = torch.zeros(len(ids_BP), dtype=torch.bool)
    length_B = torch.zeros(len(ids_BP), dtype=torch.long)
    for _ in range(max_new_tokens):
        output = model(input_ids=step_BS, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        (ids_LTK,) = captured.take()
        routes.append(ids_LTK.unflatten(1, step_BS.shape))
        logprobs_BV = torch.log_softmax(output.logits[:, -1].float(), -1)
        step_BS = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)
        tokens.append(step_BS)
        logprobs.append(logprobs_BV.gather(1, step_BS))
        length_B += ~ended_B
        ended_B |= torch.isin(step_BS[:, 0], stop)
        if bool(ended_B.all()):
            break
    return _cut(shape, ids_BP.shape[1], length_B, tokens, logprobs, routes)


def _cut(
    shape: ModelShape,
    prompt: int,
    length_B: Tensor,
    tokens: list[Tensor],
    logprobs: list[Tensor],
    routes: list[Tensor],
) -> list[Sample]:
    tokens_BN = torch.cat(tokens, 1).to(torch.int32).numpy()
    logprobs_BG = torch.cat(logprobs, 1).numpy()
    ids_LBTK = torch.cat(routes, 2).numpy()
    samples = []
    for index, length in enumerate(length_B.tolist()):
        ids_LTK = ids_LBTK[:, index, : prompt + length - 1]
        samples.append(
            Sample(
                np.copy(tokens_BN[index, : prompt + length]),
                prompt,
                np.copy(logprobs_BG[index, :length]),
                Routes.from_array(ids_LTK, shape.num_experts, where=f"sequence {index}"),
            )
        )
    return samples


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"at least 1; got {text}")
    return int(text)


def arguments(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options that every sampler of the demo takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="a transformers model directory")
    parser.add_argument("--prompts", required=True, help="JSON lines, as read_prompts takes them")
    parser.add_argument("--n", type=_positive, default=8, help="samples for each prompt")
    parser.add_argument("--max-new-tokens", type=_positive, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, help="the .npz to write")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Sample from a model directory and write the samples."""
    options = arguments("Sample with transformers", argv)
    torch.set_num_threads(1)  # the model is tiny: threads would only wait for each other
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        shape = ModelShape.from_hf_config(options.model)
        samples = sample(
            load_model(options.model),
            shape,
            read_prompts(options.prompts),
            options.n,
            options.max_new_tokens,
            options.seed,
            report=lambda done, total: progress("sampled", done, total),
        )
        version = transformers.__version__
        write_samples(options.out, samples, shape.moe_layers, "transformers", version)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
