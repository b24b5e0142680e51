"""`capture_routes` on tiny transformers models with random weights.

Shape suffixes (docs/glossary.md): E, T.
"""

import numpy as np
import pytest
import torch
import transformers
from tiny_models import qwen

from megatron_r3.data.engines.shape import EngineError, ModelShape
from megatron_r3.data.engines.transformers import capture_routes

pytestmark = pytest.mark.usefixtures("one_thread")


def deepseek():
    torch.manual_seed(3)
    config = transformers.DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )
    config._experts_implementation = "eager"
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    return model


TOKENS = torch.arange(3, 33).reshape(2, 15)


def chosen_by_deepseek(logits_TE, bias_E, topk):
    """The ids by DeepSeek's rule: top-k of the experts in the best 2 of 4 groups of 2 experts."""
    scores = torch.sigmoid(logits_TE.float()) + bias_E
    best_two = scores.unflatten(-1, (4, 2)).sum(-1)  # a group has two experts
    kept = torch.zeros_like(best_two).scatter_(1, best_two.topk(2).indices, 1)
    outside = kept.repeat_interleave(2, -1) == 0
    return scores.masked_fill(outside, float("-inf")).topk(topk).indices


@torch.inference_mode()
def test_what_is_captured_is_the_topk_of_the_router_logits():
    model = qwen(mlp_only_layers=[1])
    with capture_routes(model) as captured:
        output = model(TOKENS, output_router_logits=True)
    (ids,) = captured.take()
    assert captured.moe_layers == (0, 2)
    assert captured.moe_layers == ModelShape.from_hf_config(model.config.to_dict()).moe_layers
    assert ids.shape == (2, 30, 3)
    for chosen, logits in zip(ids, output.router_logits, strict=True):
        assert (chosen == logits.topk(3).indices).all()


@torch.inference_mode()
def test_bias_and_groups_of_deepseek():
    model = deepseek()
    logits, biases = [], []
    for layer in model.model.layers[1:]:
        gate = layer.mlp.gate
        biases.append(gate.e_score_correction_bias)
        gate.register_forward_hook(lambda module, args, output: logits.append(output[0]))
    with capture_routes(model) as captured:
        model(TOKENS)
    (ids,) = captured.take()
    assert captured.moe_layers == (1, 2)
    for chosen, logits_TE, bias_E in zip(ids, logits, biases, strict=True):
        expected = chosen_by_deepseek(logits_TE, bias_E, 2)
        assert (np.sort(chosen) == np.sort(expected)).all()
        plain = chosen_by_deepseek(logits_TE, bias_E * 0, 2)
        assert (np.sort(chosen) != np.sort(plain)).any()


@torch.inference_mode()
def test_every_step_of_a_cached_generation_is_captured():
    model = qwen()
    with capture_routes(model) as captured:
        made = model.generate(
            TOKENS, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0
        )
        steps = captured.take()
    assert [step.shape[1] for step in steps] == [30, 2, 2, 2, 2]
    whole = torch.cat([step.unflatten(1, (2, -1)) for step in steps], 2)
    assert whole.shape == (3, 2, made.shape[1] - 1, 3)
    with capture_routes(model) as captured:
        model(made[:, :-1], use_cache=False)
    (again,) = captured.take()
    same = np.sort(again.unflatten(1, (2, -1))) == np.sort(whole)
    assert same.mean() > 0.99


@torch.inference_mode()
def test_nothing_is_left_in_the_model():
    model = qwen()
    with capture_routes(model) as captured:
        model(TOKENS)
    with pytest.raises(KeyError), capture_routes(model):
        raise KeyError
    model(TOKENS)
    assert len(captured.take()) == 1
    assert captured.take() == []


@torch.inference_mode()
def test_models_that_cannot_be_read_are_refused():
    with pytest.raises(EngineError, match="no top-k router"), capture_routes(torch.nn.Linear(1, 1)):
        pass
    model = qwen()
    model.model.layers[1].mlp.second = model.model.layers[0].mlp.gate.__class__(model.config)
    with pytest.raises(EngineError, match="a second router in layer 1"), capture_routes(model):
        pass
    model = qwen()
    gate = model.model.layers[1].mlp.gate
    with capture_routes(model) as captured:
        model(TOKENS)
        gate(torch.zeros(1, 32))
        with pytest.raises(EngineError, match=r"ran \[1, 2, 1\] times"):
            captured.take()
    gate.register_forward_hook(lambda module, args, output: output[:2])
    with capture_routes(model), pytest.raises(EngineError, match="of layer 1 does not return"):
        gate(torch.zeros(1, 32))
