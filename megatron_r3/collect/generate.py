"""Transformers as an engine: runs the model in this process, on a GPU if there is one.

Samples that are under way at the same time, with prompts of the same length, run as one batch with
a KV cache. There is no padding, so no sample depends on the others in its batch, except
by the rounding of matrix products.

Shape suffixes (docs/glossary.md): B, N, G, L, T, K.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_r3.collect.engine import Answer, Identity, NoAnswer
from megatron_r3.collect.prompt_plan import Sampling
from megatron_r3.collect.prompts import Prompt, PromptError
from megatron_r3.collect.signals import BackgroundThread, end_tasks
from megatron_r3.data.engines.said import Said
from megatron_r3.data.engines.shape import EngineError, ModelShape
from megatron_r3.data.engines.transformers import capture_routes
from megatron_r3.data.kept import KeptSets
from megatron_r3.data.rollout import UNKNOWN_POLICY, UNREWARDED, Rollout
from megatron_r3.replay.routes import Routes
from megatron_r3.replay.words import one_line

try:
    import transformers
except ImportError as missing:  # an optional dependency: the other engines do not need it
    raise ValueError(
        f"running a model needs transformers: pip install 'transformers>=5' ({missing})"
    ) from missing

# A batch begins after so many seconds without a new request. After a batch the workers send their
# next requests one by one, as rewards are computed: without the wait the first one would run alone.
_GATHER_S = 0.01
# Seconds that `close` waits for the token that is being computed. A process that ends while another
# thread is inside torch may crash.
_CLOSE_S = 10.0


@dataclass
class SampleRequest:
    """A request for one sample.

    Attributes:
        ids: the prompt's token ids.
        seed: the sample's seed; None takes one from the system's randomness.
        where: the sample's name in errors.
    """

    ids: list[int]
    seed: int | None
    where: str


class Transformers:
    """Samples with the model of a transformers directory, as an `engine.Engine`.

    Args:
        directory: has config, weights and, for prompts that are texts or chats, a tokenizer.
        shape: the MoE layers that the directory's config names.
        sampling: how to sample.

    Attributes:
        model, device: the transformers model, and the device that holds it.

    Raises:
        EngineError: transformers cannot load the model or its tokenizer, or the model has routers
            in other layers than `shape`.
    """

    name = "transformers"

    def __init__(self, directory: Path, shape: ModelShape, sampling: Sampling) -> None:
        self.sampling, self._directory, self._shape = sampling, directory, shape
        self.model = load_model(directory).to("cuda" if torch.cuda.is_available() else "cpu")
        self._tokenizer = _load_tokenizer(directory)
        self.device = self.model.get_input_embeddings().weight.device
        self._stop_ids = torch.tensor(stop_ids(self.model), dtype=torch.int64, device=self.device)
        self._hooks = ExitStack()
        self._captured = self._hooks.enter_context(capture_routes(self.model))
        if self._captured.moe_layers != shape.moe_layers:
            raise EngineError(
                f"{directory}: transformers has routers in layers "
                f"{list(self._captured.moe_layers)}; config.json says {list(shape.moe_layers)}"
            )
        self._thread = BackgroundThread("generate")
        # by prompt length, each request with the future that gets its answer
        self._waiting: defaultdict[int, list[tuple[SampleRequest, asyncio.Future[Answer]]]]
        self._waiting = defaultdict(list)
        self._batches: asyncio.Task[None] | None = None
        self._closing = False

    def check(self, prompt: Prompt) -> None:
        """See `Engine.check`."""
        if not self._ids(prompt):
            raise PromptError(f"{prompt.where}: the tokenizer makes no token of the prompt")

    async def begin(self, on_retry: Callable[[], None]) -> Identity:
        """See `Engine.begin`."""
        return Identity(version=transformers.__version__)

    async def confirm(self) -> None:
        """See `Engine.confirm`. This asks nothing: the model in memory does not change."""

    async def sample(self, prompt: Prompt, seed: int | None, where: str) -> Answer:
        """See `Engine.sample`. The request waits for others, to run in a batch with them."""
        ids, future = self._ids(prompt), asyncio.get_running_loop().create_future()
        self._waiting[len(ids)].append((SampleRequest(ids, seed, where), future))
        if self._batches is None or self._batches.done():
            self._batches = asyncio.ensure_future(self._run_batches())
        answer: Answer = await future
        return answer

    async def close(self) -> None:
        """See `Engine.close`. The batch under way ends after its current token."""
        self._closing = True
        if self._batches is not None:
            await end_tasks([self._batches])
        self._thread.close(_CLOSE_S)
        self._hooks.close()

    def _ids(self, prompt: Prompt) -> list[int]:
        if prompt.tokens is not None:
            return prompt.tokens
        if self._tokenizer is None:
            raise PromptError(
                f"{prompt.where}: {self._directory} has no tokenizer; give `prompt` as token ids"
            )
        content = prompt.content
        try:
            if prompt.is_chat:
                content = self._tokenizer.apply_chat_template(
                    content, tokenize=False, add_generation_prompt=True
                )
            # A chat template has put the special tokens into the text.
            ids = self._tokenizer(content, add_special_tokens=not prompt.is_chat)["input_ids"]
        except Exception as error:  # a chat template is a program, and may raise anything
            reason = one_line(f"{type(error).__name__}: {error}", 300)
            raise PromptError(
                f"{prompt.where}: the tokenizer refuses the prompt: {reason}"
            ) from error
        return [int(token) for token in ids]

    async def _run_batches(self) -> None:
        """Run batches until no request waits; prompts of the most frequent length come first."""
        while any(self._waiting.values()):
            number = -1
            while number != (number := sum(map(len, self._waiting.values()))):
                await asyncio.sleep(_GATHER_S)
            length = max(self._waiting, key=lambda n: len(self._waiting[n]))
            # The requests of workers that were cancelled are left out.
            batch = [
                (one, future) for one, future in self._waiting.pop(length) if not future.done()
            ]
            if not batch:
                continue
            answers: list[Answer | NoAnswer] = []
            try:
                answers += await self._thread.run(self.answers, [one for one, _ in batch])
            except Exception as error:  # too little memory, or a model that computes NaN
                reason = f"transformers failed: {type(error).__name__}: {error}"
                answers = [NoAnswer(one_line(reason, 300)) for _ in batch]
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():
                    continue
                if isinstance(answer, NoAnswer):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    def answers(self, batch: list[SampleRequest]) -> list[Answer]:
        """Continue prompts of one length, all at once; `_run_batches` calls this in a thread.

        With seeds, the same batch has the same answers, bit for bit, on the same machine.

        Raises:
            EngineError: the model computed what no rollout can hold, for example NaN; or `close`
                was called.
        """
        ids_BN = torch.tensor([request.ids for request in batch], device=self.device)
        tokens_BN, logprobs_BG, ids_LBTK, kept_B = self._continue(
            ids_BN, _draws(batch, self.sampling)
        )
        return [
            self._answer(request, tokens_BN[i], logprobs_BG[i], ids_LBTK[:, i], kept_B[i])
            for i, request in enumerate(batch)
        ]

    def _answer(
        self,
        request: SampleRequest,
        tokens_N: np.ndarray,
        logprobs_G: np.ndarray,
        ids_LTK: np.ndarray,
        kept: list[np.ndarray],
    ) -> Answer:
        """One sequence that `_continue` returned, as a rollout, a text and a finish reason."""
        length = len(request.ids)
        ended = np.isin(tokens_N[length:], self._stop_ids.cpu().numpy())
        # A sequence gets tokens until its whole batch ends: those after its own end are cut off.
        sampled = int(ended.argmax()) + 1 if ended.any() else len(ended)
        logprobs_N = np.zeros(length + sampled, np.float32)
        logprobs_N[length:] = logprobs_G[:sampled]
        # N tokens have N - 1 rows: the last token's row, computed if the batch ran on, is cut off.
        rows_LTK = ids_LTK[:, : length + sampled - 1]
        rollout = Rollout(
            tokens_N[: length + sampled].copy(),
            np.arange(length + sampled) >= length,
            logprobs_N,
            reward=UNREWARDED,
            group=0,
            policy_version=UNKNOWN_POLICY,
            routes=Routes.from_array(rows_LTK, self._shape.num_experts, where=request.where),
            kept=KeptSets.from_lists([*([[]] * length), *kept[:sampled]])
            if self.sampling.wants_kept
            else None,
        )
        if wrong := rollout.wrong_parts():
            raise EngineError(f"{request.where}: {wrong}")
        message = {}
        if self._tokenizer is not None:
            said = rollout.tokens_N[length:].tolist()
            message["content"] = self._tokenizer.decode(said, skip_special_tokens=True)
        return Answer(rollout, Said(message, "stop" if ended.any() else "length"))

    @torch.inference_mode()
    def _continue(
        self, prompt_BN: Tensor, draws_BG: Tensor
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[list[np.ndarray]]]:
        """Sample until every sequence has a token that ends it, or `max_tokens` tokens.

        Args:
            prompt_BN: int64 token ids.
            draws_BG: float64 numbers in [0, 1), one for each token (`_choose`).

        Returns:
            Tokens [B, N] int32, prompts included; log-probs [B, G] float32, at temperature 1 over
            the whole vocabulary unless those of the processed distribution are asked for; expert
            ids [L, B, T, K] of all forwarded tokens; for each sequence the kept ids of each sampled
            token, or [] unless they are asked for.
        """
        cache, step_BN = None, prompt_BN
        tokens, logprobs, routes = [prompt_BN], [], []
        kept_B: list[list[np.ndarray]] = [[] for _ in prompt_BN]
        ended_B = torch.zeros(len(prompt_BN), dtype=torch.bool, device=self.device)
        self._captured.take()  # drop the routes that a failed batch has left
        for draw_B in draws_BG.to(self.device).unbind(1):
            if self._closing:
                raise EngineError("the collection ends")
            # The first step forwards the whole prompt, and only the last row of logits is needed.
            # Later steps forward one token: the cache has the keys and values of the tokens before.
            output = self.model(
                input_ids=step_BN, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            cache = output.past_key_values
            (ids_LTK,) = self._captured.take()  # T counts the tokens of all sequences
            routes.append(ids_LTK.unflatten(1, step_BN.shape).cpu())
            logits = output.logits[:, -1].float()
            processed = _processed(logits, self.sampling)
            chosen_B = _choose(processed, self.sampling, draw_B)
            step_BN = chosen_B[:, None]
            tokens.append(step_BN)
            of = processed if self.sampling.logprobs_of == "processed" else logits
            logprobs.append(torch.log_softmax(of, -1).gather(1, step_BN).float())
            if self.sampling.wants_kept:
                for row, kept in zip(processed.isfinite().cpu().numpy(), kept_B, strict=True):
                    kept.append(np.flatnonzero(row))
            ended_B |= torch.isin(chosen_B, self._stop_ids)
            if bool(ended_B.all()):
                break
        return (
            torch.cat(tokens, 1).to(torch.int32).cpu().numpy(),
            torch.cat(logprobs, 1).cpu().numpy(),
            torch.cat(routes, 2).numpy(),
            kept_B,
        )


def _draws(batch: list[SampleRequest], sampling: Sampling) -> Tensor:
    """The random numbers of each sample, float64 [B, G], made from the sample's seed alone.

    So a sample draws the same numbers in any batch, and again after a resume. A sample without a
    seed gets other numbers each time.
    """
    draws = []
    for request in batch:
        generator = torch.Generator()
        if request.seed is None:
            generator.seed()
        else:
            generator.manual_seed(request.seed)
        draws.append(torch.rand(sampling.max_tokens, generator=generator, dtype=torch.float64))
    return torch.stack(draws)


def _processed(logits: Tensor, sampling: Sampling) -> Tensor:
    """The logits to sample from: divided by the temperature, -inf for tokens that are cut off.

    At temperature 0 the logits stay as they are, because the likeliest token is taken (`_choose`).

    Args:
        logits: float32 [B, vocabulary].

    Returns:
        float64 [B, vocabulary], so that sums over a large vocabulary are rounded less.
    """
    if sampling.temperature == 0:
        return logits.double()
    logits = logits / sampling.temperature
    if sampling.top_k and sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    logits = logits.double()
    if sampling.top_p < 1:
        ordered, order = torch.softmax(logits, -1).sort(-1, descending=True)
        # Cut a token if the likelier tokens already sum to top_p; the likeliest one always stays.
        cut = ordered.cumsum(-1) - ordered >= sampling.top_p
        cut[:, 0] = False
        logits = logits.masked_fill(cut.scatter(-1, order, cut), float("-inf"))
    return logits


def _choose(processed: Tensor, sampling: Sampling, draw_B: Tensor) -> Tensor:
    """The token of each sequence, int64 [B], by the inverse of the cumulative distribution.

    Example: probabilities .2 .5 .3 have the sums .2 .7 1; a draw of .6 takes the token 1, because
    .7 is the first sum above .6. A token of probability 0 has the same sum as the token before, so
    its sum is never the first one above a draw.

    Args:
        processed: what `_processed` returns for the logits of each sequence.
    """
    if sampling.temperature == 0:
        return processed.argmax(-1)
    sums = torch.softmax(processed, -1).cumsum(-1)
    total = sums[:, -1:]
    # Rounded probabilities do not sum to exactly 1, so the draw is multiplied by their total. The
    # product may be rounded up to the total, and no sum is above the total.
    target = torch.minimum(draw_B[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, target, right=True)[:, 0]


def load_model(directory: Path, kind: str | None = "eager") -> Any:
    """Load a model on the CPU, in the dtype of its config.

    Args:
        kind: how attention and experts are computed. "eager" runs the experts one after the other
            in a fixed order; other kinds may compute one sample differently in two batches. None
            leaves the choice to transformers.

    Raises:
        EngineError: transformers cannot load the model, or the directory lacks weights.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype="auto",
            experts_implementation=kind,
            attn_implementation=kind,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # a wrong config or wrong weights raise errors of any kind
        reason = one_line(f"{type(error).__name__}: {error}", 300)
        raise EngineError(f"{directory}: transformers cannot load it: {reason}") from error
    for kind, what in (("missing_keys", "lacks"), ("mismatched_keys", "has another shape of")):
        if names := sorted(map(str, loaded[kind])):  # transformers fills these with random weights
            raise EngineError(f"{directory}: it {what} {names[0]} (such tensors: {len(names)})")
    return model.eval()


def stop_ids(model: Any) -> list[int]:
    """The tokens that end a response; empty if neither generation config nor config names one."""
    ids = model.generation_config.eos_token_id
    ids = model.config.eos_token_id if ids is None else ids
    if ids is None:
        return []
    return list(ids) if isinstance(ids, (list, tuple)) else [ids]


def _load_tokenizer(directory: Path) -> Any:
    """The tokenizer, or None if the directory has none."""
    if not (directory / "tokenizer_config.json").exists():
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # damaged files raise errors of any kind
        reason = one_line(f"{type(error).__name__}: {error}", 300)
        raise EngineError(f"{directory}: its tokenizer cannot be loaded: {reason}") from error
