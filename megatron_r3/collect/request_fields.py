"""Lists the fields of requests to engines by what each field does to the sampled tokens.

The policy loss divides two probabilities of one distribution, so a store must say how its tokens
were drawn. An unknown field may change how tokens are drawn and leave no trace. For example, a
repetition penalty of 1.3 shows in none of vLLM's raw log-probs. So `convert` and the embedded
sampler refuse a field that `_RECORDED`, `PLAIN` and `_FREE` do not name, and `collect` sends no
such field.

A test goes through all fields of vLLM 0.30.0 (/v1/completions, /v1/chat/completions and
/inference/v1/generate) and of SGLang 0.5.23 (/generate and /v1/...), and names those that are
refused with any value, for example grammars. Megatron's server adds `return_tokenized_data`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_r3.data.engines.body import most_tokens
from megatron_r3.data.engines.shape import EngineError, naming
from megatron_r3.data.store.schema import SamplingSettings
from megatron_r3.replay.words import quoted

# what a store records (`store.schema.SamplingSettings`)
_RECORDED = {"temperature", "top_p", "top_k", "min_p"}
_RECORDED |= {"max_tokens", "max_completion_tokens", "max_new_tokens"}
_MOST_NUMBER = 2.0**31

# Fields that change the distribution or hide a part of the response, with values that do neither.
PLAIN: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_tokens": (0,),  # until a response has so many tokens, the end token cannot be drawn
    "min_new_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "best_of": (1,),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    # "required" and a function's name force tokens into a grammar; so do `strict` tools, which
    # `_changes_nothing` refuses
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "ebnf_full_assistant": (False,),
    "require_reasoning": (False,),
    "custom_params": ({},),
    "vllm_xargs": ({},),
    "extra_args": ({},),
    "modalities": (["text"],),
    "use_audio_in_video": (False,),
    "include_reasoning": (True,),  # with False the reward would see less than the model wrote
    "parallel_tool_calls": (True,),  # with False the reward would see only the first call
}

# Settings that an engine takes from the model's generation_config.json if a request leaves them
# out, each with the values that change nothing.
_DEFAULTS: dict[str, tuple[float, ...]] = {
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
}

# Fields that leave the distribution as it is. These say what is asked:
_FREE = {
    *("model", "prompt", "messages", "token_ids", "input_ids", "text", "sampling_params", "n"),
    *("seed", "sampling_seed", "documents", "chat_template", "chat_template_kwargs", "thinking"),
    *("task", "reasoning_effort", "add_generation_prompt", "continue_final_message"),
    *("add_special_tokens", "truncate_prompt_tokens", "truncation_side"),
    *("assistant_tokens_mask", "token_offsets"),
    # These say where a response and its text end:
    *("stop", "stop_token_ids", "stop_regex", "stop_strs", "stop_regex_strs", "stop_str_max_len"),
    *("stop_regex_max_len", "ignore_eos", "no_stop_trim", "include_stop_str_in_output"),
    *("repetition_detection", "length_penalty", "skip_special_tokens", "is_normalized"),
    *("spaces_between_special_tokens", "detokenize", "output_text_buffer_length"),
    # These say what is returned:
    *("stream", "stream_options", "stream_interval", "output_kind", "output_mode", "echo"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "flat_logprobs"),
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
    *("return_text_in_logprobs", "return_flat_raw_top_logprobs", "return_entropy"),
    *("return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64", "return_bytes"),
    *("return_token_ids", "return_tokens_as_token_ids", "return_token_offsets"),
    *("return_prompt_text", "return_prompt_token_ids", "return_assistant_tokens_mask"),
    *("return_routed_experts", "routed_experts_start_len", "routed_experts_prompt_start"),
    *("return_indexer_topk", "return_sampling_mask", "sampling_logprobs_mode"),
    *("return_hidden_states", "return_meta_info", "return_cached_tokens_details"),
    *("return_spec_tokens_details", "return_input_ids_in_sglext", "return_output_ids_in_sglext"),
    *("return_tokenized_data", "separate_reasoning", "stream_reasoning"),
    # These say how the request is served. `watermarking` turns the watermark of vLLM on or off. It
    # is not refused, because a request without `watermarking` may have a watermark too.
    *("request_id", "rid", "session_id", "user", "metadata", "store", "service_tier", "priority"),
    *("cache_salt", "extra_key", "kv_transfer_params", "ec_transfer_params", "kv_hints"),
    *("skip_clone", "skip_reading_prefix_cache", "watermarking", "background", "no_logs"),
    *("log_metrics", "custom_labels", "external_trace_header", "conversation_id", "routing_key"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
    *("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "decode_tp_size"),
    *("http_worker_ipc", "received_time", "prompt_cache_key", "safety_identifier"),
}


def refuse_other_fields(request: Mapping[str, Any], where: str) -> None:
    """Refuse a request with a field that may change how tokens are drawn, and is not recorded.

    A field that is null counts as left out, as it does for the engines.

    Raises:
        EngineError: naming `where` and the field.
    """
    nested = request.get("sampling_params")
    holders = nested if isinstance(nested, list) else [nested or {}]
    for holder in (request, *holders):
        for name, value in holder.items() if isinstance(holder, Mapping) else ():
            if value is not None and not _changes_nothing(name, value):
                plain = " or ".join(quoted(known) for known in PLAIN.get(name, ()))
                raise EngineError(
                    f"{where}: the request has {quoted(name)} {quoted(value, 60)}, which may "
                    "change how its tokens are drawn, and no store records it: sample without it"
                    + (f", or with {plain}" if plain else "")
                )


def settings_of(request: Mapping[str, Any], where: str) -> SamplingSettings:
    """The sampling settings of a request. A setting that the request leaves out is None.

    The engine takes what a request leaves out from the model's generation_config.json, or from the
    options with which the server was started (`refuse_defaults`).

    Raises:
        EngineError: naming `where` and the field: a field that may change how tokens are drawn and
            is not recorded, a value of the wrong type or out of range, or a setting that differs
            between the prompts of the request.
    """
    refuse_other_fields(request, where)
    top_k = _number(request, "top_k", where)
    if top_k is not None and (top_k != int(top_k) or top_k < -1):
        raise EngineError(f"{where}: top_k must be a whole number from -1 on; got {quoted(top_k)}")
    with naming(where):
        max_tokens = most_tokens(request)
    return SamplingSettings(
        temperature=_number(request, "temperature", where),
        top_p=_number(request, "top_p", where, 1.0),
        top_k=None if top_k is None else max(int(top_k), 0),  # both -1 and 0 cut nothing off
        min_p=_number(request, "min_p", where, 1.0),
        max_tokens=max_tokens,
    )


def _number(
    request: Mapping[str, Any], name: str, where: str, most: float = _MOST_NUMBER
) -> float | None:
    """A number of a request; None if the request does not have it.

    The number stands at the top level of the request or in `sampling_params`. A request to SGLang
    with several prompts may have a list of `sampling_params`, which must all have the same number.
    """
    nested = request.get("sampling_params")
    holders = nested if isinstance(nested, list) else [nested]
    values = [holder.get(name) if isinstance(holder, Mapping) else None for holder in holders]
    if request.get(name) is not None:
        values = [request[name], *(value for value in values if value is not None)]
    # `is not` first: NaN is not equal to itself, and is refused as a number below.
    if any(value is not values[0] and value != values[0] for value in values):
        raise EngineError(
            f"{where}: {name} differs between the prompts of one request, or between the request "
            "and its sampling_params"
        )
    value = values[0] if values else None
    if value is None:
        return None
    least = -1.0 if name == "top_k" else 0.0
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise EngineError(
            f"{where}: {name} must be a number from {least:g} to {most:g}; got {quoted(value)}"
        )
    return float(value)


def left_out(engine: str, request: Mapping[str, Any]) -> list[str]:
    """The settings that the engine takes from the model's generation_config.json for this request.

    vLLM (`ModelConfig.get_diff_sampling_param`) and SGLang's chats
    (`ModelConfig.get_default_sampling_params`) take each setting that a request leaves out from
    this file. vLLM's /inference/v1/generate and SGLang's /generate do not read the file.
    """
    takes = {"vllm": "token_ids" not in request, "sglang": "messages" in request}
    if not takes.get(engine, False):
        return []
    return [name for name in _DEFAULTS if request.get(name) is None]


def refuse_defaults(
    engine: str, request: Mapping[str, Any], defaults: Mapping[str, Any], where: str
) -> None:
    """Refuse a request that leaves out a setting which the model's generation_config.json changes.

    Args:
        defaults: the fields of that file; empty if there is no such file.

    Raises:
        EngineError: naming `where`, the setting and the file's value.
    """
    for name in left_out(engine, request):
        value = defaults.get(name)
        if value is not None and value not in _DEFAULTS[name]:
            raise EngineError(
                f"{where}: the request leaves out {name}, and {engine} then takes the "
                f"{quoted(value)} of the model's generation_config.json: sample with {name} "
                f"{_DEFAULTS[name][0]}. If the server was started so that it takes another value "
                "(vLLM: --generation-config vllm), write that value into the line's request"
            )


def _changes_nothing(name: str, value: Any) -> bool:
    if name in _RECORDED or name in _FREE or value in PLAIN.get(name, ()):
        return True
    # With the `tool_choice` "auto", vLLM and SGLang force only calls of `strict` tools into a
    # grammar.
    return name == "tools" and isinstance(value, list) and not any(map(_is_strict, value))


def _is_strict(tool: Any) -> bool:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return not isinstance(function, Mapping) or bool(function.get("strict"))
