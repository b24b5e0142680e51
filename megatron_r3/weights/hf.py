"""Export a Megatron checkpoint as a transformers directory, or import one.

A script for any number of processes and any layout. The first command exports, the second imports:

    torchrun --nproc-per-node 1 megatron_r3/weights/hf.py --hf-export DIR --load CKPT MODEL_ARGS
    torchrun --nproc-per-node 1 megatron_r3/weights/hf.py --hf-import DIR --save CKPT \\
        --save-interval 1 MODEL_ARGS

The script writes everything that it has loaded, or nothing at all. If it writes nothing, it ends
with status 1 on all ranks, and rank 0 prints one `error:` line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_r3.replay.layers import unwrapped
from megatron_r3.replay.words import one_line
from megatron_r3.train.launch import build_models, initialize
from megatron_r3.weights.all_ranks import my_rank, on_first_rank, together
from megatron_r3.weights.bridge import BRIDGES, CHOICES, OPTION, choose, chosen_family
from megatron_r3.weights.checkpoint import check_load, check_save, load_whole, save_whole
from megatron_r3.weights.directory import CONFIG, check_target, dtype_of, read_config
from megatron_r3.weights.families import family_of
from megatron_r3.weights.family import Family, settings_of
from megatron_r3.weights.write_policy import read_policy, write_policy


def _arguments(parser: Any) -> Any:
    group = parser.add_argument_group(title="hf")
    group.add_argument(
        "--hf-export", type=Path, metavar="DIR", help="write --load as this transformers directory"
    )
    group.add_argument(
        "--hf-import", type=Path, metavar="DIR", help="save this transformers directory as --save"
    )
    group.add_argument(
        "--hf-like",
        type=Path,
        metavar="DIR",
        help="with --hf-export: take config.json and the tokenizer of this transformers directory",
    )
    group.add_argument(
        OPTION,
        choices=CHOICES,
        default="auto",
        help="what converts the weights (auto: this project, else an installed bridge)",
    )
    return parser


def _run() -> None:
    try:
        args = initialize(_arguments)
    except AssertionError as error:  # how Megatron refuses most arguments
        reason = one_line(str(error)) or "no reason is given"
        raise ValueError(f"Megatron refuses these arguments: {reason}") from error
    if (args.hf_export is None) == (args.hf_import is None):
        raise ValueError("give --hf-export DIR (with --load) or --hf-import DIR (with --save)")
    # Building the model takes long, so all checks that need no model come first.
    on_first_rank(lambda: _check(args))
    models = build_models(args)
    if directory := args.hf_import or args.hf_like:
        family: Family = chosen_family(args.hf_bridge, directory, models)
    else:
        chunk: Any = unwrapped(models[0])
        family = together(lambda: family_of(chunk.config, settings_of(chunk, args.vocab_size)))
    if args.hf_import is not None:
        read_policy(models, args.hf_import, family, vocab_size=args.vocab_size)
        save_whole(models, args)
        return
    load_whole(models, args)
    dtype = torch.bfloat16
    if (like := args.hf_like) is not None:
        dtype = together(lambda: dtype_of(read_config(like), like / CONFIG))
    write_policy(models, args.hf_export, family, like, dtype, vocab_size=args.vocab_size)


def _check(args: Any) -> None:
    if (spec := getattr(args, "spec", None)) is not None:
        raise ValueError(f"--spec {spec}: custom layers cannot be converted: leave it out")
    directory = args.hf_import or args.hf_like
    if directory is not None:
        choose(args.hf_bridge, read_config(directory), directory / CONFIG)
    if args.hf_import is not None:
        if args.hf_like is not None:
            raise ValueError("leave --hf-like out: --hf-import DIR reads the config.json of DIR")
        check_save(args)
        return
    if args.hf_like is None and args.hf_bridge in BRIDGES:
        raise ValueError(
            f"{OPTION} {args.hf_bridge} needs --hf-like DIR: the bridge reads config.json of this "
            "transformers directory of the model, and the file is copied"
        )
    if args.vocab_size is None:
        raise ValueError("--hf-export needs --vocab-size, the vocabulary without padding")
    check_target(args.hf_export)
    check_load(args)


def main() -> None:
    """Export or import a checkpoint with Megatron's own arguments, which are read from `sys.argv`.

    Raises:
        SystemExit: status 1, with one line that says what is wrong (on rank 0).
    """
    try:
        _run()
    except (ValueError, OSError) as error:
        # All ranks fail for the same reason, so only rank 0 prints it.
        raise SystemExit(f"error: {one_line(str(error))}" if my_rank() == 0 else 1) from None


if __name__ == "__main__":
    main()
