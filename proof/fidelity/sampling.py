"""Sample with Megatron's own inference engine in the ranks of a worker, and return the experts.

The engine is the real one; FlashAttention has a stand-in (megatron_r3/cpu/inference.py). Megatron
is imported only inside the functions that ranks run.

Shape suffixes (docs/glossary.md): G, K, L, N, T.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_r3.train import launch
from proof.fidelity.models import VOCAB_SIZE

RECORD = "--moe-enable-routing-replay"
EP2 = "--expert-model-parallel-size 2"
# 24 requests, 8 at a time, with KV cache in blocks of 16 tokens: requests end at different steps,
# and a block that one request frees is used by another at once
NUM_REQUESTS, MAX_ACTIVE, BLOCK = 24, 8, 16
ENGINE: dict[str, Any] = {
    "block_size_tokens": BLOCK,
    "max_requests": MAX_ACTIVE,
    "max_sequence_length": 64,
    "buffer_size_gb": 0.02,
    "materialize_only_last_token_logits": True,
}


@dataclass(frozen=True)
class Sampled:
    """One finished request.

    Attributes:
        tokens_N: prompt and sampled tokens.
        prompt_length: how many of `tokens_N` are the prompt's.
        logprobs_G: the engine's log-probs of the sampled tokens.
        ids_TLK: the experts of every token but the last; None if the engine returned none.
        evictions: how often the request was evicted, and computed again later.
        cached: how many tokens of the prompt came from the cache of another request.
        was_chunked: whether the prompt was computed in several steps.
        stopped_at: how many tokens the request had when it was evicted or suspended; 0 if never.
    """

    tokens_N: list[int]
    prompt_length: int
    logprobs_G: list[float]
    ids_TLK: np.ndarray | None
    evictions: int
    cached: int
    was_chunked: bool
    stopped_at: int


def prompts(shared: int = 0) -> list[tuple[list[int], int]]:
    """Prompts of mixed length, each with the number of tokens to sample after it.

    Args:
        shared: how many tokens at the beginning are the same in all prompts.
    """
    numbers = np.random.default_rng(5)
    common = numbers.integers(0, VOCAB_SIZE - 1, shared).tolist()
    return [
        (
            common + numbers.integers(0, VOCAB_SIZE - 1, numbers.integers(4, 12)).tolist(),
            int(numbers.integers(8, 24)),
        )
        for _ in range(NUM_REQUESTS)
    ]


def build(argv: Sequence[str], second: bool = False) -> Any:
    """Build the model that samples; load its checkpoint if the arguments have --load.

    Args:
        second: whether another model with the same config is built first.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training.checkpointing import load_checkpoint

    sys.argv = ["sample.py", *argv]
    fields = TransformerConfig.__dataclass_fields__
    if "inference_moe_token_dispatcher_type" in fields:  # from 0.18 on
        # with EP, upstream's default dispatcher needs GPUs that are fully connected by NVLink
        sys.argv += ["--inference-moe-token-dispatcher-type", "nccl"]
    args = launch.initialize()
    others = [launch.build_model(args)] if second else []
    model = launch.build_model(args)
    # keeps the other model alive; in a list, so that it is no submodule
    model.another = others  # type: ignore[assignment]
    if args.load is not None:
        load_checkpoint([model], None, None)
    return model.eval()


def save_model(rank: int, argv: Sequence[str]) -> None:
    """Save a newly initialised model, so that all layouts load the same weights."""
    from megatron.training import get_args

    from megatron_r3.weights.checkpoint import save_whole

    save_whole([build(argv)], get_args())


def make_engine(model: Any, settings: Mapping[str, Any]) -> Any:
    """A DynamicInferenceEngine over a model.

    Args:
        settings: fields of upstream's InferenceConfig, which overrule those of `ENGINE`.
    """
    from megatron.core.inference.config import InferenceConfig
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.core.inference.engines import DynamicInferenceEngine
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
        GPTInferenceWrapper,
    )
    from megatron.core.inference.text_generation_controllers.text_generation_controller import (
        TextGenerationController,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = InferenceConfig(**{**ENGINE, "pg_collection": groups, **settings})
    context = DynamicInferenceContext(model.config, config)
    wrapped = GPTInferenceWrapper(model, context)
    tokenizer = SimpleNamespace(
        vocab_size=VOCAB_SIZE, detokenize=lambda tokens, **options: "", eod=VOCAB_SIZE - 1, bos=None
    )
    return DynamicInferenceEngine(TextGenerationController(wrapped, tokenizer), context)


def sample(
    rank: int,
    argv: Sequence[str],
    settings: Mapping[str, Any] | None = None,
    shared: int = 0,
    second: bool = False,
    suspend_at: int | None = None,
    new_weights: bool = False,
    config: Mapping[str, Any] | None = None,
) -> list[Sampled]:
    """Sample `prompts` with the engine; return the finished requests in the order of the prompts.

    Args:
        argv: Megatron's arguments.
        settings: see `make_engine`.
        shared: see `prompts`.
        second: see `build`.
        suspend_at: the step before which the engine is suspended and resumed.
        new_weights: whether the routers get other weights while the engine is suspended.
        config: fields of the model's config that are changed after the model is built.
    """
    model = build(argv, second)
    for name, value in (config or {}).items():
        setattr(model.config, name, value)
    engine = make_engine(model, settings or {})

    def suspend_and_resume() -> None:
        engine.suspend()
        for name, weight in model.named_parameters() if new_weights else ():
            if name.endswith("router.weight"):
                weight.data.neg_()
        engine.resume()

    return run(engine, prompts(shared), {suspend_at: suspend_and_resume})


def run(
    engine: Any,
    requests: Sequence[tuple[list[int], int]],
    before: Mapping[int | None, Callable[[], None]],
) -> list[Sampled]:
    """Sample all requests with an engine, greedily, so that every layout draws the same tokens.

    Args:
        before: what to call before a step, by the number of the step.
    """
    from megatron.core.inference.sampling_params import SamplingParams

    for number, (prompt, count) in enumerate(requests):
        params = SamplingParams(
            temperature=1.0,
            top_k=1,
            return_log_probs=True,
            skip_prompt_log_probs=True,
            num_tokens_to_generate=count,
            termination_id=-1,
        )
        engine.add_request(number, prompt, params)
    finished: dict[int, Sampled] = {}
    step = 0
    with torch.inference_mode():
        while engine.has_unfinished_requests():
            before.get(step, lambda: None)()
            for record in engine.step_modern()["finished_request_records"]:
                finished[record.request_id] = _sampled(record)
            step += 1
    return [finished[number] for number in range(len(requests))]


def _sampled(record: Any) -> Sampled:
    request = record.merge()
    prompt = [int(token) for token in request.prompt_tokens]
    routes = request.routing_indices
    return Sampled(
        [*prompt, *map(int, request.generated_tokens)],
        len(prompt),
        list(request.generated_log_probs),
        None if routes is None else np.asarray(routes),
        sum(event.type.name == "EVICT" for event in request.events),
        getattr(request, "num_cached_tokens", 0),  # from 0.19 on
        any(part.finished_chunk_token_count for part in record.requests),
        len(record[1].prompt_tokens) if len(record.requests) > 1 else 0,
    )


def in_training(
    rank: int, argv: Sequence[str], samples: Sequence[Sampled]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Run the training forward over the same tokens, one sample at a time.

    Args:
        argv: Megatron's arguments, with --moe-router-replay, which `recording` needs.

    Returns:
        For each sample the experts `[T, L, K]` that the routers chose for every token but the
        last, and the log-probs `[G]` of the sampled tokens.
    """
    from megatron_r3.replay.active import recording

    model = build(argv).train()
    found = []
    for one in samples:
        tokens_1T = torch.tensor([one.tokens_N[:-1]])
        places_1T = torch.arange(tokens_1T.shape[1])[None]
        with torch.no_grad(), recording() as chosen:
            logits = model(tokens_1T, places_1T, None)
        logprobs = logits[0].float().log_softmax(-1)
        sampled = torch.tensor(one.tokens_N[1:])
        logprobs_T = logprobs.gather(1, sampled[:, None])[:, 0]
        ids_TLK = torch.stack([chosen.ids[layer] for layer in sorted(chosen.ids)], dim=1)
        found.append((ids_TLK.numpy(), logprobs_T[one.prompt_length - 1 :].numpy()))
    return found


def same_experts(one_TLK: np.ndarray, other_TLK: np.ndarray) -> float:
    """The share of (token, layer) pairs whose experts are the same set."""
    equal_TL = (np.sort(one_TLK, -1) == np.sort(other_TLK, -1)).all(-1)
    return float(equal_TL.mean())
