"""Which rollouts a training has used: what its checkpoint remembers, and what a resume compares.

Megatron saves its arguments in every checkpoint, so what this module writes into
`args.rollouts_used` is in the checkpoint too, as plain dicts, lists and texts: a Megatron without
megatron_r3 loads them as well. The last entry is the store that is being trained on:

    [{"directories": ["/data/rollouts/0"], "start": 0, "order": "single", "policies": ["5f0c..."],
      "shards": [["shard-00000.safetensors", "9b1e...", 128], ...]},
     {"directories": ["/data/rollouts/1"], "start": 128, ...}]

`start` is how many samples the training had consumed when it began with that store. Sample i of the
training is then sample i - start of the store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_r3.store.reader import RolloutStore
from megatron_r3.store.schema import StoreError, StoreInfo


def alignment(args: Any) -> int:
    """To what multiple each rollout of a pack is padded: context parallelism splits it so."""
    return 2 * args.context_parallel_size if args.context_parallel_size > 1 else 1


def policy_name(info: StoreInfo) -> str:
    """16 hex digits for the policy that sampled; empty where the store does not tell it."""
    if not any(info.policy):
        return ""
    return hashlib.sha256(repr(info.policy).encode()).hexdigest()[:16]


class Ledger:
    """What a training has used so far, this process's copy of it.

    Attributes:
        start: the sample of the training that is the first one of the store.
        entries: what a checkpoint remembers.
    """

    def __init__(self, args: Any, store: RolloutStore) -> None:
        self.args, self.store = args, store
        self.start = 0
        self.entries: list[dict[str, Any]] = []

    def settle(self) -> str:
        """Compare the store with what the loaded checkpoint has used; once, after it was loaded.

        Returns:
            What to tell the user, or nothing.

        Raises:
            StoreError: the store has lost or changed a shard since, the samples have another order
                now, or another store comes from a policy that was trained on before.
        """
        consumed = self.args.consumed_train_samples
        remembered = _remembered(self.args) if consumed else []
        told = ""
        if remembered and self._continues(remembered[-1]):
            self._check_same(remembered[-1], consumed)
            self.start = remembered[-1]["start"]
            self.entries = remembered[:-1]
        else:
            self.start, self.entries = consumed, remembered
            if remembered:
                self._check_other(remembered)
                told = f"another store than before: begins at its first rollout, sample {consumed}"
            elif consumed:
                told = (
                    "the checkpoint does not say which rollouts it was trained on: begins at the "
                    f"first rollout, sample {consumed}"
                )
        self.entries.append({})
        self.note()
        return told

    def note(self) -> None:
        """Write down the shards that are open; again whenever a followed store has grown."""
        shards = self.store.shards
        if self.entries and len(self.entries[-1].get("shards", ())) == len(shards):
            return
        self.entries[-1] = {
            "directories": [str(folder.resolve()) for folder in self.store.directories],
            "start": self.start,
            "order": self._order(),
            "policies": sorted({name for s in shards if (name := policy_name(s.info))}),
            "shards": [[s.path.name, s.identity, s.num_rollouts] for s in shards],
        }
        self.args.rollouts_used = self.entries

    def consumed(self) -> int:
        """How many samples of this store the training has used."""
        return max(0, int(self.args.consumed_train_samples) - self.start)

    def _order(self) -> str:
        """What decides which rollouts a sample has.

        A pack depends on how its rollouts are padded for context parallelism. A shuffled order
        (cyclic) depends on how many samples are drawn, and on how the ranks share them out.
        """
        args = self.args
        order = args.dataloader_type or "single"
        if order != "single":
            order += (
                f" over {args.train_samples or args.train_iters * args.global_batch_size} samples, "
                f"{args.data_parallel_size} data-parallel ranks, micro-batches of "
                f"{args.micro_batch_size}, data sharding {getattr(args, 'data_sharding', None)}"
            )
        if args.rollouts_pack:
            order += f", packs of {args.seq_length} aligned to {alignment(args)}"
        return order

    def _continues(self, last: dict[str, Any]) -> bool:
        """Whether the store is meant to be the one that was used last, whole or not.

        It is the same where a directory has the same path, and where a shard has the same content
        although the store was moved.
        """
        paths = {str(folder.resolve()) for folder in self.store.directories}
        identities = {identity for _, identity, _ in last["shards"]}
        moved = any(shard.identity in identities for shard in self.store.shards)
        return moved or not paths.isdisjoint(last["directories"])

    def _check_same(self, last: dict[str, Any], consumed: int) -> None:
        where = " ".join(map(str, self.store.directories))
        if consumed < last["start"]:
            raise StoreError(
                f"{where}: the checkpoint began with this store at sample {last['start']}, and "
                f"{consumed} samples are said to be used: begin anew with --finetune"
            )
        again = (
            "train on the store as it was, or begin anew with --finetune; new rollouts belong into "
            "another directory"
        )
        if self.args.rollouts_follow is not None:  # what was there then may still be on its way
            self.store.wait_for(sum(rollouts for _, _, rollouts in last["shards"]) - 1)
        now = self.store.shards
        for index, (name, identity, _) in enumerate(last["shards"]):
            if index >= len(now):
                raise StoreError(
                    f"{where}: {name} is gone, which the checkpoint was trained on: {again}"
                )
            if now[index].identity != identity:
                raise StoreError(
                    f"{now[index].path}: it is not the {name} that the checkpoint was trained on; "
                    f"it was changed, replaced or put in another place: {again}"
                )
        if last["order"] != self._order():
            raise StoreError(
                f"{where}: the checkpoint took its samples as {last['order']}, this training as "
                f"{self._order()}, so it would repeat some and leave others out: give the options "
                "of before that differ there, or begin anew with --finetune"
            )
        rollouts = sum(rollouts for _, _, rollouts in last["shards"])
        grown = len(now) > len(last["shards"])
        whole_epoch = consumed - last["start"] > rollouts or last["order"] != "single"
        if grown and self.args.rollouts_follow is None and whole_epoch:
            raise StoreError(
                f"{where}: it has grown since the checkpoint, which had gone through all of it, or "
                f"took it in packs or shuffled: sample numbers now name other rollouts; {again}"
            )

    def _check_other(self, remembered: list[dict[str, Any]]) -> None:
        where = " ".join(map(str, self.store.directories))
        if self._order().startswith("cyclic"):
            raise StoreError(
                f"{where}: another store than the checkpoint's, with --dataloader-type cyclic: the "
                "rest of a shuffled epoch would be drawn from it, some rollouts twice and some "
                "never; use --dataloader-type single, or begin anew with --finetune"
            )
        if self.args.rollouts_policy == "any":
            return
        for shard in self.store.shards:
            name = policy_name(shard.info)
            for entry in remembered:
                if name and shard.info.policy_stamp and name in entry["policies"]:
                    before = entry["directories"][0]
                    raise StoreError(
                        f"{shard.path}: sampled from the policy of {before}, which this training "
                        "has updated since: sample from the new policy, or give "
                        "--rollouts-policy any"
                    )


def _remembered(args: Any) -> list[dict[str, Any]]:
    """What the loaded checkpoint remembers, the same on all ranks; empty where it does not.

    The first rank reads the checkpoint's common part once more, because Megatron's
    `load_checkpoint` keeps the saved arguments to itself, and tells the others.
    """
    told: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        saved = next(iter(_saved_arguments(args)), None)
        told = [getattr(saved, "rollouts_used", None)]
    torch.distributed.broadcast_object_list(told, src=0)
    return list(told[0] or [])


def _saved_arguments(args: Any) -> Iterator[Any]:
    """The arguments inside the checkpoint that was loaded, in either of Megatron's formats.

    A distributed checkpoint has them in its common part. An older one has them beside the weights
    of each rank: that file is mapped, so that no weight is read.
    """
    from megatron.core import dist_checkpointing

    folders = [args.load, getattr(args, "non_persistent_global_ckpt_dir", None)]
    if args.load is not None:
        folders.append(str(Path(args.load) / "non_persistent"))
    for folder in (Path(name) for name in folders if name is not None):
        saved = folder / f"iter_{args.iteration:07d}"
        if (saved / "metadata.json").exists():
            yield dist_checkpointing.load_common_state_dict(str(saved)).get("args")
        for file in sorted(saved.glob("mp_rank_00*/model_optim_rng.pt")):
            yield torch.load(file, map_location="cpu", mmap=True, weights_only=False).get("args")
