"""Request fields that other servers, gateways and betas have and the published APIs do not, as data.

A body with one of them is taken: under another name where this server has the same thing (ALIASES), otherwise without
it. They are never taken for a misspelling. Fields that bodies here declare themselves are not listed. Refuses to know:
any particular body.
"""

from __future__ import annotations

from typing import Any, NamedTuple

IGNORED: dict[str, tuple[str, ...]] = {
    "vLLM": (
        *("chat_template", "detokenize", "echo", "guided_decoding_backend"),
        *("kv_transfer_params", "logits_processors"),
        *("logprob_token_ids", "media_io_kwargs", "mm_processor_kwargs", "prompt_embeds", "repetition_detection"),
        *("request_id", "return_prompt_text", "spaces_between_special_tokens"),
        *("vllm_xargs", "enable_response_messages", "previous_input_messages", "embed_dtype"),
        *("endianness", "data_parallel_rank", "lora_request", "stream_interval"),
    ),
    "SGLang": (
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "custom_logit_processor", "custom_params"),
        *("input_embeds", "logprob_start_len", "lora_path", "max_dynamic_patch", "min_dynamic_patch"),
        *("return_cached_tokens_details", "return_hidden_states", "return_meta_info", "return_routed_experts"),
        *("rid", "separate_reasoning", "session_params", "stop_regex", "stream_reasoning", "top_logprobs_num"),
    ),
    "llama.cpp": (
        *("backend_sampling", "cache_prompt", "chat_format", "dry_allowed_length", "dry_base", "dry_multiplier"),
        *("dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent", "dynatemp_range", "grammar_lazy"),
        *("grammar_triggers", "id_slot", "image_data", "input_extra", "input_prefix", "input_suffix", "lora"),
        *("min_keep", "mirostat", "mirostat_eta", "mirostat_tau", "n_cache_reuse", "n_cmpl", "n_discard", "n_indent"),
        *(
            "n_keep",
            "n_probs",
            "parse_tool_calls",
            "penalize_nl",
            "post_sampling_probs",
            "preserved_tokens",
            "reasoning_format",
        ),
        *("reasoning_in_content", "repeat_last_n", "response_fields", "return_progress", "samplers", "slot_id"),
        *("t_max_predict_ms", "t_max_prompt_ms", "thinking_forced_open", "timings_per_token", "tfs_z", "top_n_sigma"),
        *("typical_p", "xtc_probability", "xtc_threshold"),
    ),
    "LiteLLM": (
        *("additional_drop_params", "allowed_openai_params", "api_base", "api_key", "api_version", "base_url"),
        *("assistant_continue_message", "cache", "caching", "context_window_fallback_dict", "cooldown_time"),
        *("custom_llm_provider", "deployment_id", "drop_params", "enable_json_schema_validation"),
        *("ensure_alternating_roles", "extra_body", "extra_headers", "fallbacks", "guardrail_config", "guardrails"),
        *("hf_model_name", "input_cost_per_token", "litellm_call_id", "litellm_metadata", "litellm_session_id"),
        *("litellm_trace_id", "max_retries", "merge_reasoning_content_in_choices", "mock_response", "no-log"),
        *("num_retries", "organization", "output_cost_per_token", "preset_cache_key", "prompt_id", "prompt_variables"),
        *("provider_specific_fields", "provider_specific_header", "request_timeout", "supports_system_message"),
        *("tags", "timeout", "ttl", "use_in_pass_through", "user_continue_message"),
    ),
    "OpenRouter": (
        *("debug", "image_config", "models", "plugins", "preset", "provider", "reasoning_details", "route"),
        *("top_a", "trace", "transforms", "usage", "stream_cancellation"),
    ),
    "Anthropic betas": (
        *("allowed_callers", "anthropic_beta", "anthropic_version", "betas", "caller", "citations", "context_hint"),
        *("context_management", "defer_loading", "input_examples", "mcp_servers", "output_format"),
        *("cache_control", "cache_edits", "cache_reference"),
    ),
}


class Alias(NamedTuple):
    name: str  # what this server calls it
    neutral: tuple[Any, ...] = ()  # values that ask for nothing


# Names of the same thing, the ones to use in its stead where a body has several.
ALIASES: dict[str, tuple[Alias, ...]] = {
    "ebnf": (Alias("guided_grammar", ("",)),),
    "extra_key": (Alias("cache_salt"),),
    "grammar": (Alias("guided_grammar", ("",)),),
    "include_stop": (Alias("include_stop_str_in_output"),),
    "json_schema": (Alias("guided_json"),),
    "max_new_tokens": (Alias("max_tokens"), Alias("max_output_tokens")),
    "n_predict": (Alias("max_tokens", (-1, -2)), Alias("max_output_tokens", (-1, -2))),
    "no_stop_trim": (Alias("include_stop_str_in_output"),),
    "regex": (Alias("guided_regex", ("",)),),
    "repeat_penalty": (Alias("repetition_penalty"),),
    "return_tokens": (Alias("return_token_ids"),),
    "thinking_token_budget": (Alias("thinking_budget"),),
}

# What the same thing is called in another of the APIs served here: whoever sends it means ours.
MEANT: dict[str, tuple[str, ...]] = {
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    "max_output_tokens": ("max_completion_tokens", "max_tokens"),
    "max_tokens": ("max_output_tokens",),
    "messages": ("input",),
    "input": ("messages", "prompt"),
    "prompt": ("messages", "input"),
    "num_predict": ("max_tokens", "max_output_tokens"),
    "reasoning_effort": ("reasoning",),
    "response_format": ("text", "format", "output_config"),
    "stop_sequences": ("stop",),
    "stop": ("stop_sequences",),
    "system": ("messages", "instructions"),
    "instructions": ("system",),
}

KNOWN = frozenset(name for names in IGNORED.values() for name in names) | ALIASES.keys()
