"""What every attention backend must do, against torch's own attention in float64 over dense K and V.

Pages are scattered over a pool of several layers, so a layer's view is strided; slots nobody wrote hold NaN.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.attention_backend import NO_TREE, PATH, AttentionBackend, AttentionSpec, Batch, GroupBatch, Paths
from quire.kernels.attention_mass import AttentionMassRows
from quire.kernels.backend_choice import backends_for, choose_backend
from quire.kernels.eager import sdpa_attention
from quire.kernels.eager.sdpa_attention import TorchSdpa
from quire.kernels.kv_views import LayerKV, take_slots
from quire.kernels.library.cudnn_prefill import CudnnPrefill, DenseRow

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LAYERS, LAYER = 3, 1


@dataclass
class Case:
    batch: Batch
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    q: torch.Tensor
    dense: list[tuple[torch.Tensor, torch.Tensor]]  # K and V of each row, [kv_len, kv_heads, dim]


def make_case(
    spec: AttentionSpec,
    rows: list[tuple[int, int]],  # (context, query tokens) of each row
    *,
    size: int = 16,
    seed: int = 0,
    shared: int = 0,  # leading pages that all rows have in common
    slack: int = 0,  # by how much the host overestimates lengths
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Case:
    torch.manual_seed(seed)
    lens = [context + count for context, count in rows]
    needed = [-(-(n + slack) // size) for n in lens]
    width = max(needed) + 1
    pool = torch.full((sum(needed) + 1, LAYERS, 2, size, spec.kv_heads, spec.head_dim), float("nan"))
    pool[0] = 0  # the null page
    free = list(range(1, pool.shape[0]))
    random.Random(seed).shuffle(free)
    table = torch.zeros(len(rows), width, dtype=torch.int32)
    common = [free.pop() for _ in range(shared)]
    prefix = torch.randn(2, shared * size, spec.kv_heads, spec.head_dim)
    dense = []
    for row, n in enumerate(lens):
        pages = common + [free.pop() for _ in range(needed[row] - shared)]
        table[row, : len(pages)] = torch.tensor(pages)
        kv = torch.cat((prefix, torch.randn(2, n - shared * size, spec.kv_heads, spec.head_dim)), dim=1)
        at = torch.arange(n)
        pool[torch.tensor(pages)[at // size], LAYER, :, at % size] = kv.transpose(0, 1)
        dense.append((kv[0].to(dtype), kv[1].to(dtype)))
    counts = [count for _, count in rows]
    positions = torch.cat([torch.arange(context, context + count) for context, count in rows])
    row_of = torch.repeat_interleave(torch.tensor(counts))
    slots = table[row_of, positions // size].long() * size + positions % size
    group = GroupBatch(size, table.to(device), slots.to(device))
    batch = Batch(
        positions=positions.to(device),
        query_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device),
        kv_len=torch.tensor(lens, dtype=torch.int32, device=device),
        counts=counts,
        kv_lens=[n + slack for n in lens],
        groups=(group,),
    )
    pool = pool.to(device, dtype)
    q = torch.randn(len(positions), spec.heads, spec.head_dim).to(device, dtype)
    return Case(batch, pool[:, LAYER, 0], pool[:, LAYER, 1], q, dense)


def run(backend: AttentionBackend, spec: AttentionSpec, case: Case) -> torch.Tensor:
    plan = backend.plan(case.batch, case.batch.groups[0], spec)
    args = (spec, case.q, LayerKV(case.k_pages, case.v_pages), case.batch, case.batch.groups[0], plan)
    first = backend.forward(*args)
    assert torch.equal(first, backend.forward(*args)), "a plan serves every layer of its group"
    return first


def oracle(spec: AttentionSpec, case: Case) -> torch.Tensor:
    outs, begin = [], 0
    share = spec.heads // spec.kv_heads
    for count, (k, v) in zip(case.batch.counts, case.dense, strict=True):
        q = case.q[begin : begin + count].cpu().double().transpose(0, 1)
        at = torch.arange(len(k) - count, len(k))[:, None]
        keys = torch.arange(len(k))[None]
        seen = (keys <= at) & (keys > at - (spec.window or len(k) + 1))
        if spec.chunked:
            seen &= keys // spec.window == at // spec.window
        k, v = (t.double().transpose(0, 1).repeat_interleave(share, 0) for t in (k, v))
        scores = q @ k.transpose(1, 2) * spec.scale
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        outs.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
        begin += count
    return torch.cat(outs)


def check(backend: AttentionBackend, spec: AttentionSpec, case: Case, tolerance: float = 1e-5) -> None:
    out = run(backend, spec, case)
    assert out.shape == case.q.shape and out.dtype == case.q.dtype
    torch.testing.assert_close(out.cpu().double(), oracle(spec, case), atol=tolerance, rtol=tolerance)


BATCHES = {
    "one token, nothing before it": [(0, 1)],
    "one row decoding": [(40, 1)],
    "one prompt": [(0, 33)],
    "page boundaries": [(14, 1), (15, 1), (16, 1), (31, 1), (32, 1), (0, 15), (0, 16), (0, 17)],
    "chunks continuing a context": [(16, 7), (5, 7), (31, 2), (90, 16), (1, 1)],
    "mixed, out of order": [(3, 1), (0, 20), (100, 1), (50, 5), (7, 1), (0, 20), (260, 1), (0, 2)],
    "very different lengths": [(2, 1), (900, 1), (5, 1), (880, 1), (1, 1), (400, 1)],
}
HEADS = {"MHA": (4, 4), "MQA": (6, 1), "GQA": (9, 3)}

BACKENDS = [*backends_for(torch.device("cpu")), CudnnPrefill(TorchSdpa(), long=3)]
backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
devices = pytest.mark.parametrize("device", DEVICES)


def spec_of(heads: tuple[int, int] = (9, 3), window: int | None = None, dim: int = 32) -> AttentionSpec:
    return AttentionSpec(heads[0], heads[1], dim, scale=0.3, window=window)


@devices
@backends
@pytest.mark.parametrize("window", [None, 1, 6, 16, 40, 5000])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_batches(backend, device, heads, window, rows):
    spec = spec_of(heads, window)
    check(backend, spec, make_case(spec, rows, device=device))


@devices
@backends
@pytest.mark.parametrize("chunk", [1, 6, 16, 40])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_chunked_attention(backend, device, chunk, rows):
    spec = replace(spec_of(window=chunk), chunked=True)
    check(backend, spec, make_case(spec, rows, device=device))


@devices
@backends
@pytest.mark.parametrize("window", [None, 6, 40])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_soft_caps(backend, device, window, rows, monkeypatch):
    monkeypatch.setattr(sdpa_attention, "SCORES", 300)  # several pieces of a prompt
    spec = replace(spec_of(window=window), softcap=1.5)
    if refusal := backend.supports(spec, torch.device(device)):
        assert "soft cap" in refusal
        return
    case = make_case(spec, rows, device=device)
    check(backend, spec, case)
    if max(case.batch.kv_lens) > 1 != window:  # one key has all the weight
        assert (oracle(spec, case) - oracle(replace(spec, softcap=None), case)).abs().max() > 0.01


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_rows_that_ask_what_they_attend_to(softcap):
    """The same result as all others have, and what they paid, which is all there is."""
    spec = replace(spec_of(window=30), softcap=softcap)
    case = make_case(spec, [(40, 1), (5, 7), (0, 20)], size=4)
    case.k_pages.nan_to_num_(0.0)
    case.v_pages.nan_to_num_(0.0)
    case.batch.asks, case.batch.mass = [0, 2], torch.zeros(3, case.batch.groups[0].page_table.shape[1])
    backend = AttentionMassRows(TorchSdpa())
    plan = backend.plan(case.batch, case.batch.groups[0], spec)
    args = (spec, case.q, LayerKV(case.k_pages, case.v_pages), case.batch, case.batch.groups[0], plan)
    torch.testing.assert_close(backend.forward(*args).double(), oracle(spec, case), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(case.batch.mass.sum(1), torch.tensor([9.0, 0.0, 180.0]))  # nine heads a query


@backends
@pytest.mark.parametrize("window", [None, 6, 40])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_rows_of_trees_read_their_own_branches(backend, window, size):
    """The same keys, those of a branch at other places than their positions: the same result."""
    spec, rng = spec_of(window=window), random.Random(size)
    rows = [(40, 1), (41, 1), (9, 1), (64, 1), (3, 5), (47, 1)]
    case = make_case(spec, rows, size=size, slack=PATH)  # pages for other branches
    case.batch.kv_lens = [context + count for context, count in rows]
    for pages in (case.k_pages, case.v_pages):
        pages.nan_to_num_(nan=7.0)
    expected = run(backend, spec, case)
    bases, paths, table = [], [], case.batch.groups[0].page_table
    for row, (context, count) in enumerate(rows):
        deep = rng.randrange(min(context, 9)) if count == 1 and row else -1  # the first is in no tree
        base = context - deep if deep >= 0 else NO_TREE
        branch = sorted(rng.sample(range(PATH), deep + 1))  # a guess comes after the one it follows
        for pages, side in ((case.k_pages, 0), (case.v_pages, 1)):
            for i, place in enumerate(branch):
                at = base + place
                pages[table[row, at // size].long(), at % size] = case.dense[row][side][base + i]
            for place in {*range(deep + 1)} - {*branch}:
                at = base + place
                pages[table[row, at // size].long(), at % size] = 7.0  # a guess of another branch
        bases.append(base)
        signed = sum(place << 4 * i for i, place in enumerate(branch))
        paths.append(signed - (signed >> 63 << 64))
    case.batch.paths = Paths(torch.tensor(bases, dtype=torch.int32), torch.tensor(paths))
    assert torch.equal(run(backend, spec, case), expected)


@devices
@backends
@pytest.mark.parametrize("seed", range(8))
def test_random_batches(backend, device, seed):
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 5])
    spec = spec_of((kv_heads * rng.choice([1, 2, 7]), kv_heads), rng.choice([None, None, 3, 30]), rng.choice([8, 24]))
    rows = [
        (rng.choice([0, rng.randrange(200)]), rng.choice([1, 1, 1, rng.randrange(1, 60)]))
        for _ in range(rng.randrange(1, 30))
    ]
    check(backend, spec, make_case(spec, rows, size=rng.choice([1, 4, 16]), seed=seed, device=device))


@devices
@backends
def test_rows_sharing_pages(backend, device):
    spec = spec_of()
    check(backend, spec, make_case(spec, [(40, 1), (33, 9), (60, 1), (32, 1)], shared=2, device=device))


@devices
@backends
@pytest.mark.parametrize("window", [None, 20])
def test_host_lengths_may_be_upper_bounds(backend, device, window):
    spec = spec_of(window=window)
    rows = [(12, 4), (40, 1), (15, 1), (16, 4), (0, 4), (63, 1)]
    check(backend, spec, make_case(spec, rows, slack=5, device=device))


@devices
@backends
def test_half_precision(backend, device):
    spec = spec_of()
    slow = device == "cpu" and isinstance(backend, CudnnPrefill)  # its products, on a CPU that has none of bfloat16
    dtype = torch.float16 if slow else torch.bfloat16
    check(backend, spec, make_case(spec, BATCHES["mixed, out of order"], dtype=dtype, device=device), 3e-2)


@backends
def test_neighbours_do_not_matter(backend):
    """A row alone and among others agrees to rounding."""
    spec = spec_of(window=None)
    rows = [(70, 1), (3, 1), (0, 21), (300, 1), (11, 5)]
    case = make_case(spec, rows)
    together, begin = run(backend, spec, case), 0
    for row, count in enumerate(case.batch.counts):
        tokens = slice(begin, begin + count)
        group = case.batch.groups[0]
        alone = Batch(
            positions=case.batch.positions[tokens],
            query_start=torch.tensor([0, count], dtype=torch.int32),
            kv_len=case.batch.kv_len[row : row + 1],
            counts=[count],
            kv_lens=[case.batch.kv_lens[row]],
            groups=(GroupBatch(group.tokens_per_page, group.page_table[row : row + 1], group.kv_slots[tokens]),),
        )
        single = Case(alone, case.k_pages, case.v_pages, case.q[tokens], [case.dense[row]])
        torch.testing.assert_close(run(backend, spec, single), together[tokens], atol=2e-6, rtol=1e-5)
        begin += count


def test_choice_is_explained():
    backend, reasons = choose_backend(spec_of(window=8), torch.device("cpu"))
    assert backend.name == "torch-sdpa"
    assert reasons == ["attention (9 heads, 3 KV, dim 32, window 8): torch-sdpa"]


def test_only_rows_of_16_bits_are_dense():
    """In 32 torch has no kernel for them that does not hold a square of all tokens: gigabytes for a long prompt."""
    case = make_case(spec_of(), [(0, 20), (7, 1)])
    prefill = CudnnPrefill(TorchSdpa(), long=3)
    planned = [
        prefill.plan(case.batch, case.batch.groups[0], replace(spec_of(), itemsize=size)).dense for size in (2, 4)
    ]
    assert planned == [[DenseRow(0, 0, 20, 0)], []]


def test_dense_rows_are_gathered_together():
    """A launch each would fill the device's queue, and the host would wait for it."""
    gathered = []

    def gather(sides, slots, *rest):
        gathered.append((len(sides), len(slots)))
        return take_slots(sides, slots, *rest)

    case = make_case(spec_of(), [(0, 20), (7, 1), (0, 600), (0, 9)])
    run(CudnnPrefill(TorchSdpa(), long=3, gather=gather), spec_of(), case)
    assert set(gathered) == {(2, 512 + 1024 + 512), (1, 512 + 1024 + 512)}  # K and V; queries


def test_prompts_are_answered_when_cudnn_fails(monkeypatch, caplog):
    """As it does where it finds no memory of its own, having said that it could."""
    spec, backend, attend = spec_of(), CudnnPrefill(TorchSdpa(), long=3), F.scaled_dot_product_attention
    case = make_case(spec, [(0, 20), (7, 1)])
    expected = run(backend, spec, case)
    calls = []

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
        return attend(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", failing)
    assert torch.equal(run(backend, spec, case), expected)
    assert "cuDNN failed" in caplog.text

    def broken(*arguments, **options):
        raise RuntimeError("cuDNN error: again")

    monkeypatch.setattr(F, "scaled_dot_product_attention", broken)
    with pytest.raises(RuntimeError, match="again"):
        run(backend, spec, case)
