"""Options by other names: what vLLM, SGLang and llama.cpp call them, and what is spelt nearly right.

Refuses to know: which options there are.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

# A word of another engine → the option here that does it, or a sentence where there is none.
COUNTERPARTS = {
    "gpu_memory_utilization": "kv_memory (a size; unless it is said, KV pages take what weights and steps leave)",
    "mem_fraction_static": "kv_memory (a size; unless it is said, KV pages take what weights and steps leave)",
    "kv_cache_memory_bytes": "kv_memory",
    "kv_cache_dtype": "kv_dtype",
    "block_size": "page_size",
    "num_gpu_blocks_override": "kv_pages",
    "enable_prefix_caching": "prefix_cache (on, unless told otherwise)",
    "disable_radix_cache": "prefix_cache (False switches it off)",
    "kv_events_config": "kv_events, kv_events_replay and kv_events_topic",
    "swap_space": "kv_host",
    "kv_offloading_size": "kv_host",
    "api_server_count": "api_workers",
    "max_num_seqs": "max_seqs",
    "max_running_requests": "max_seqs",
    "max_num_batched_tokens": "max_batch_tokens",
    "chunked_prefill_size": "prefill_chunk",
    "enable_chunked_prefill": "prefill_chunk (prefill is always chunked; it bounds one request's part of a step)",
    "scheduling_policy": "scheduler",
    "schedule_policy": "scheduler",
    "enforce_eager": "graphs (False runs without captured CUDA graphs)",
    "disable_cuda_graph": "graphs (False runs without captured CUDA graphs)",
    "quantization": "quantize (of plain weights; a quantised checkpoint says so itself)",
    "load_format": "random_weights (for dummy)",
    "speculative_config": "speculation and draft_tokens",
    "speculative_algorithm": "speculation",
    "enable_lora": "lora or max_loras",
    "lora_modules": "lora",
    "context_length": "max_model_len",
    "n_ctx": "max_model_len",
    "ctx_size": "max_model_len",
    "num_ctx": "max_model_len",
    "n_threads": "threads",
    "model_path": "model",
    "tensor_parallel_size": "tensor_parallel",
    "tp_size": "tensor_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
    "decode_context_parallel_size": "context_parallel",
    "prefill_context_parallel_size": "context_parallel",
    "data_parallel_size": "replicas (of `quire serve`)",
    "dp_size": "replicas (of `quire serve`)",
    "enable_expert_parallel": "expert_parallel (with tensor_parallel)",
    "n_gpu_layers": "device (all layers are on one device)",
    "revision": "model (org/name@revision)",
    "download_dir": "QUIRE_CACHE in the environment",
}


def unknown_option(name: str, known: Collection[str]) -> str:
    """What to say of an option that there is not."""
    word = name.replace("-", "_")
    if word in COUNTERPARTS:
        return f"unknown option {name!r}: it is called {COUNTERPARTS[word]} here"
    if close := difflib.get_close_matches(word, known, n=3, cutoff=0.6):
        return f"unknown option {name!r}; did you mean {' or '.join(close)}?"
    return f"unknown option {name!r}; known options: {', '.join(sorted(known))}"
