"""Tensor parallelism of every family: ranks, here threads, compute one process's logits from their parts of the
weights, and send the bytes that the formula says."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from model_harness import run_model
from published_writer import gptq, write
from tiny_models import CONFIGS, SIZES, filled, prompts, tiny
from transformers import LlamaConfig

from quire.assets import resolve
from quire.model import load_model, read_spec
from quire.model.decoder_spec import Experts
from quire.model.sharding import exchanged_bytes, sharded_spec
from quire.types.errors import ConfigError

QUICK = [
    "llama-biased-tied", "one-kv-head", "qwen3", "olmo2-biased-tied", "gemma2", "cohere2", "phi3", "gpt2", "gpt-oss",
    "falcon-40b", "glm4-moe", "deepseek-v3", "qwen3-next", "granite-hybrid",
    "granite-hybrid-dense", "nemotron-h", "lfm2-moe", "llama4", "gemma4-moe",
]  # fmt: skip
EXPERTS = {
    "qwen2-moe", "granite-moe", "glm4-moe", "deepseek-v2", "deepseek-v3", "qwen3-next", "qwen3.5-moe", "granite-hybrid",
    "nemotron-h-moe", "lfm2-moe", "llama4", "gemma4-moe",
}  # fmt: skip
EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


class ThreadRanks:
    """Ranks of one process that meet at a barrier; `sent` as `RankGroup` counts it."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, given: list, whole_experts: bool = False):
        self.rank, self.size, self.sent, self.whole_experts = rank, size, 0, whole_experts
        self.pipeline = self.context = False
        self.tensor = None
        self._barrier, self._given = barrier, given

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._given[self.rank] = x.clone()
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.sent += 2 * (self.size - 1) * x.nbytes // self.size
        return torch.stack(self._all(x)).sum(0)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.sent += (self.size - 1) * x.nbytes
        return torch.cat(self._all(x), dim=1)


def on_ranks(size, work, **how):
    """What `work` makes of each rank."""
    barrier, given = threading.Barrier(size, timeout=60), [None] * size

    def one(rank):
        try:
            return work(ThreadRanks(rank, size, barrier, given, **how))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def same_logits(source, size=2, whole_experts=False, **options):
    """All ranks' logits are one process's."""
    asked = prompts(41, 29)
    whole = load_model(source, device="cpu", dtype=torch.float32, **options)
    wanted = run_model(whole, asked, chunk=13)
    assert torch.cat(wanted).std() > 0.01, "the model says something"

    def run(ranks):
        return run_model(load_model(source, device="cpu", dtype=torch.float32, ranks=ranks, **options), asked, chunk=13)

    for found in on_ranks(size, run, whole_experts=whole_experts):
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", EVERY)
def test_two_ranks_compute_one_process_s_logits(name, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    same_logits(resolve(str(tmp_path)).open())


def test_more_ranks_than_kv_heads_share_them(tmp_path):
    """Six heads on as many ranks, two KV heads: three ranks have copies of the same."""
    filled(LlamaConfig(**SIZES | {"intermediate_size": 84})).save_pretrained(tmp_path)
    same_logits(resolve(str(tmp_path)).open(), size=6)


@pytest.mark.parametrize(
    "name",
    ["qwen3-moe", "gpt-oss", "mixtral", *(pytest.param(n, marks=pytest.mark.slow) for n in sorted(EXPERTS))],
)
def test_expert_parallel_ranks_have_whole_experts(name, tmp_path):
    """Also such a number of them that ranks cannot have as many each."""
    tiny(name).save_pretrained(tmp_path)
    source = resolve(str(tmp_path)).open()
    same_logits(source, whole_experts=True)
    counts = {feed.count for layer in read_spec(source).layers if isinstance(feed := layer.feed, Experts)}
    for count in counts:
        parts = [sharded_spec(read_spec(source), 2, rank, whole_experts=True) for rank in range(2)]
        held = [next(f.held for layer in part.layers if isinstance(f := layer.feed, Experts)) for part in parts]
        assert [*held[0], *held[1]] == list(range(count))


def test_random_weights_are_the_same_however_they_are_divided(tmp_path):
    tiny("qwen3-moe").save_pretrained(tmp_path)
    same_logits(resolve(str(tmp_path)).open(), random_weights=True)


def test_quantised_checkpoints_are_divided(tmp_path):
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    write(tiny("block-sized"), tmp_path, config, gptq(4, 32))
    same_logits(resolve(str(tmp_path)).open())


@pytest.mark.parametrize("name", ["llama3", "olmo2", "gemma4-moe", "granite-hybrid", "granite-hybrid-dense"])
def test_bytes_by_the_formula(name, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    source = resolve(str(tmp_path)).open()

    def run(ranks):
        model = load_model(source, device="cpu", dtype=torch.float32, ranks=ranks)
        run_model(model, prompts(30, 12), last=True)
        return ranks.sent

    formula = exchanged_bytes(read_spec(source), 2, 4, tokens=42, rows=2, samples=2)
    assert on_ranks(2, run) == [formula - 8 * 2] * 2  # nothing is sampled: no tokens to tell of


@pytest.mark.parametrize(
    ("name", "size", "why"),
    [("llama3", 4, "6 attention heads"), ("llama3", 3, "2 KV heads"), ("llama2", 3, "80 numbers between the MLP")],
)
def test_what_cannot_be_divided_is_refused_by_name(name, size, why, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"tensor_parallel {size} cannot divide llama: {why}"):
        sharded_spec(read_spec(resolve(str(tmp_path)).open()), size)
