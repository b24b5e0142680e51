"""Which rollouts a training has used: what its checkpoint remembers, and what a resume compares.

Each store that a training has used is an entry in the checkpoint (`progress.py` puts it there).
Entries are plain dicts, lists, texts and numbers, so a Megatron without megatron_r3 loads the
checkpoint. The last entry is the store that is trained on now. A shard has its name, its identity
and its number of rollouts:

    [{"directories": ["/data/rollouts/0"], "start": 0, "order": "single", "policies": ["5f0c..."],
      "shards": [["shard-00000.safetensors", "9b1e...", 128], ...], "old_pass": "1f..."},
     {"directories": ["/data/rollouts/1"], "start": 128, ...}]

`start` is how many samples the training had consumed when it began with that store; `Schedule`
counts from there. `policies` are the `policy_name`s of the shards, and `old_pass` is the number of
the last pass of the old policy. An entry also has the `reference` policy of the KL term.
"""

from __future__ import annotations

from typing import Any

from megatron_r3.data.digest import short_digest
from megatron_r3.data.store.reader import RolloutStore
from megatron_r3.data.store.schema import StoreError, StoreInfo
from megatron_r3.train.options import RolloutOptions
from megatron_r3.train.progress import MegatronProgress


def policy_name(info: StoreInfo) -> str:
    """16 hex digits for the policy that sampled; empty if the store does not say which."""
    if not any(info.policy):
        return ""
    return short_digest(repr(info.policy))


class Ledger:
    """This process's copy of what a training has used so far.

    Attributes:
        start: how many samples the training had consumed when it began with this store.
        entries: what the next checkpoint remembers.
        old_pass: the number of the last pass of the old policy; empty before the first one.
    """

    def __init__(
        self, options: RolloutOptions, progress: MegatronProgress, store: RolloutStore
    ) -> None:
        self.options, self.progress, self.store = options, progress, store
        self.start = 0
        self.entries: list[dict[str, Any]] = []
        self.old_pass = ""

    def begin(self) -> str:
        """Compare the store with what the loaded checkpoint has used. Called once, after the load.

        Returns:
            A notice for the user; empty if there is none.

        Raises:
            StoreError: the store has lost or changed a shard since the checkpoint; sample numbers
                now name other rollouts; the training has updated the policy that sampled the store;
                a shuffled epoch would go on in another store; or the checkpoint counts fewer
                samples than training had consumed when it began with the store.
        """
        consumed = self.progress.consumed_samples
        remembered = self.progress.remembered() if consumed else []
        notice = ""
        if remembered and self._continues(remembered[-1]):
            self._check_same(remembered[-1], consumed)
            self.start = remembered[-1]["start"]
            self.old_pass = remembered[-1].get("old_pass", "")
            self.entries = remembered[:-1]
        else:
            self.start, self.entries = consumed, remembered
            if remembered:
                self._check_other(remembered)
                notice = (
                    "another store than before: training begins at its first rollout, which is "
                    f"sample {consumed} of the training"
                )
            elif consumed:
                notice = (
                    "the checkpoint does not say which rollouts it was trained on: training begins "
                    f"at the first rollout, which is sample {consumed} of the training"
                )
        now = self.options.reference
        before = remembered[-1].get("reference", now) if remembered else now
        if before != now:
            changed = f"the reference policy is {now or 'none'}, before it was {before or 'none'}"
            notice = f"{notice}; {changed}" if notice else changed
        self.entries.append({})
        self.note()
        return notice

    def note(self) -> None:
        """Note the open shards for the next checkpoint, if any came since the last call."""
        index = self.store.index
        # a shard never changes and is never taken away, so the number says whether any came
        if len(self.entries[-1].get("shards", ())) == len(index.table):
            return
        rollouts = index.table["rollouts"].tolist()
        self.entries[-1] = {
            "directories": [*index.resolved],
            "start": self.start,
            "order": self.options.sample_order,
            "reference": self.options.reference,
            "policies": sorted({name for info in index.infos if (name := policy_name(info))}),
            "shards": [*map(list, zip(index.names(), index.identities(), rollouts, strict=True))],
            **({"old_pass": self.old_pass} if self.old_pass else {}),
        }
        self.progress.remember(self.entries)

    def note_pass(self, number: str) -> None:
        """Note for the next checkpoint which pass of the old policy the coming updates use.

        Args:
            number: the text that names the pass (`OldPass.begin`).
        """
        self.old_pass = self.entries[-1]["old_pass"] = number
        self.progress.remember(self.entries)

    def consumed(self) -> int:
        """How many samples the training has consumed since it began with this store."""
        return max(0, self.progress.consumed_samples - self.start)

    def used(self, more: int = 0) -> int:
        """How many different samples of this store the training has used.

        Args:
            more: how many samples the running iteration consumes; they are counted too.
        """
        return self.options.use.schedule.used(self.consumed() + more)

    def _continues(self, last: dict[str, Any]) -> bool:
        """Whether the entry `last` is about this store, even if shards are lost or changed.

        A store is the same if one of its directories has the same path or, after a move, one of its
        shards has the same content.
        """
        paths = {*self.store.index.resolved}
        identities = {identity for _, identity, _ in last["shards"]}
        moved = not identities.isdisjoint(self.store.index.identities())
        return moved or not paths.isdisjoint(last["directories"])

    def _check_same(self, last: dict[str, Any], consumed: int) -> None:
        where = " ".join(map(str, self.store.directories))
        if consumed < last["start"]:
            raise StoreError(
                f"{where}: the checkpoint says that training began with this store at sample "
                f"{last['start']}, but it counts only {consumed} samples: begin anew with "
                "--finetune"
            )
        again = (
            "train on the store as it was, or begin anew with --finetune; new rollouts belong in "
            "another directory"
        )
        rollouts = sum(rollouts for _, _, rollouts in last["shards"])
        # A followed store may be a copy in progress: wait for the shards of the checkpoint.
        if self.options.follow_s is not None:
            self.store.wait_for(rollouts - 1)
        now = self.store.index.identities()
        self._check_shards(last, now, where, again)
        if last["order"] != self.options.sample_order:
            raise StoreError(
                f"{where}: the checkpoint took its samples as {last['order']}, this training as "
                f"{self.options.sample_order}, so training would use some rollouts again and "
                "leave others out: give the earlier options again, or begin anew with --finetune"
            )
        # Sample i is rollout i modulo the number of rollouts. When a store has grown, the samples
        # of the first epoch are the same rollouts as before, and later ones are not: with 128
        # rollouts sample 130 is rollout 2, with 256 it is rollout 130.
        grown = len(now) > len(last["shards"])
        used = self.options.use.schedule.used(consumed - last["start"])
        in_order = last["order"].startswith("single") and "packs" not in last["order"]
        whole_epoch = used > rollouts or not in_order
        if grown and self.options.follow_s is None and whole_epoch:
            raise StoreError(
                f"{where}: the store has grown since the checkpoint, which had begun a second "
                "epoch, or used --rollouts-pack or --dataloader-type cyclic: sample numbers now "
                f"name other rollouts; {again}"
            )

    def _check_shards(self, last: dict[str, Any], now: list[str], where: str, again: str) -> None:
        """Refuse a store in which a shard of the checkpoint is gone or has other content."""
        for index, (name, identity, _) in enumerate(last["shards"]):
            if index >= len(now):
                raise StoreError(
                    f"{where}: {name}, which the checkpoint was trained on, is gone: {again}"
                )
            if now[index] != identity:
                raise StoreError(
                    f"{self.store.shards[index].path}: this is not the {name} that the checkpoint "
                    f"was trained on: the file was changed, replaced or moved: {again}"
                )

    def _check_other(self, remembered: list[dict[str, Any]]) -> None:
        where = " ".join(map(str, self.store.directories))
        if self.options.sample_order.startswith("cyclic"):
            raise StoreError(
                f"{where}: another store than the checkpoint's, with --dataloader-type cyclic: the "
                "rest of a shuffled epoch would be drawn from this store, some rollouts twice and "
                "some never; use --dataloader-type single, or begin anew with --finetune"
            )
        if self.options.any_policy:
            return
        index = self.store.index
        for place, info in enumerate(index.infos):
            name = policy_name(info)
            for entry in remembered:
                if name and info.policy_stamp and name in entry["policies"]:
                    before = entry["directories"][0]
                    shard = self.store.shards[int((index.table["info"] == place).argmax())]
                    raise StoreError(
                        f"{shard.path}: sampled from the same policy as {before}, and this "
                        "training has updated that policy since: sample from the new policy, or "
                        "give --rollouts-policy any"
                    )
