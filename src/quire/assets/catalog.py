"""Short names of models on the hub: `qwen3:8b`, `llama3.1:8b-q4`. A size alone takes the quantisation that most people
run; `-q4` to `-q8` or a quantisation's whole name another one of the same repository, `-bf16` the checkpoint itself.

Sizes are about what the repositories publish, for choosing; before anything is fetched the hub is asked. Refuses to
know: how anything is fetched.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

_QUANT = re.compile(r"(.+?)-(q\d\w*|f16|bf16)")
_BEST = {"q4": "Q4_K_M", "q5": "Q5_K_M", "q6": "Q6_K", "q8": "Q8_0"}


@dataclass(frozen=True)
class CatalogModel:
    name: str
    repository: str  # of GGUF files
    tag: str
    gigabytes: float  # of that file, about
    checkpoint: str  # the repository they were made from


CATALOG = {
    entry[0]: CatalogModel(*entry)
    for entry in (
        ("deepseek-r1:1.5b", "bartowski/DeepSeek-R1-Distill-Qwen-1.5B-GGUF", "Q4_K_M", 1.12,
         "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
        ("deepseek-r1:7b", "bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF", "Q4_K_M", 4.68,
         "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
        ("deepseek-r1:8b", "bartowski/DeepSeek-R1-Distill-Llama-8B-GGUF", "Q4_K_M", 4.92,
         "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"),
        ("gemma3:1b", "bartowski/google_gemma-3-1b-it-GGUF", "Q4_K_M", 0.81, "google/gemma-3-1b-it"),
        ("gemma3:4b", "bartowski/google_gemma-3-4b-it-GGUF", "Q4_K_M", 2.49, "google/gemma-3-4b-it"),
        ("gemma3:12b", "bartowski/google_gemma-3-12b-it-GGUF", "Q4_K_M", 7.30, "google/gemma-3-12b-it"),
        ("gemma3:27b", "bartowski/google_gemma-3-27b-it-GGUF", "Q4_K_M", 16.5, "google/gemma-3-27b-it"),
        ("gpt-oss:20b", "ggml-org/gpt-oss-20b-GGUF", "MXFP4", 12.1, "openai/gpt-oss-20b"),
        ("gpt-oss:120b", "ggml-org/gpt-oss-120b-GGUF", "MXFP4", 63.4, "openai/gpt-oss-120b"),
        ("llama3.1:8b", "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", "Q4_K_M", 4.92,
         "meta-llama/Llama-3.1-8B-Instruct"),
        ("llama3.2:1b", "bartowski/Llama-3.2-1B-Instruct-GGUF", "Q4_K_M", 0.81, "meta-llama/Llama-3.2-1B-Instruct"),
        ("llama3.2:3b", "bartowski/Llama-3.2-3B-Instruct-GGUF", "Q4_K_M", 2.02, "meta-llama/Llama-3.2-3B-Instruct"),
        ("llama3.3:70b", "bartowski/Llama-3.3-70B-Instruct-GGUF", "Q4_K_M", 42.5, "meta-llama/Llama-3.3-70B-Instruct"),
        ("mistral:7b", "bartowski/Mistral-7B-Instruct-v0.3-GGUF", "Q4_K_M", 4.37, "mistralai/Mistral-7B-Instruct-v0.3"),
        ("phi4:14b", "bartowski/phi-4-GGUF", "Q4_K_M", 9.05, "microsoft/phi-4"),
        ("qwen2.5:0.5b", "bartowski/Qwen2.5-0.5B-Instruct-GGUF", "Q4_K_M", 0.40, "Qwen/Qwen2.5-0.5B-Instruct"),
        ("qwen2.5:7b", "bartowski/Qwen2.5-7B-Instruct-GGUF", "Q4_K_M", 4.68, "Qwen/Qwen2.5-7B-Instruct"),
        ("qwen2.5-coder:7b", "bartowski/Qwen2.5-Coder-7B-Instruct-GGUF", "Q4_K_M", 4.68,
         "Qwen/Qwen2.5-Coder-7B-Instruct"),
        ("qwen3:0.6b", "Qwen/Qwen3-0.6B-GGUF", "Q8_0", 0.64, "Qwen/Qwen3-0.6B"),
        ("qwen3:1.7b", "Qwen/Qwen3-1.7B-GGUF", "Q8_0", 1.83, "Qwen/Qwen3-1.7B"),
        ("qwen3:4b", "Qwen/Qwen3-4B-GGUF", "Q4_K_M", 2.50, "Qwen/Qwen3-4B"),
        ("qwen3:8b", "Qwen/Qwen3-8B-GGUF", "Q4_K_M", 5.03, "Qwen/Qwen3-8B"),
        ("qwen3:14b", "Qwen/Qwen3-14B-GGUF", "Q4_K_M", 9.00, "Qwen/Qwen3-14B"),
        ("qwen3:30b-a3b", "Qwen/Qwen3-30B-A3B-GGUF", "Q4_K_M", 18.6, "Qwen/Qwen3-30B-A3B"),
        ("qwen3:32b", "Qwen/Qwen3-32B-GGUF", "Q4_K_M", 19.8, "Qwen/Qwen3-32B"),
        ("smollm2:360m", "bartowski/SmolLM2-360M-Instruct-GGUF", "Q4_K_M", 0.27, "HuggingFaceTB/SmolLM2-360M-Instruct"),
        ("smollm2:1.7b", "bartowski/SmolLM2-1.7B-Instruct-GGUF", "Q4_K_M", 1.06, "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
        ("smollm3:3b", "ggml-org/SmolLM3-3B-GGUF", "Q4_K_M", 1.92, "HuggingFaceTB/SmolLM3-3B"),
    )
}  # fmt: skip


def hub_name(name: str) -> str | None:
    """What the hub calls a model of the catalogue, with its quantisation; None if it is not in it."""
    name = name.lower()
    if (known := CATALOG.get(name)) is not None:
        return f"{known.repository}:{known.tag}"
    match = _QUANT.fullmatch(name)
    if match is None or (known := CATALOG.get(match[1])) is None:
        return None
    if match[2] == "bf16":
        return known.checkpoint
    return f"{known.repository}:{_BEST.get(match[2], match[2].upper())}"


def similar(name: str) -> list[str]:
    """Names and repositories of the catalogue that are spelt much like this."""
    spelt = {model.name: model.name for model in CATALOG.values()}
    for model in CATALOG.values():
        spelt |= {model.repository.lower(): model.repository, model.checkpoint.lower(): model.checkpoint}
        spelt[model.name.replace(":", "")] = spelt[model.name.replace(":", "-")] = model.name
    found = difflib.get_close_matches(name.lower(), spelt, n=3, cutoff=0.75)
    return list(dict.fromkeys(spelt[close] for close in found))
