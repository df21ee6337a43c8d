"""Decoding of model shapes on a GPU with random weights, against the time that reading what a step touches would take.

python scripts/gpu_shapes.py qwen3-30b-a3b deepseek-v2-lite --batch 1 32 256
python scripts/gpu_shapes.py qwen3.5-9b --batch --prompt 80000      a long prompt, and the same again
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from quire.assets import resolve
from quire.bench.offline import run_workload
from quire.engine.link import Link, open_link
from quire.model import read_spec
from quire.model.decoder_spec import DecoderSpec, Experts
from quire.model.loading.memory_estimate import weight_bytes
from quire.types.config import EngineOptions
from quire.types.messages import Events, Submit
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

BANDWIDTH = 4.8e12  # bytes a second, H200
SHAPES = {
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
        "max_position_embeddings": 8192,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "num_hidden_layers": 27, "num_attention_heads": 16, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "vocab_size": 102400, "max_position_embeddings": 8192, "topk_method": "greedy",
    },
    "qwen3.5-9b": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "vocab_size": 248320,
        "max_position_embeddings": 131072, "full_attention_interval": 4, "tie_word_embeddings": False,
    },
}  # fmt: skip


def touched(spec: DecoderSpec, batch: int) -> float:
    """Bytes of 16-bit weights that a step of `batch` tokens reads, experts as chance would choose them."""
    total = (
        weight_bytes(spec, torch.bfloat16) - 2 * spec.vocab_size * spec.hidden
    )  # the table of embeddings is not read
    for layer in spec.layers:
        feed = layer.feed
        if isinstance(feed, Experts):
            missed = (1 - feed.top_k / feed.count) ** batch
            total -= missed * feed.count * 3 * feed.intermediate * spec.hidden * 2
    return total


def workload(batch: int, tokens: int) -> list[tuple[list[int], int]]:
    return [([(7 * row + place) % 1000 for place in range(64)], tokens) for row in range(batch)]


def first_token(link: Link, prompt: list[int]) -> float:
    """Seconds until it is there; what is cached stays."""
    began = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    link.send(Submit(Request(id=str(len(prompt)), prompt=prompt, params=params, arrival=time.time())))
    while not any(isinstance(message, Events) and message.events for message in link.receive(None)):
        pass
    return time.perf_counter() - began


def repeated(folder: str, prompt: int) -> str:
    """Seconds to the first token of a prompt, and of the same prompt and a little more."""
    options = EngineOptions.of(model=folder, random_weights=True, max_seqs=8, max_model_len=prompt + 4096)
    link = open_link(options, process=False)
    run_workload(link, workload(4, 8))
    tokens = [(13 * place * place) % 100_000 for place in range(prompt)]
    first, second, third = (first_token(link, tokens + more) for more in ([], [5, 6, 7], [8, 9]))
    link.close()
    return f"{prompt} tokens: {first:.2f} s, again {second:.3f} s ({second / first:.1%}), once more {third:.3f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--prompt", type=int, help="time a prompt of so many tokens, twice")
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    for name in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name]))
            spec = read_spec(resolve(folder).open())
            if args.prompt:
                print(name, repeated(folder, args.prompt), flush=True)
            if not args.batch:
                continue
            options = EngineOptions.of(
                model=folder, random_weights=True, prefix_cache=False, max_seqs=max(args.batch), max_model_len=2048
            )
            link = open_link(options, process=False)
            for batch in args.batch:
                run_workload(link, workload(batch, 8))
                long, short = (
                    min(run_workload(link, workload(batch, count)).seconds for _ in range(2))
                    for count in (2 * args.tokens, args.tokens)
                )
                step = (long - short) / args.tokens
                floor = touched(spec, batch) / BANDWIDTH
                print(f"{name} batch {batch}: {1e3 * step:.2f} ms a step, {floor / step:.0%} of bandwidth", flush=True)
            link.close()


if __name__ == "__main__":
    main()
