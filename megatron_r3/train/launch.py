"""Start Megatron from its arguments, build a model and train it, on any release.

The releases expect three kinds of scripts, all of which read `sys.argv`:

- before 0.18 `pretrain()` parses the arguments, and the script brings a function that builds the
  model (`model_provider`);
- for 0.18 the script parses the arguments, and still brings that function;
- from 0.19 on the script parses the arguments, and hands over a config that builds the model.
"""

from __future__ import annotations

import inspect
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from megatron_r3.replay.ending import refuse_unpatched

AddArguments = Callable[[Any], Any]  # adds a script's own arguments to an ArgumentParser
OnModels = Callable[[list[torch.nn.Module]], None]


def initialize(extra_args: AddArguments | None = None) -> Any:
    """Parse the arguments and make the process groups; return Megatron's arguments."""
    from megatron.training import arguments, get_args
    from megatron.training.initialize import initialize_megatron

    refuse_unpatched(sys.argv)
    if hasattr(arguments, "parse_and_validate_args"):
        arguments.parse_and_validate_args(extra_args_provider=extra_args)
        initialize_megatron()
    else:
        initialize_megatron(extra_args_provider=extra_args)
    return get_args()


def build_model(args: Any) -> torch.nn.Module:
    """This rank's only model chunk, as `build_models` makes it.

    Raises:
        ValueError: the rank has several chunks, because there are virtual pipeline stages; or as
            `build_models`.
    """
    (model,) = build_models(args)
    return model


def build_models(args: Any) -> list[torch.nn.Module]:
    """This rank's model chunks, in Float16Module for fp16 or bf16; not in DistributedDataParallel.

    Args:
        args: what `initialize` returned.

    Raises:
        ValueError: --spec or --yaml-cfg is given, before 0.19.
    """
    from megatron.core.enums import ModelType
    from megatron.training import training

    config = _builder_config(args)
    if config is None:
        return training.get_model(
            _model_provider, ModelType.encoder_or_decoder, wrap_with_ddp=False
        )
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    builder = config.get_builder_cls()(config)
    return builder.build_distributed_models(groups, wrap_with_ddp=False)


def built_from(args: Any) -> set[str]:
    """The names of the arguments that Megatron reads to configure a model.

    With the same values of these arguments, Megatron builds the same model. The function watches
    which arguments Megatron reads, so no list of names must be kept for new releases.

    Args:
        args: what `initialize` returned.

    Raises:
        ValueError: as `build_models`.
    """
    read: set[str] = set()

    class Watched(Namespace):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    watched = Watched(**vars(args))
    if _builder_config(watched) is None:
        from megatron.training.arguments import core_transformer_config_from_args

        core_transformer_config_from_args(watched)
        _gpt_settings(watched)
    return read & vars(args).keys()


def train(
    datasets: Callable[..., Any],
    forward_step: Callable[..., Any],
    on_models: OnModels | None = None,
) -> None:
    """Run Megatron's `pretrain()` as a script of this release does.

    Args:
        datasets, forward_step: the dataset provider and the forward step of the script.
        on_models: see `watch_models`; None for nothing.
    """
    from megatron.core.enums import ModelType
    from megatron.training import arguments, training

    refuse_unpatched(sys.argv)
    script = {
        "train_valid_test_dataset_provider": datasets,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    if hasattr(arguments, "parse_and_validate_args"):
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        args = arguments.parse_and_validate_args()
        config = _builder_config(args)
        script["cfg_container"] = pretrain_cfg_container_from_args(args, config)
    # Up to 0.18 `model_provider` is required, and also on main of June 2026, beside cfg_container.
    provider = inspect.signature(training.pretrain).parameters["model_provider"]
    if provider.default is inspect.Parameter.empty:
        script["model_provider"] = _model_provider
    if on_models is not None:
        watch_models(on_models)
    training.pretrain(**script)


def watch_models(on_models: OnModels) -> None:
    """Have the next `pretrain()`, and no later one, call `on_models` with this rank's model chunks.

    The models are wrapped for data parallelism by then, and their checkpoint is loaded.
    """
    from megatron.training import training

    # `pretrain()` has no hook for this, so `setup_model_and_optimizer` is replaced in its module.
    # If two watchers wait, the second wraps the first. Each watcher, once called, puts back what it
    # replaced, and calls that: Megatron's own function is back before it runs.
    setup = training.setup_model_and_optimizer

    def watched(*args: Any, **kwargs: Any) -> Any:
        training.setup_model_and_optimizer = setup
        models, *rest = setup(*args, **kwargs)
        on_models(models)
        return models, *rest

    training.setup_model_and_optimizer = watched


def _builder_config(args: Any) -> Any:
    """The config that builds the model from 0.19 on; None for earlier releases."""
    from megatron.training import argument_utils

    if not hasattr(argument_utils, "gpt_config_from_args"):  # before 0.19
        return None
    if getattr(args, "hybrid_layer_pattern", None):
        return argument_utils.hybrid_config_from_args(args)
    return argument_utils.gpt_config_from_args(args)


def _model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> torch.nn.Module:
    """A GPTModel as upstream's gpt_builders.py builds it.

    gpt_builders.py lies beside the package in a checkout; a release installed as a wheel lacks it.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    config = config or core_transformer_config_from_args(args)
    decoder, mtp = gpt_specs(config, args, vp_stage)
    # only the releases that hand this argument to a provider have a GPTModel that takes it
    groups = {"pg_collection": pg_collection} if pg_collection is not None else {}
    return GPTModel(
        config=config,
        transformer_layer_spec=decoder,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
        **_gpt_settings(args),
        **groups,
    )


def _gpt_settings(args: Any) -> dict[str, Any]:
    """The arguments of a GPTModel other than its config and its layers."""
    for name in ("spec", "yaml_cfg"):
        if (given := getattr(args, name, None)) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} {given}: only Megatron's own pretrain_gpt.py takes "
                "this option; leave it out"
            )
    return {
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "fp16_lm_cross_entropy": args.fp16_lm_cross_entropy,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "rotary_percent": args.rotary_percent,
        "rotary_base": args.rotary_base,
        "rope_scaling": args.use_rope_scaling,
    }


def gpt_specs(config: Any, args: Any, vp_stage: int | None = None) -> tuple[Any, Any]:
    """The layer specs of this rank's decoder, and of its MTP layers (None if the model has none).

    Args:
        config: Megatron's TransformerConfig.
        args: transformer_impl, normalization and mtp_num_layers are read.
        vp_stage: the virtual pipeline stage; None without virtual pipelining.
    """
    from megatron.core.models.gpt import gpt_layer_specs as specs

    use_te = args.transformer_impl == "transformer_engine"
    options = {"use_transformer_engine": use_te, "normalization": args.normalization}
    decoder = specs.get_gpt_decoder_block_spec(config, vp_stage=vp_stage, **options)
    if args.mtp_num_layers is None:
        return decoder, None
    # An MTP layer is like the last decoder layer. A pipeline stage may have MTP layers and no
    # decoder layer, so newer releases list the layers of the whole model.
    layers = decoder.layer_specs
    if hasattr(specs, "get_gpt_decoder_layer_specs"):
        accepted = inspect.signature(specs.get_gpt_decoder_layer_specs).parameters
        stage = {"vp_stage": vp_stage} if "vp_stage" in accepted else {}
        layers = specs.get_gpt_decoder_layer_specs(config, **options, **stage)
    return decoder, specs.get_gpt_mtp_block_spec(config, layers[-1], use_te, vp_stage=vp_stage)
