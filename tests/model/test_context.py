"""Context parallelism: ranks, here threads, compute one process's logits from their tokens and share of the pages,
and send the bytes that the formula says."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from model_harness import run_model
from tiny_models import CONFIGS, prompts, tiny

from quire.assets import resolve
from quire.kernels.context_split import zigzag
from quire.model import load_model, read_spec
from quire.model.blocks import context_stages
from quire.model.context_parallel import context_bytes, context_spec
from quire.types.errors import ConfigError

QUICK = ["llama-biased-tied", "one-kv-head", "gemma2", "gpt-oss", "gpt2", "deepseek-v3", "llama4", "gemma4"]
FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


class ThreadRanks:
    """Ranks of one process: queues from each to each, one for every transfer; `sent` as `RankGroup` counts it."""

    whole_experts, pipeline, context, tensor = False, False, True, None

    def __init__(self, rank: int, size: int, links: dict[tuple[int, int, int], queue.Queue]):
        self.rank, self.size, self.sent, self._links, self._begun = rank, size, 0, links, 0

    def _link(self, source: int, target: int, number: int) -> queue.Queue:
        return self._links.setdefault((source, target, number), queue.Queue())

    def transfer(self, sent, received):
        number, self._begun = self._begun, self._begun + 1
        for rank, x in sent.items():
            self.sent += x.nbytes
            self._link(self.rank, rank, number).put(x.clone())

        def wait():
            for rank, into in received.items():
                into.copy_(self._link(rank, self.rank, number).get(timeout=60))

        return wait


def on_ranks(size, source, work, **options):
    """What `work` makes of each rank's model."""
    links: dict[tuple[int, int, int], queue.Queue] = {}

    def one(rank):
        ranks = ThreadRanks(rank, size, links)
        return work(load_model(source, device="cpu", dtype=torch.float32, ranks=ranks, **options))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def same_logits(source, size=2, near=1e-4, **how):
    """Rank 0's logits are one process's: all of them, on every rank; and those of rows' last tokens."""
    whole = load_model(source, device="cpu", dtype=torch.float32)
    for chunk, last in ((13, False), (None, True), (13, True)):
        asked = prompts(41, 29, 2)
        wanted = run_model(whole, asked, chunk=chunk, last=last, **how)
        assert torch.cat(wanted).std() > 0.01, "the model says something"
        found = on_ranks(
            size,
            source,
            lambda model, asked=asked, chunk=chunk, last=last: run_model(
                model, asked, chunk=chunk, last=last, context=size, **how
            ),
        )
        for rank in found[:1] if last else found:
            for got, want in zip(rank, wanted, strict=True):
                torch.testing.assert_close(got, want, atol=near, rtol=near)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_compute_one_process_s_logits(name, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    source = resolve(str(tmp_path)).open()
    try:
        context_spec(read_spec(source), 2)
    except ConfigError as error:
        assert name not in QUICK
        pytest.skip(str(error))
    same_logits(source)


@pytest.mark.parametrize("name", ["gpt-oss", "llama4"])
def test_three_ranks_compute_one_process_s_logits(name, tmp_path):
    """Windows, sinks and chunks, and blocks that are handed on twice."""
    tiny(name).save_pretrained(tmp_path)
    same_logits(resolve(str(tmp_path)).open(), size=3, page_size=2)


@pytest.mark.parametrize(("kind", "near"), [("int8", 2e-3), ("int4", 2e-3)])
def test_rounded_pages_are_what_one_process_reads(kind, near, tmp_path):
    """Keys and values of the step itself too, which come round the ring. A number halfway may be rounded either way."""
    tiny("llama3").save_pretrained(tmp_path)
    same_logits(resolve(str(tmp_path)).open(), near=near, kv_dtype=kind)


@pytest.mark.parametrize(("count", "size"), [(4, 2), (41, 2), (100, 3), (4096, 8)])
def test_every_token_has_one_rank_and_every_rank_as_much_to_attend(count, size):
    parts = [[i for piece in zigzag(count, rank, size) for i in piece] for rank in range(size)]
    assert sorted(i for part in parts for i in part) == list(range(count))
    work = [sum(i + 1 for i in part) for part in parts]
    assert max(work) - min(work) <= 2 * count  # of count * count / 2 / size each: the pieces differ by a token
    assert parts[0][-1] == count - 1, "what is sampled is on the first rank"


@pytest.mark.parametrize("name", ["llama3", "gpt-oss", "deepseek-v3", "gemma4"])
@pytest.mark.parametrize("size", [2, 3])
def test_bytes_by_the_formula(name, size, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    source = resolve(str(tmp_path)).open()

    def run(model):
        run_model(model, prompts(40, 30, 2), last=True, chunk=25, context=size)
        return model.context.sent

    steps = [[(0, 25), (0, 25), (0, 2)], [(25, 15), (25, 5)]]
    wanted = [
        sum(context_bytes(read_spec(source), rank, size, 4, rows, samples=0) for rows in steps) for rank in range(size)
    ]
    assert on_ranks(size, source, run) == wanted


def test_what_is_on_its_way_round_the_ring_is_attended_meanwhile(tmp_path, monkeypatch):
    """On every hop but the last: begun, attended, waited for."""
    tiny("llama3").save_pretrained(tmp_path)
    source, size = resolve(str(tmp_path)).open(), 3
    attend = context_stages.partial_attention
    begun = threading.local()

    def run(model):
        events, transfer = [], model.context.transfer

        def observed(sent, received):
            events.append("begin")
            wait = transfer(sent, received)
            return lambda: (events.append("wait"), wait())

        model.context.transfer, begun.events = observed, events
        run_model(model, prompts(30), last=True, context=size)
        return events

    def attended(*parts, **how):
        begun.events.append("attend")
        return attend(*parts, **how)

    monkeypatch.setattr(context_stages, "partial_attention", attended)
    layer = ["begin", "attend", "wait"] * (size - 1) + ["attend"]
    assert on_ranks(size, source, run) == [layer * 4] * size


@pytest.mark.parametrize(
    ("name", "why"), [("lfm2", "ShortConv"), ("qwen3-next", "GatedDelta"), ("nemotron-h", "Mamba2")]
)
def test_what_cannot_be_divided_is_refused_by_name(name, why, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"context_parallel 2 cannot divide .*: .*recurrent layers .{why}"):
        context_spec(read_spec(resolve(str(tmp_path)).open()), 2)
