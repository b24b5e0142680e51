"""What a training on rollouts is asked to do: read from Megatron's arguments, and refused."""

import pytest
from training_arguments import options_of as options


def test_plain_arguments() -> None:
    read = options()
    assert read.where == "--rollouts a b"
    assert (read.moe_layers, read.vocab_size, read.mismatch_interval) == ((0, 1, 2, 3), 63, 5)
    assert read.use_plan
    assert read.validate_loss
    assert read.sample_order == "single"
    assert not read.scaled_loss


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"moe_router_replay": False}, "use_plan", False),
        ({"moe_router_replay_dispatch_plan": False}, "use_plan", False),
        ({"moe_token_dispatcher_type": "flex"}, "use_plan", False),
        ({"rerun_mode": "disabled"}, "validate_loss", False),
        ({"check_for_nan_in_loss_and_grad": False}, "validate_loss", False),
        ({"moe_router_replay_log_mismatch_interval": 0}, "mismatch_interval", 0),
        ({"padded_vocab_size": 64}, "vocab_size", 64),
        ({"num_experts": None}, "num_experts", 0),
        ({"context_parallel_size": 4}, "document_multiple", 8),
        ({"fp16": True}, "scaled_loss", True),
        ({"mock_data": True}, "reads_a_dataset", True),
    ],
)
def test_what_an_argument_changes(change: dict[str, object], field: str, value: object) -> None:
    assert getattr(options(**change), field) == value != getattr(options(), field)


ORDERS = {
    "another context-parallel size": (
        {"rollouts_pack": True, "micro_batch_size": 1},
        {"context_parallel_size": 2},
    ),
    "another seed": ({"rollouts_shuffle": 1, "micro_batch_size": 1}, {"rollouts_shuffle": 2}),
    "other batches of a seed": (
        {"rollouts_shuffle": 1, "micro_batch_size": 1},
        {"global_batch_size": 16},
    ),
    "shuffled, more steps": ({"dataloader_type": "cyclic"}, {"train_iters": 8}),
    "shuffled, more ranks": ({"dataloader_type": "cyclic"}, {"data_parallel_size": 2}),
    "shuffled, other micro-batches": ({"dataloader_type": "cyclic"}, {"micro_batch_size": 2}),
}


@pytest.mark.parametrize("change", ORDERS)
def test_what_changes_the_order_of_samples_is_part_of_it(change: str) -> None:
    before, after = ORDERS[change]
    in_store_order = options().sample_order
    assert in_store_order == options(data_parallel_size=2).sample_order
    first = options(**before).sample_order
    second = options(**{**before, **after}).sample_order
    assert len({in_store_order, first, second}) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollouts_follow": float("nan")}, "--rollouts-follow nan: it must be 0 or more seconds"),
        (
            {"rollouts_pack": True, "micro_batch_size": 1, "hybrid_layer_pattern": "*EM"},
            r"hybrid pattern \*EM: the state of its recurrent layers",
        ),
        (  # its name before 0.17
            {"rollouts_pack": True, "micro_batch_size": 1, "hybrid_override_pattern": "M*"},
            r"hybrid pattern M\*: the state of its recurrent layers",
        ),
        (
            {"rollouts_follow": 1.0, "rollouts_check": "store"},
            "--rollouts-follow: not together with --rollouts-check store",
        ),
    ],
)
def test_options_that_could_not_train_as_they_say(change: dict[str, object], message: str) -> None:
    options()  # the same arguments without the change are taken
    with pytest.raises(ValueError, match=message):
        options(**change)
