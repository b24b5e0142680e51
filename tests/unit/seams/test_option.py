"""A config is settled once, and the same again when it is rebuilt from its fields."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace

import pytest

from megatron_r3.seams import option
from megatron_r3.seams.option import settle_fusion
from megatron_r3.seams.pretrain import _check_options
from megatron_r3.training.layers import moe_layer_indices


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
def test_the_first_rank_says_once_that_there_is_no_fused_router(
    rank: str, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    option._warn_once.cache_clear()
    monkeypatch.setenv("RANK", rank)
    with caplog.at_level(logging.WARNING, "megatron_r3.seams.option"):
        for config in (Config(True), Config(True), Config()):
            settle_fusion(config)  # no Megatron is importable here, so no Transformer Engine either
    assert [record.message[:18] for record in caplog.records] == ["moe_router_fusion:"] * lines


@pytest.mark.parametrize(
    ("frequency", "layers"), [(1, (0, 1, 2, 3, 4)), (2, (0, 2, 4)), ([0, 1, 1, 0, 1], (1, 2, 4))]
)
def test_moe_layers_follow_megatrons_rule(frequency, layers):
    assert moe_layer_indices(SimpleNamespace(num_layers=5, moe_layer_freq=frequency)) == layers


HYBRID = ["hybrid_layer_pattern", "hybrid_override_pattern"]  # from 0.17 on, before


@pytest.mark.parametrize("name", HYBRID)
def test_moe_layers_of_a_hybrid_model_are_those_of_its_pattern(name):
    config = SimpleNamespace(num_layers=6, moe_layer_freq=1, **{name: "*E|M-|EE/*E/*E"})
    assert moe_layer_indices(config) == (1, 4, 5)


def refused_with_rollouts(**more):
    args = {"rollouts": ["store"], "rollouts_clip_eps": 0.2, "rollouts_pack": False, **more}
    with pytest.raises(ValueError) as refusal:  # before the store is looked at
        _check_options(SimpleNamespace(micro_batch_size=1, **args))
    return str(refusal.value)


@pytest.mark.parametrize("name", HYBRID)
def test_a_pack_does_not_go_through_recurrent_layers(name):
    told = refused_with_rollouts(rollouts_pack=True, **{name: "M*M*"})
    assert "--rollouts-pack with the hybrid pattern M*M*" in told


def test_legacy_models_have_routers_that_would_not_ask():
    told = refused_with_rollouts(use_legacy_models=True)
    assert "not together with --use-legacy-models" in told


def test_checkpoints_that_cannot_say_what_was_used():
    told = refused_with_rollouts(override_ckpt_iteration=7)
    assert "not together with --override-ckpt-iteration: the checkpoint's own iteration" in told
    told = refused_with_rollouts(non_persistent_ckpt_type="local")
    assert "not together with --non-persistent-ckpt-type local" in told
