"""A config is settled once, and the same again when it is rebuilt from its fields."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace

import pytest

from megatron_r3.seams import option
from megatron_r3.seams.option import settle_fusion


@dataclass
class Config:
    """The two fields of a TransformerConfig that say what is fused."""

    moe_router_fusion: bool = False
    moe_router_replay_fused_gate: bool | None = None


# As given: what follows where Transformer Engine has a fused router, and where it has none.
SETTLED = [
    (Config(), Config(), Config()),
    (Config(True), Config(True, True), Config(False, True)),
    (Config(True, False), Config(True, False), Config(False, False)),
    (Config(False, True), Config(False, True), Config(False, True)),
]


@pytest.mark.parametrize("upstream_fuses", [True, False])
@pytest.mark.parametrize(("given", "with_kernel", "without"), SETTLED)
def test_fusion_is_settled_the_same_again_and_when_it_is_rebuilt(
    given: Config,
    with_kernel: Config,
    without: Config,
    upstream_fuses: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(option, "_upstream_fuses", lambda: upstream_fuses)
    config, settled = replace(given), with_kernel if upstream_fuses else without
    for _ in range(2):
        settle_fusion(config)
        assert config == settled
    rebuilt = Config(**asdict(config))
    settle_fusion(rebuilt)
    assert rebuilt == settled


def test_fusion_that_is_turned_on_late_is_settled_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(option, "_upstream_fuses", lambda: False)
    config = Config()
    settle_fusion(config)  # where the config is made
    config.moe_router_fusion = True
    settle_fusion(config)  # where a router is made with it
    assert config == Config(False, True)


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_the_first_rank_says_once_that_there_is_no_fused_router(rank, lines, monkeypatch, caplog):
    option._warn_once.cache_clear()
    monkeypatch.setenv("RANK", rank)
    with caplog.at_level(logging.WARNING, "megatron_r3.seams.option"):
        for config in (Config(True), Config(True), Config()):
            settle_fusion(config)  # no Megatron is importable here, so no Transformer Engine either
    assert [record.message[:18] for record in caplog.records] == ["moe_router_fusion:"] * lines
