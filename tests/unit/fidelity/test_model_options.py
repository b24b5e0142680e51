"""A tree's options that say what a model is: which nobody has read."""

import pytest

from proof.fidelity.model_options import options, unread

FIELDS = "class TransformerConfig(ModelParallelConfig):\n    num_layers: int = 0\n"
BUILDER = "def core_transformer_config_from_args(args, kind=None):\n    return kind(args.swiglu)\n"
MODEL = "class GPTModel:\n    def __init__(self, config, rotary_percent=1.0):\n        pass\n"
FILES = {
    "megatron/core/transformer/transformer_config.py": FIELDS,
    "megatron/core/model_parallel_config.py": "class ModelParallelConfig:\n    width: int = 1\n",
    "megatron/training/arguments.py": BUILDER,
    "megatron/core/models/gpt/gpt_model.py": MODEL,
}


@pytest.mark.parametrize(
    ("file", "old", "new", "found"),
    [
        ("transformer_config.py", "", "", []),  # the control
        ("transformer_config.py", "= 0", "= 0\n    made_up: int = 3", ["made_up"]),
        ("transformer_config.py", "= 0", "= 0\n    width: int = 2", []),  # of the layout
        ("arguments.py", "args.swiglu", "args.made_up", ["made_up"]),
        ("arguments.py", "args.swiglu", "getattr(args, 'made_up', 0)", ["made_up"]),
        ("arguments.py", "args.swiglu", "hasattr(args, 'seed')", []),
        ("gpt_model.py", "rotary_percent", "made_up", ["made_up"]),
    ],
)
def test_what_nobody_has_read(tmp_path, file, old, new, found):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.replace(old, new) if name.endswith("/" + file) else text)
    assert unread(tmp_path) == found
    assert {*found} <= {*options(tmp_path)}
