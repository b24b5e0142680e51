"""Megatron's own RL loop on the CPU: with its engine and a toy agent, or on made-up rollouts.

`python -m proof.fidelity.rl_loop FOLDER TREE/train_rl.py ARGS...`, with TREE on PYTHONPATH, runs
the script as it is, with the agent of `rl_toy_agent.py`. The loop needs, beside torch: einops,
xxhash, pyzmq, msgpack, quart, hypercorn, openai, orjson, h2, fastapi, uvicorn and pydantic.

`on_given` runs the same script in the ranks of a worker, on made-up rollouts with random routes.
Megatron is imported only inside the functions that ranks run.

Shape suffixes (docs/glossary.md): K, L, M, T.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proof.fidelity.gradients import Piece, collect
from proof.fidelity.rl_stand_in import admit_loop, stand_in

LETTERS = "etaoinshrdlucmfw "
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
EXPERTS, TOPK, LAYERS, SEQ_LENGTH = 8, 2, 4, 64
GROUPS, GROUP_SIZE = 2, 4

MODEL = f"""
--num-layers {LAYERS} --hidden-size 32 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --ffn-hidden-size 64 --normalization RMSNorm --swiglu --disable-bias-linear
--position-embedding-type rope --untie-embeddings-and-output-weights
--num-experts {EXPERTS} --moe-router-topk {TOPK} --moe-ffn-hidden-size 16
--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none
--attention-dropout 0 --hidden-dropout 0 --calculate-per-token-loss --init-method-std 0.1
--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --vocab-size 32
--make-vocab-size-divisible-by 16 --tokenizer-type HuggingFaceTokenizer --seed 1234
--inference-max-seq-length {SEQ_LENGTH} --inference-max-requests 8
--inference-dynamic-batching-buffer-size-gb 0.02 --inference-dynamic-batching-block-size 16
--perform-rl-step --rl-skip-bos-token --grpo-group-size {GROUP_SIZE} --grpo-kl-beta 0.1
--grpo-prompts-per-step {GROUPS} --grpo-iterations 1 --grpo-entropy-term-weight 0.01
--grpo-clamp-eps-lower 0.2 --grpo-clamp-eps-upper 0.2
--global-batch-size {GROUPS * GROUP_SIZE} --micro-batch-size 1 --mock-data
--no-create-attention-mask-in-dataloader --eval-interval 1000 --eval-iters 0
--optimizer adam --lr 1e-3 --lr-decay-style constant --weight-decay 0 --clip-grad 0
--log-interval 1 --finetune --no-load-optim --ckpt-format torch_dist
""".split()


def make_tokenizer(folder: Path) -> Path:
    """Save a tokenizer of a few letters; the ids of pad and end are above 0, as the loop needs."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<pad>", "<eos>", *LETTERS]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return folder


# -- the loop on made-up rollouts


@dataclass
class Turns:
    """A made-up rollout: each list has an item for each turn."""

    tokens: list[list[int]] = field(default_factory=list)
    masks: list[list[bool]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    routes: list[Any] = field(default_factory=list)


def sent(ids_TLK: np.ndarray) -> list[Any]:
    """Routes in the form in which Megatron's engine sends them."""
    data = base64.b64encode(ids_TLK.astype(np.int16).tobytes()).decode()
    return ["ndarray", {"data": data, "dtype": "int16", "shape": list(ids_TLK.shape)}]


def made_up(seed: int = 0, chained: bool = False) -> list[list[Turns]]:
    """Groups of rollouts with one or two turns. Routes are random, so no router would choose them.

    Args:
        chained: whether a second turn begins with the first one, as in a conversation.
    """
    draw = np.random.default_rng(seed)
    groups = []
    for _ in range(GROUPS):
        group = []
        for _ in range(GROUP_SIZE):
            turns = Turns()
            for _ in range(int(draw.integers(1, 3))):
                prompt, response = draw.integers(3, 6), draw.integers(5, 14)
                tokens = draw.integers(3, 3 + len(LETTERS), prompt + response).tolist()
                before = turns.tokens[-1] if chained and turns.tokens else []
                tokens = [*before, *tokens[:-1], 2]  # 2 is the end of document
                turns.tokens.append(tokens)
                turns.masks.append([False] * (len(before) + prompt) + [True] * response)
                turns.logprobs.append((-draw.random(response) - 1.0).tolist())
                shape = (len(tokens) - 1, LAYERS, EXPERTS)
                turns.routes.append(sent(draw.random(shape).argsort(-1)[..., :TOPK]))
            group.append(turns)
        groups.append(group)
    return groups


def _as_rollouts(groups: list[list[Turns]], without: int) -> list[Any]:
    """The groups as objects of the loop's own classes; the first `without` rollouts lack routes."""
    from megatron.rl.agent.api import RolloutGroup, TokenRollout

    made, number = [], 0
    for group in groups:
        rollouts = []
        for turns in group:
            epochs = [[(0, 0)] for _ in turns.tokens]
            rollouts.append(
                TokenRollout(
                    trajectory=turns.tokens,
                    reward=float(number % 3),
                    generation_mask=turns.masks,
                    logprobs=turns.logprobs,
                    env_id="toy",
                    problem_id=str(number),
                    policy_epoch=epochs,
                    kv_cache_epoch=epochs,
                    num_evictions=[0 for _ in turns.tokens],
                    completion_ids=[f"{number}.{turn}" for turn in range(len(turns.tokens))],
                    routes=turns.routes if number >= without else [None for _ in turns.tokens],
                )
            )
            number += 1
        made.append(RolloutGroup(rollouts=rollouts))
    return made


def _as_loop_has_them(groups: list[list[Turns]], without: int) -> Any:
    """What `get_environment_rollouts` returns: rollouts, and on main also a record of each turn."""
    rollouts = _as_rollouts(groups, without)
    try:
        from megatron.core.inference.inference_request import FinishedRequestRecord
    except ImportError:  # 0.19 has no such records
        return rollouts
    names = [name for group in rollouts for one in group for name in one.completion_ids]
    return rollouts, {name: FinishedRequestRecord([(0, 0)], [(0, 0)], 0) for name in names}


@dataclass
class Seen:
    """What one rank saw of a training.

    Attributes:
        losses: what each step reported, by name; an empty dict on a rank without the last stage.
        pieces: this rank's pieces of the gradients of each step.
        dispatched: for each pass, what the witness counted: pairs that arrived as recorded, and all
            pairs.
        logprobs: the results of the old-policy and reference passes, in their order.
    """

    losses: list[dict[str, float]] = field(default_factory=list)
    pieces: list[list[Piece]] = field(default_factory=list)
    dispatched: dict[str, list[int]] = field(default_factory=dict)
    logprobs: list[np.ndarray] = field(default_factory=list)


def corrupt(how: str, turns: Any) -> None:
    """Give the routes of a collection (`TurnRoutes`) to other rows, layers or turns.

    Args:
        how: "shift": by one token; "layers": swap the first two; "turns": swap two turns that
            the loop packs into one bin; "": no change.
    """
    ids_LTK, first = turns.ids_LTK, turns.first_M.tolist()
    if how == "shift":
        ids_LTK[:] = np.roll(ids_LTK, 1, axis=1)
    elif how == "layers":
        ids_LTK[[0, 1]] = ids_LTK[[1, 0]]
    elif how == "turns":
        a, b = first[1], first[3]
        size = min(first[2] - a, first[4] - b)
        swapped = ids_LTK[:, b : b + size].copy(), ids_LTK[:, a : a + size].copy()
        ids_LTK[:, a : a + size], ids_LTK[:, b : b + size] = swapped
    elif how:
        raise ValueError(how)


def on_given(
    rank: int,
    tree: str,
    argv: list[str],
    how: str = "",
    without: int = 0,
    seed: int = 0,
    chained: bool = False,
) -> Seen:
    """Run train_rl.py of a tree on `made_up` rollouts, instead of rollouts of an engine.

    Args:
        how: see `corrupt`.
        without: how many rollouts, the first ones, have no routes.
        seed, chained: see `made_up`.
    """
    from megatron.training import training

    rl_utils = admit_loop()
    seen, groups = Seen(), made_up(seed, chained)
    rl_utils.get_environment_rollouts = lambda *_: _as_loop_has_them(groups, without)
    rl_utils.rl_inference_interface_shutdown = lambda: None
    _let_fp32_train()
    _watch_replay(seen, how)
    train_step, compute = training.train_step, rl_utils.compute_logprobs_batch

    def step(forward_step: Any, data: Any, model: Any, *more: Any, **named: Any) -> Any:
        result = train_step(forward_step, data, model, *more, **named)
        seen.losses.append({name: float(value) for name, value in result[0].items()})
        gradients = {id(p): p.main_grad.clone() for m in model for p in m.parameters()}
        seen.pieces.append(collect(model, gradients))
        return result

    def logprobs(*args: Any, **named: Any) -> Any:
        result = compute(*args, **named)
        seen.logprobs.append(result.float().numpy().copy())
        return result

    training.train_step, rl_utils.compute_logprobs_batch = step, logprobs
    _run_script(Path(tree) / "train_rl.py", argv)
    return seen


def _run_script(script: Path, argv: list[str]) -> None:
    """Run a script as the main program.

    With runpy, the processes that the loop spawns would import the script again, without the
    stand-ins of `rl_stand_in.py`.
    """
    sys.argv = [str(script), *argv]
    sys.path.insert(0, str(script.resolve().parent))
    exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})


def _let_fp32_train() -> None:
    """Let the loop train in float32, where the results of layouts differ by rounding alone.

    The loop passes `fp32_output`, an argument that only the wrapper of 16-bit models takes.
    """
    from megatron.core.models.gpt import GPTModel

    forward = GPTModel.forward
    GPTModel.forward = lambda self, *args, fp32_output=None, **named: forward(self, *args, **named)


def _watch_replay(seen: Seen, how: str) -> None:
    """Keep what the witness counts in each pass, and `corrupt` the routes after they were read."""
    from megatron_r3.rl import rl_loop

    count, routes = rl_loop.LoopReplay.add_dispatched, rl_loop.TurnRoutes

    def add_dispatched(self: Any, matched: int, total: int) -> None:
        sums = seen.dispatched.setdefault(self._pass, [0, 0])
        sums[0] += matched
        sums[1] += total
        count(self, matched, total)

    class Changed(routes):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            corrupt(how, self)

    rl_loop.LoopReplay.add_dispatched = add_dispatched  # type: ignore[method-assign]
    rl_loop.TurnRoutes = Changed  # type: ignore[misc]


# -- the loop with its engine


def run(folder: Path, script: Path, argv: list[str]) -> None:
    """Run train_rl.py with its engine and a toy agent. The script ends the process."""
    from megatron.rl.agent.registry import AGENT_REGISTRY

    AGENT_REGISTRY["ToyAgent"] = "proof.fidelity.rl_toy_agent:ToyAgent"
    config = folder / "toy.yaml"
    config.write_text("- agent_type: ToyAgent\n  agent_args: {}\n  weight: 1.0\n")
    asyncio.set_event_loop(asyncio.new_event_loop())
    _run_script(script, [*argv, "--langrl-env-config", str(config)])


if __name__ == "__main__":
    from megatron_r3.cpu import install
    from megatron_r3.cpu.__main__ import describe_one_process

    stand_in()
    describe_one_process()
    torch.set_num_threads(1)
    install()
    run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
