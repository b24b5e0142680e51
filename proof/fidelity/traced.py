"""Compare the files of Megatron's own router tracer with the routes of a store.

    torchrun ... pretrain_gpt.py ARGUMENTS --rollouts STORE --moe-routing-trace-path TRACE
    python -m proof.fidelity.traced ARGUMENTS --rollouts STORE --moe-routing-trace-path TRACE

The tracer writes a file for each rank. Each line is a call of a router, with the experts of each
token, but without the tokens. This program works the tokens out from the arguments of the training,
without Megatron, and without the code by which replay itself finds the tokens of a rank.

Shape suffixes (docs/glossary.md): B, D, J, K, L, S, T.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from megatron_r3.data.store import RolloutStore
from megatron_r3.train.dataset import PackedRollouts, RolloutDataset
from megatron_r3.train.options import document_multiple
from megatron_r3.train.schedule import Schedule, UseOfRollouts

# by step and layer: the ids [T, K] of each call
Calls = defaultdict[int, defaultdict[int, list[np.ndarray]]]
NOT_SAID = "the tracer's files do not say which tokens each call had"


@dataclass
class Counts:
    """Counts of (token, layer) pairs.

    Attributes:
        equal, differ: traced pairs whose experts are those of the store, and pairs with others.
        untraced: pairs that have a recorded route in the store, and that no rank traced.
        first: describes the first pair that differs.
    """

    equal: int = 0
    differ: int = 0
    untraced: int = 0
    first: str = ""

    def __str__(self) -> str:
        of_first = f"; the first that differs: {self.first}" if self.first else ""
        return (
            f"{self.equal + self.differ} pairs of a token and a layer: {self.equal} equal, "
            f"{self.differ} differ, {self.untraced} more were not traced{of_first}"
        )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="proof.fidelity.traced", allow_abbrev=False,
        description="Takes the arguments of the training; those that it does not need are ignored.",
    )  # fmt: skip
    add = parser.add_argument
    add("--moe-routing-trace-path", dest="trace", type=Path, required=True, metavar="TRACE")
    add("--rollouts", nargs="+", required=True, metavar="STORE")
    for name in ("seq-length", "micro-batch-size"):
        add(f"--{name}", type=int, required=True)
    for name, short in (("tensor-model", "tp"), ("context", "cp"), ("pipeline-model", "pp")):
        add(f"--{name}-parallel-size", type=int, default=1, dest=short)
    for name in ("global-batch-size", "rollouts-shuffle"):
        add(f"--{name}", type=int)
    for name in ("rollouts-mini-steps", "rollouts-epochs"):
        add(f"--{name}", type=int, default=1)
    for name in ("sequence-parallel", "rollouts-pack"):
        add(f"--{name}", action="store_true")
    args, others = parser.parse_known_args(argv)
    for option in others:
        if "virtual" in option or option == "--use-tp-pp-dp-mapping":
            parser.error(f"{option}: {NOT_SAID} then; trace a layout without this option")
    return args


class Layout:
    """Works out which tokens of the store each call of a router had.

    Args:
        args: the arguments of the training.
        ranks: how many ranks the training had.
    """

    def __init__(self, args: argparse.Namespace, ranks: int) -> None:
        self.tp, self.cp, self.pp = args.tp, args.cp, args.pp
        self.sp = args.tp if args.sequence_parallel else 1
        self.dp, rest = divmod(ranks, self.tp * self.cp * self.pp)
        if rest or not self.dp:
            raise ValueError(
                f"{args.trace}: files of {ranks} ranks; TP {self.tp}, CP {self.cp} and PP "
                f"{self.pp} need a multiple of {self.tp * self.cp * self.pp}: give the arguments "
                "of the training, and the files of all ranks"
            )
        self.micro, self.ranks = args.micro_batch_size, ranks
        self.batch = args.global_batch_size or self.micro * self.dp
        self.micro_batches = self.batch // (self.micro * self.dp)
        steps = (args.rollouts_mini_steps, args.rollouts_epochs)
        use = UseOfRollouts(args.seq_length, Schedule(self.batch, *steps, args.rollouts_shuffle))
        self.store = RolloutStore(args.rollouts, mixed_policies=True)
        self.samples = (
            PackedRollouts(self.store, use, align=document_multiple(self.cp))
            if args.rollouts_pack
            else RolloutDataset(self.store, use)
        )

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank: ranks are numbered by TP, then CP, then DP, then PP."""
        return rank // (self.tp * self.cp * self.dp)

    def rows(self, rank: int, step: int, micro_batch: int) -> np.ndarray:
        """The row ids of a call's tokens, in the order of the router, `[T]`; -1 is padding.

        Megatron gives each data-parallel rank its part of the next samples. The part is split along
        the sequence, for context and then for sequence parallelism, and flattened position by
        position.
        """
        cp_rank = rank // self.tp % self.cp
        dp_rank = rank // (self.tp * self.cp) % self.dp
        first = step * self.batch + (micro_batch * self.dp + dp_rank) * self.micro
        rows_BS = np.stack([self._cut(first + i, cp_rank) for i in range(self.micro)])
        sp_rank = rank % self.tp if self.sp > 1 else 0
        return np.split(rows_BS, self.sp, axis=1)[sp_rank].T.reshape(-1)

    def _cut(self, sample: int, cp_rank: int) -> np.ndarray:
        """A context-parallel rank's rows of a sample: 2 of the 2 * CP pieces of each document."""
        fields = self.samples[sample]
        rows_S = fields["rows"].numpy()
        if self.cp == 1:
            return rows_S
        bounds_D = fields["cu_seqlens"].tolist() if "cu_seqlens" in fields else [0, len(rows_S)]
        parts = []
        for document in np.split(rows_S, bounds_D[1:-1]):
            pieces = np.split(document, 2 * self.cp)
            parts += [pieces[cp_rank], pieces[-1 - cp_rank]]
        return np.concatenate(parts)

    def order(self, rank: int, calls: int) -> list[int]:
        """The micro-batch of each call of a layer in a step, without and with recompute.

        With recompute each micro-batch has two calls. The list is empty if the number of calls fits
        neither. Example: 3 micro-batches on the first of two stages, recomputed: 0 1 0 2 1 2. The
        second 0 is the backward pass of micro-batch 0; before that pass, stage 0 has run the
        forward pass of micro-batch 1.
        """
        forward = [*range(self.micro_batches)]
        if calls != 2 * len(forward):
            return forward if calls == len(forward) else []
        ahead = min(self.pp - 1 - self.stage(rank), len(forward))
        order = forward[:ahead]
        for backward in forward:
            order += [*forward[ahead + backward : ahead + backward + 1], backward]
        return order


def read_trace(folder: Path) -> list[Calls]:
    """The calls of each rank, in the order of the ranks.

    Raises:
        ValueError: a file is missing, or the tracer did not write it; the message names the file.
    """
    files = [*folder.glob("router_trace_rank*.jsonl")]
    if not files:
        raise ValueError(
            f"{folder}: no router_trace_rank*.jsonl: train with --moe-routing-trace-path {folder}"
        )
    ranks: list[Calls] = []
    for rank in range(len(files)):
        file = folder / f"router_trace_rank{rank}.jsonl"
        ranks.append(defaultdict(lambda: defaultdict(list)))
        try:
            for call in map(json.loads, file.read_text().splitlines()):
                if call["block"] == "decoder":  # a store has no routes of MTP layers
                    ids_TK = np.sort(np.array(call["top_indices"]), axis=1)
                    ranks[rank][call["step"]][call["layer"]].append(ids_TK)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file}: missing, or not written by the router tracer ({error!r})"
            ) from error
    return ranks


def compare(argv: list[str] | None = None) -> Counts:
    """Compare each traced (token, layer) pair with the store; with recompute, in each pass.

    Raises:
        ValueError: the files are not those of a training with these arguments.
    """
    args = _parse(argv)
    ranks = read_trace(args.trace)
    layout, counts = Layout(args, len(ranks)), Counts()
    store, steps = layout.store, sorted({step for calls in ranks for step in calls})
    stages = _layers_of_stages(layout, ranks)
    seen_LT = np.zeros((len(store.info.moe_layers), store.row_ids(len(store) - 1)[-1] + 1), bool)
    used_T = np.zeros(seen_LT.shape[1], bool)
    for rank, step in product(range(len(ranks)), steps):
        rows_JT = [layout.rows(rank, step, number) for number in range(layout.micro_batches)]
        for rows_T in rows_JT:
            used_T[rows_T[rows_T >= 0]] = True
        for local, layer in stages[layout.stage(rank)].items():
            calls, where = ranks[rank][step][local], f"rank {rank}, step {step}, layer {local}"
            order = layout.order(rank, len(calls))
            if not order or any(len(ids) != len(rows_JT[0]) for ids in calls):
                raise ValueError(
                    f"{args.trace}: {where}: {len(calls)} calls, {layout.micro_batches} "
                    f"micro-batches of {len(rows_JT[0])} tokens: {NOT_SAID}. Give the arguments of "
                    "the training, which has no evaluation and no pass of an old policy"
                )
            for ids_TK, micro_batch in zip(calls, order, strict=True):
                rows_T = rows_JT[micro_batch]
                seen_LT[layer, _count(counts, store, layer, rows_T, ids_TK, where)] = True
    recorded_T = store.routes(np.arange(len(used_T)), [0])[1]
    counts.untraced = int((~seen_LT & used_T & recorded_T).sum())
    return counts


def _layers_of_stages(layout: Layout, ranks: list[Calls]) -> list[dict[int, int]]:
    """For each pipeline stage, a map from the tracer's layer numbers to layers of the store.

    The tracer numbers the layers of each stage from 0. In the order of these numbers, the layers of
    a stage are the store's next layers after those of the stage before.
    """
    stages: list[dict[int, int]] = []
    begin, wanted = 0, len(layout.store.info.moe_layers)
    for stage in range(layout.pp):
        ours = [ranks[rank] for rank in range(layout.ranks) if layout.stage(rank) == stage]
        local = sorted({layer for calls in ours for step in calls.values() for layer in step})
        stages.append({layer: begin + index for index, layer in enumerate(local)})
        begin += len(local)
    if begin != wanted:
        raise ValueError(
            f"the trace has {begin} MoE layers, the rollouts have routes of {wanted}: give the "
            "arguments of the training that wrote the trace, and its store"
        )
    return stages


def _count(
    counts: Counts,
    store: RolloutStore,
    layer: int,
    rows_T: np.ndarray,
    ids_TK: np.ndarray,
    where: str,
) -> np.ndarray:
    """Count the pairs of a call; return the row ids of its tokens with a recorded route."""
    (stored_TK,), recorded_T = store.routes(rows_T, [layer])
    stored_TK, recorded_rows_T = np.sort(stored_TK[recorded_T], axis=1), rows_T[recorded_T]
    traced_TK = ids_TK[recorded_T]
    differs_T = (traced_TK != stored_TK).any(axis=1)
    counts.differ += int(differs_T.sum())
    counts.equal += int((~differs_T).sum())
    for index in np.flatnonzero(differs_T)[:1] if not counts.first else ():
        rollout, token = store.locate(int(recorded_rows_T[index]))
        counts.first = (
            f"{where}, {store.name(rollout)}, token {token}: experts {traced_TK[index].tolist()}, "
            f"recorded {stored_TK[index].tolist()}"
        )
    return recorded_rows_T


def main(argv: list[str] | None = None) -> int:
    """Print the counts; return 0 if every pair with a recorded route was traced and is equal."""
    try:
        counts = compare(argv)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(counts)
    return 0 if counts.equal and not counts.differ and not counts.untraced else 1


if __name__ == "__main__":
    sys.exit(main())
