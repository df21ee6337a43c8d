"""Check and time the Triton kernels on a CUDA machine, at the shapes of an 8-billion-parameter Llama.

    PYTHONPATH=src python3 scripts/gpu_kernels.py [--only gemv,attention] [--json FILE] [--jobs 12]

Needs torch, triton and numpy. Compiles every variant in parallel first (the disk cache keeps them), then prints one
line a measurement and, at the end, the best variant of each shape. An exception costs its own line only; a kernel
that wedges the device costs a restart of the process. Times are medians of graph replays over rotating inputs.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from quire.bench.workloads import chat
from quire.kernels.attention_backend import AttentionSpec, Batch, GroupBatch
from quire.kernels.kv_views import LayerKV
from quire.kernels.reference import plain_ops as plain
from quire.kernels.reference.plain_attention import ReferenceAttention
from quire.kernels.triton import activation, cascade, configs, gemm, gemv, norm
from quire.kernels.triton import draw_kernels as drawing
from quire.kernels.triton import embedding_gather as gather
from quire.kernels.triton import paged_attention as paged
from quire.kernels.triton import plain_twins as twins
from quire.kernels.triton import rope_kernel as rope
from quire.kernels.triton import sampling_kernels as sampling
from quire.kernels.triton.configs import Matmul, Tile

HEADS, KV, DIM, HIDDEN, FFN, VOCAB, PAGE = 32, 8, 128, 4096, 14336, 128256, 16
QKV = (HEADS + 2 * KV) * DIM
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass
class Trial:
    kernel: str
    shape: str
    variant: str
    run: Callable[[int], object]  # with the i-th set of inputs
    sets: int = 1
    bytes: float = 0.0
    flops: float = 0.0
    error: Callable[[], float] | None = None  # relative, against the twin


def against(run: Callable[[int], torch.Tensor], x: torch.Tensor, w: torch.Tensor, options: dict) -> Callable[[], float]:
    return lambda: distance(run(0), twins.matmul(x, w, **options))


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.float() - expected.float()).norm() / expected.float().norm()).item()


def random(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda", dtype=torch.float32) * scale).to(dtype)


# --- element-wise -----------------------------------------------------------------------------------------------


def elementwise() -> Iterator[Trial]:
    weight = random(HIDDEN)
    for tokens in (1, 256, 8192):
        x, residual = random(tokens, HIDDEN), random(tokens, HIDDEN)
        size = tokens * HIDDEN * 2
        yield Trial("rms_norm", f"{tokens}", "triton", lambda i, x=x: norm.rms_norm(x, weight, 1e-5), 1, 2 * size, 0,
                    lambda x=x: distance(norm.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5)))  # fmt: skip
        yield Trial("rms_norm", f"{tokens}", "torch", lambda i, x=x: F.rms_norm(x, (HIDDEN,), weight, 1e-5), 1,
                    2 * size)  # fmt: skip

        def added(x: torch.Tensor = x, residual: torch.Tensor = residual) -> float:
            a, b = residual.clone(), residual.clone()
            y, z = norm.add_rms_norm(x, a, weight, 1e-5), plain.add_rms_norm(x, b, weight, 1e-5)
            return distance(y, z) + distance(a, b)

        small = x * 0.001
        run = lambda i, x=small, r=residual: norm.add_rms_norm(x, r, weight, 1e-5)  # noqa: E731
        yield Trial("add_rms_norm", f"{tokens}", "triton", run, 1, 4 * size, 0, added)
        yield Trial("rms_norm_fp8", f"{tokens}", "triton", lambda i, x=x: norm.rms_norm_fp8(x, None, weight, 1e-5), 1,
                    1.5 * size, 0, lambda x=x: fp8_error(norm.rms_norm_fp8(x, None, weight, 1e-5),
                                                         plain.rms_norm(x.float(), weight, 1e-5)))  # fmt: skip
        wide = random(tokens, 2 * FFN)
        moved = tokens * FFN * 6
        yield Trial("silu_and_mul", f"{tokens}", "triton", lambda i, x=wide: activation.silu_and_mul(x), 1, moved, 0,
                    lambda x=wide: distance(activation.silu_and_mul(x), plain.act_and_mul(x, "silu")))  # fmt: skip
        yield Trial("silu_quantise", f"{tokens}", "triton", lambda i, x=wide: activation.quantise_fp8(x, gated=True), 1,
                    moved * 5 / 6, 0, lambda x=wide: fp8_error(activation.quantise_fp8(x, gated=True),
                                                               plain.act_and_mul(x.float(), "silu")))  # fmt: skip
        yield from rotations(tokens)
    table, index = random(VOCAB, HIDDEN), torch.randint(VOCAB, (256,), device="cuda")
    yield Trial("gather", "256", "triton", lambda i: gather.gather_rows(table, index), 1, 4 * 256 * HIDDEN, 0,
                lambda: distance(gather.gather_rows(table, index), table[index]))  # fmt: skip


def fp8_error(got: tuple[torch.Tensor, torch.Tensor], expected: torch.Tensor) -> float:
    twin = twins.quantise_fp8(expected)
    return distance(got[0].float() * got[1][:, None], twin[0].float() * twin[1][:, None])


def rotations(tokens: int) -> Iterator[Trial]:
    qkv = random(tokens, QKV)
    pages = -(-tokens // PAGE) + 1
    pool = random(pages, 2, 2, PAGE, KV, DIM)
    slots = torch.randperm(tokens, device="cuda") + PAGE
    frequencies = 500000.0 ** -(torch.arange(DIM // 2, device="cuda") / (DIM // 2))
    cos, sin = plain.rope_tables(torch.arange(tokens, device="cuda"), frequencies, 1.0, BF16)
    for name, norms in (("rope", {}), ("rope_normed", {"q_norm": random(DIM), "k_norm": random(DIM), "eps": 1e-5})):

        def check(norms: dict = norms) -> float:
            a, b = pool.clone(), pool.clone()
            q = rope.rope_and_write(qkv.clone(), HEADS, cos, sin, LayerKV(a[:, 1, 0], a[:, 1, 1]), slots, **norms)
            r = twins.rope_and_write(qkv.clone(), HEADS, cos, sin, LayerKV(b[:, 1, 0], b[:, 1, 1]), slots, **norms)
            return distance(q, r) + distance(a, b)

        out = torch.empty(tokens, HEADS, DIM, device="cuda", dtype=BF16)
        run = lambda i, n=norms, out=out: rope.rope_and_write(  # noqa: E731
            qkv, HEADS, cos, sin, LayerKV(pool[:, 1, 0], pool[:, 1, 1]), slots, q_out=out, **n
        )
        yield Trial(name, f"{tokens}", "triton", run, 1, 4 * tokens * QKV, 0, check)


# --- sampling ---------------------------------------------------------------------------------------------------


def load_noise():
    """The noise module by path: its package imports more than this machine may have."""
    path = Path(plain.__file__).parents[2] / "generation" / "sampling" / "noise.py"
    spec = importlib.util.spec_from_file_location("quire_noise", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draws() -> Iterator[Trial]:
    noise = load_noise()
    off, heat = (VOCAB, math.inf, -math.inf), 0.8
    for rows, scale in itertools.product((1, 32, 256), (0.5, 3.0)):  # nearly flat, and a few likely ones
        logits = random(rows, VOCAB, dtype=torch.bfloat16, scale=scale)
        ids = torch.arange(rows, device="cuda")
        stream, size = noise.streams(ids, ids * 0), rows * VOCAB * 2
        case = f"{rows} x{scale}"

        def differ(got: torch.Tensor, scores: torch.Tensor) -> float:
            return (got != scores.argmax(-1)).float().mean().item()

        yield Trial("argmax", case, "triton", lambda i, x=logits: sampling.argmax(x), 1, size, 0,
                    lambda x=logits: differ(sampling.argmax(x), x))  # fmt: skip
        yield Trial("argmax", case, "torch", lambda i, x=logits: x.argmax(-1), 1, size)
        for name, (top_k, top_p, floor) in {
            "greedy": off, "temperature": off, "top_p .9": (VOCAB, 0.9, off[2]), "top_p .5": (VOCAB, 0.5, off[2]),
            "min_p .1": (*off[:2], math.log(0.1)), "top_k 50": (50, *off[1:]), "top_k 50 top_p .9": (50, 0.9, off[2]),
            "top_k 500": (500, *off[1:]), "top_k 20000": (20000, *off[1:]),
        }.items():  # fmt: skip
            numbers = torch.zeros(rows, 11, dtype=torch.int64, device="cuda")
            numbers[:, 0], numbers[:, 2] = stream, top_k
            floats = torch.tensor([top_p, 0.0 if name == "greedy" else heat, floor], dtype=torch.float64)
            numbers[:, 5:8] = floats.view(torch.int64).cuda()
            args = (logits, numbers, ids, ids + 9)

            def check(args=args, cuts=(top_k, top_p, floor), greedy=name == "greedy", stream=stream) -> float:
                top_k, top_p, floor = cuts
                x = args[0].float()
                if greedy:
                    return differ(drawing.draw(*args), x)
                order = x.sort(dim=-1, descending=True, stable=True)
                kept = torch.arange(VOCAB, device="cuda") < top_k
                kept = kept & (order.values >= order.values[:, :1] + heat * floor)
                mass = ((order.values - order.values[:, :1]) / heat).exp().double() * kept
                upto = mass.cumsum(-1)
                kept &= (upto - mass) < top_p * upto[:, -1:]
                allowed = torch.zeros_like(x, dtype=torch.bool).scatter_(1, order.indices, kept)
                scores = noise.gumbel(noise.row_keys(stream, args[3]), torch.arange(VOCAB, device="cuda")) * heat + x
                return differ(drawing.draw(*args), scores.masked_fill(~allowed, -math.inf))

            yield Trial("draw " + name, case, "triton", lambda i, a=args: drawing.draw(*a), 1, size, 0, check)


# --- products ---------------------------------------------------------------------------------------------------

SMALL = [
    Matmul(64, 128, 4, 4), Matmul(64, 128, 4, 4, splits=2), Matmul(64, 128, 4, 4, splits=4), Matmul(64, 64, 4, 5),
    Matmul(128, 128, 4, 4), Matmul(128, 128, 4, 4, splits=2), Matmul(128, 64, 4, 5), Matmul(128, 64, 8, 5, splits=2),
    Matmul(32, 128, 4, 4, rows=64), Matmul(32, 128, 4, 5, rows=64), Matmul(64, 128, 4, 4, splits=2, rows=64),
]  # fmt: skip
LAYERS = {  # name: (outputs, reduction, what `row_matmul` does beside the product)
    "qkv": (QKV, HIDDEN, "norm"),
    "o": (HIDDEN, HIDDEN, "residual"),
    "gate_up": (2 * FFN, HIDDEN, "norm gated"),
    "down": (HIDDEN, FFN, "residual"),
}


def weights(outputs: int, width: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    """Enough copies that none is in the cache when its turn comes."""
    size = outputs * width * (1 if dtype == FP8 else 2)
    return [random(outputs, width, scale=width**-0.5).to(dtype) for _ in range(max(1, min(8, math.ceil(3e8 / size))))]


def row_options(kind: str, width: int, residual: torch.Tensor) -> dict:
    options: dict = {"norm": random(width), "eps": 1e-5} if "norm" in kind else {"residual": residual}
    return options | {"gated": "gated" in kind}


def small_products() -> Iterator[Trial]:
    for name, (outputs, width, kind) in LAYERS.items():
        copies = weights(outputs, width)
        moved = outputs * width * 2
        for rows in (1, 2, 8, 16, 32, 64):
            x, residual = random(rows, width), random(rows, outputs)
            yield Trial("few rows", f"{name} {rows}", "cublas", lambda i, x=x, w=copies: F.linear(x, w[i]),
                        len(copies), moved)  # fmt: skip
            if rows <= 2:
                options = row_options(kind, width, residual)
                run = lambda i, x=x, w=copies, o=options: gemv.row_matmul(x, w[i], **o)  # noqa: E731
                yield Trial("few rows", f"{name} {rows}", "row_matmul", run, len(copies), moved, 0,
                            against(run, x, copies[0], options))  # fmt: skip
            options = {"residual": residual}
            for config in SMALL:
                run = lambda i, x=x, w=copies, o=options, c=config: gemv.small_matmul(x, w[i], config=c, **o)  # noqa: E731
                yield Trial("few rows", f"{name} {rows}", repr(config), run, len(copies), moved, 0,
                            against(run, x, copies[0], options))  # fmt: skip


def products_fp8() -> Iterator[Trial]:
    for name, (outputs, width, kind) in LAYERS.items():
        eight = weights(outputs, width, FP8)
        scale = torch.full((outputs,), 0.01, device="cuda")
        for rows in (1, 16, 64, 128, 256, 512, 1024):
            x, moved, shape = random(rows, width), outputs * width, f"{name} {rows}"
            xq, xs = twins.quantise_fp8(x)
            options = {"x_scale": xs, "weight_scale": scale, "out_dtype": BF16}
            for fast in (False, True):
                run = lambda i, x=xq, s=xs, c=scale, f=fast, w=eight: torch._scaled_mm(  # noqa: E731
                    x, w[i].T, scale_a=s[:, None], scale_b=c[None], out_dtype=BF16, use_fast_accum=f
                )
                yield Trial("fp8", shape, f"scaled_mm, fast {fast}", run, len(eight), moved)
            if rows == 1:
                options = row_options(kind, width, random(rows, outputs)) | {"weight_scale": scale}
                run = lambda i, x=x, w=eight, o=options: gemv.row_matmul(x, w[i], **o)  # noqa: E731
                yield Trial("fp8", shape, "row_matmul", run, len(eight), moved, 0, against(run, x, eight[0], options))
                options = {"x_scale": xs, "weight_scale": scale, "out_dtype": BF16}
            function, configs_tried = (gemv.small_matmul, SMALL_FP8) if rows <= 128 else (gemm.matmul, LARGE_FP8)
            for config in configs_tried:
                if config.rows and config.rows < rows <= 128:
                    continue
                run = lambda i, x=xq, w=eight, o=options, c=config, f=function: f(x, w[i], config=c, **o)  # noqa: E731
                yield Trial("fp8", shape, repr(config), run, len(eight), moved, 0, against(run, xq, eight[0], options))


SMALL_FP8 = [
    Matmul(64, 256, 4, 4), Matmul(64, 256, 4, 4, splits=2), Matmul(64, 256, 4, 4, splits=4), Matmul(64, 128, 4, 5),
    Matmul(128, 256, 4, 4), Matmul(128, 256, 4, 4, splits=2), Matmul(128, 128, 4, 5),
    Matmul(32, 256, 4, 4, rows=64), Matmul(32, 256, 4, 5, rows=64), Matmul(64, 256, 4, 4, splits=2, rows=64),
]  # fmt: skip
LARGE_FP8 = [
    Matmul(64, 128, 4, 5, rows=128), Matmul(256, 128, 8, 3, rows=128), Matmul(128, 128, 8, 4, rows=128),
    Matmul(128, 128, 4, 4, rows=64),
]  # fmt: skip


def large_products() -> Iterator[Trial]:
    """cuBLAS, with the residual inside and without, and the tiling that is the same for every batch."""
    for name, (outputs, width, _) in LAYERS.items():
        copies = weights(outputs, width)
        for rows in (64, 128, 256, 512, 1024, 8192):
            x, stream = random(rows, width), random(rows, outputs)
            flops, shape = 2.0 * rows * outputs * width, f"{name} {rows}"
            yield Trial("matmul", shape, "cublas", lambda i, x=x, w=copies: F.linear(x, w[i]), len(copies), 0, flops)
            run = lambda i, x=x, w=copies, s=stream: s.addmm_(x, w[i].T)  # noqa: E731
            yield Trial("matmul", shape, "cublas into the residual", run, len(copies), 0, flops)
            run = lambda i, x=x, w=copies: gemm.matmul(x, w[i], configs.INVARIANT_MATMUL[2])  # noqa: E731
            yield Trial("matmul", shape, "invariant", run, len(copies), 0, flops, against(run, x, copies[0], {}))


def gated_products() -> Iterator[Trial]:
    """Gate, up and SiLU in one launch, beside the library's product and a launch for the SiLU."""
    for dtype in (BF16, FP8):
        copies, scale = weights(2 * FFN, HIDDEN, dtype), torch.full((2 * FFN,), 0.01, device="cuda")
        tried = sorted({config for _, config in configs.GATED_MATMUL[dtype.itemsize]} - {None}, key=repr)
        for rows in (64, 96, 128, 192, 256, 384, 512, 1024, 8192):
            x, shape, flops = random(rows, HIDDEN), f"{dtype} {rows}", 4.0 * rows * FFN * HIDDEN
            options: dict = {}
            if dtype == FP8:
                x, x_scale = twins.quantise_fp8(x)
                options = {"x_scale": x_scale, "weight_scale": scale, "out_dtype": BF16}

                def apart(i: int, x=x, s=x_scale, c=scale, w=copies) -> torch.Tensor:
                    product = torch._scaled_mm(x, w[i].T, scale_a=s[:, None], scale_b=c[None], out_dtype=BF16)
                    return activation.silu_and_mul(product)
            else:

                def apart(i: int, x=x, w=copies) -> torch.Tensor:
                    return activation.silu_and_mul(F.linear(x, w[i]))

            yield Trial("gated", shape, "library, then SiLU", apart, len(copies), 0, flops)
            for config in tried:
                run = lambda i, x=x, w=copies, c=config, o=options: gemm.gated_matmul(x, w[i], c, **o)  # noqa: E731
                yield Trial("gated", shape, repr(config), run, len(copies), 0, flops,
                            against(run, x, copies[0], options | {"gated": True}))  # fmt: skip


# --- attention --------------------------------------------------------------------------------------------------


class Rows:
    """A batch of (query tokens, KV length) rows over a random pool."""

    def __init__(self, rows: list[tuple[int, int]], layers: int = 2, shared: int = 0, dtype: torch.dtype = BF16):
        counts, lens = [c for c, _ in rows], [n for _, n in rows]
        needs = [-(-n // PAGE) for n in lens]
        total = sum(needs) + 1
        self.pool = torch.empty(total, layers, 2, PAGE, KV, DIM, device="cuda", dtype=BF16)
        for part in self.pool.split(256):
            part.normal_()
        self.pool = self.pool.to(dtype)
        self.layers = layers
        pages = torch.randperm(total - 1).int() + 1
        table = torch.zeros(len(rows), max(needs), dtype=torch.int32)
        used = 0
        for row, need in enumerate(needs):
            table[row, :need] = pages[used : used + need]
            used += need
        table[:, : shared // PAGE] = table[0, : shared // PAGE]
        self.tables = [table[r, :n].tolist() for r, n in enumerate(needs)] if shared else []
        positions = torch.cat([torch.arange(n - c, n) for c, n in rows]).cuda()
        start = torch.tensor([0, *counts]).cumsum(0).int().cuda()
        self.group = GroupBatch(PAGE, table.cuda(), positions)
        self.batch = Batch(positions, start, torch.tensor(lens).int().cuda(), counts, lens, (self.group,))
        self.q = random(len(positions), HEADS, DIM)
        self.spec = AttentionSpec(HEADS, KV, DIM, DIM**-0.5, kv_itemsize=dtype.itemsize)
        self.read = 4.0 * KV * DIM * sum(lens)
        self.flops = sum(4.0 * HEADS * DIM * c * (n - (c - 1) / 2) for c, n in rows)

    def run(self, i: int, backend: paged.TritonAttention, plan: paged.Plan) -> torch.Tensor:
        layer = self.pool[:, i % self.layers]
        return backend.forward(self.spec, self.q, LayerKV(layer[:, 0], layer[:, 1]), self.batch, self.group, plan)

    def error(self, backend: paged.TritonAttention, plan: paged.Plan, rows: int = 4) -> float:
        got = self.run(0, backend, plan)
        ends = self.batch.query_start.tolist()
        worst = 0.0
        last = len(self.batch.counts) - 1
        for r in {*range(0, last, max(1, last // rows)), last}:
            part = slice(ends[r], min(ends[r + 1], ends[r] + 64))
            one = replace(self.batch, positions=self.batch.positions[part], kv_len=self.batch.kv_len[r : r + 1],
                          query_start=torch.tensor([0, part.stop - part.start], device="cuda"))  # fmt: skip
            group = replace(self.group, page_table=self.group.page_table[r : r + 1])
            kv = LayerKV(self.pool[:, 0, 0], self.pool[:, 0, 1])
            expected = ReferenceAttention().forward(self.spec, self.q[part], kv, one, group, None)
            worst = max(worst, distance(got[part], expected))
        return worst


def planned(rows: Rows, few: Tile | None = None, many: Tile | None = None, keys: int | None = None,
            prefix: paged.PrefixLists | None = None, bounds: paged.Bounds | None = None) -> paged.Plan:  # fmt: skip
    """A plan under other tuning values."""
    saved = dict(configs.ATTENTION), configs.CROWD, configs.SPLIT_KEYS
    try:
        configs.CROWD = {}
        for size in (1, 2):
            configs.ATTENTION["few", size, DIM] = few or configs.ATTENTION["few", size, DIM]
        configs.ATTENTION["many", 2, DIM] = many or configs.ATTENTION["many", 2, DIM]
        configs.SPLIT_KEYS = keys or configs.SPLIT_KEYS
        return paged.TritonAttention().plan(rows.batch, rows.group, rows.spec, prefix=prefix, bounds=bounds)
    finally:
        configs.ATTENTION.update(saved[0])
        configs.CROWD, configs.SPLIT_KEYS = saved[1:]


FEW = [Tile(16, 64, 4, 3), Tile(16, 64, 2, 2), Tile(16, 64, 2, 2, 2), Tile(16, 32, 2, 2), Tile(16, 128, 4, 3),
       Tile(16, 128, 4, 2, 2), Tile(16, 128, 8, 3)]  # fmt: skip
MANY = [Tile(128, 64, 8, 3), Tile(128, 64, 8, 5), Tile(128, 128, 8, 3), Tile(64, 64, 4, 3), Tile(64, 128, 4, 3),
        Tile(64, 32, 4, 3), Tile(128, 32, 8, 5)]  # fmt: skip


def decoding() -> Iterator[Trial]:
    backend = paged.TritonAttention()
    sizes = ((1, 1024, 32), (1, 16384, 8), (8, 1024, 8), (32, 8192, 2), (128, 1024, 2), (256, 512, 2))
    for rows, length, layers in sizes:
        case = Rows([(1, length)] * rows, layers)
        shape = f"{rows} x {length}"
        for tile in FEW:
            plan = planned(case, few=tile)
            yield Trial("decode", shape, f"{tile!r} splits {plan.launches[0].splits}",
                        lambda i, c=case, p=plan: c.run(i, backend, p), layers, case.read, 0,
                        lambda c=case, p=plan: c.error(backend, p))  # fmt: skip
        for keys in (64, 128, 512):
            plan = planned(case, keys=keys)
            yield Trial("decode", shape, f"keys {keys} splits {plan.launches[0].splits}",
                        lambda i, c=case, p=plan: c.run(i, backend, p), layers, case.read)  # fmt: skip
    yield from uneven(backend)
    case = Rows([(4, 1024)] * 32, 4)  # three drafts a row
    plan = planned(case)
    yield Trial("decode", "32 x 1024, 4 tokens", "default", lambda i: case.run(i, backend, plan), 4, case.read, 0,
                lambda: case.error(backend, plan))  # fmt: skip
    eight = Rows([(1, 8192)] * 32, 2, dtype=FP8)
    eight_plan = planned(eight)
    yield Trial("decode fp8 KV", "32 x 8192", "default", lambda i: eight.run(i, backend, eight_plan), 2, eight.read / 2,
                0, lambda: eight.error(backend, eight_plan))  # fmt: skip
    steady = paged.TritonAttention(invariant=True)
    long = Rows([(1, 8192)] * 32, 2)
    fixed = steady.plan(long.batch, long.group, long.spec)
    yield Trial("decode invariant", "32 x 8192", "default", lambda i: long.run(i, steady, fixed), 2, long.read, 0,
                lambda: long.error(steady, fixed))  # fmt: skip


def uneven(backend: paged.TritonAttention) -> Iterator[Trial]:
    """Rows as long as those that chat1000 has left after so many steps, in pages of 16 and of 8 bits."""
    work = chat(1000, seed=1)
    for step in (5, 200, 500, 1000):
        rows = [(1, len(job.prompt) + step) for job in work if job.output_len > step]
        for dtype in (BF16, FP8):
            case = Rows(rows, 2, dtype=dtype)
            for tile in FEW:
                for pieces in (2, 4, 8):
                    plan = planned(case, few=replace(tile, pieces=pieces))
                    yield Trial("decode", f"chat {step}, {dtype.itemsize * 8} bits", f"{tile!r} x {pieces}",
                                lambda i, c=case, p=plan: c.run(i, backend, p), 2, case.read * dtype.itemsize / 2, 0,
                                lambda c=case, p=plan: c.error(backend, p))  # fmt: skip


def prefilling() -> Iterator[Trial]:
    backend = paged.TritonAttention()
    for name, rows in (
        ("1 x 512", [(512, 512)]),
        ("1 x 2048", [(2048, 2048)]),
        ("2 x 8192", [(8192, 8192)] * 2),
        ("512 after 16384", [(512, 16384)]),
        ("32 decoding + 480", [(1, 1024)] * 32 + [(480, 480)]),
    ):
        case = Rows(rows)
        for tile in MANY:
            plan = planned(case, many=tile)
            yield Trial("prefill", name, f"{tile!r} splits {plan.launches[-1].splits}",
                        lambda i, c=case, p=plan: c.run(i, backend, p), 2, 0, case.flops,
                        lambda c=case, p=plan: c.error(backend, p))  # fmt: skip
        if len({count for count, _ in rows}) == 1 and rows[0][0] == rows[0][1]:
            n = rows[0][0]
            q = random(len(rows), HEADS, n, DIM)
            k, v = (random(len(rows), HEADS, n, DIM) for _ in range(2))
            for backend_name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
                kind = getattr(torch.nn.attention.SDPBackend, backend_name)

                def dense(i: int, q=q, k=k, v=v, kind=kind) -> torch.Tensor:
                    with torch.nn.attention.sdpa_kernel(kind):
                        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

                yield Trial("prefill", name, backend_name, dense, 1, 0, case.flops)
    yield from chunks(backend)
    plan_rows = Rows([(480, 480)] + [(1, 1024)] * 32)
    yield Trial("attention plan", "33 rows", "triton",
                lambda i: backend.plan(plan_rows.batch, plan_rows.group, plan_rows.spec))  # fmt: skip


def chunks(backend: paged.TritonAttention) -> Iterator[Trial]:
    """Chunks of a long prompt beside streams, as steps of their size and as captured ones."""
    for count, context in ((96, 131072), (200, 131072), (480, 131072), (480, 32768), (480, 4096), (1024, 65536)):
        case = Rows([(1, 512)] * 32 + [(count, context)], 1)
        captured = paged.Bounds(512, 128, 1, 512, 131072)
        for bounds in (None, captured) if count < 512 else (None,):
            for pieces in (2, 4, 6, 8, 12):
                tile = replace(configs.ATTENTION["many", 2, DIM], pieces=pieces)
                plan = planned(case, many=tile, bounds=bounds)
                name = f"{count} of {context}" + (", captured" if bounds else "")
                yield Trial("chunk", name, f"pieces {pieces}", lambda i, c=case, p=plan: c.run(i, backend, p), 1, 0,
                            case.flops, lambda c=case, p=plan: c.error(backend, p))  # fmt: skip


def shared_prefixes() -> Iterator[Trial]:
    backend = paged.TritonAttention()
    for name, rows, prefix in (
        ("256 x (2048 + 64), 1 token", [(1, 2112)] * 256, 2048),
        ("32 x (2048 + 64), 64 tokens", [(64, 2112)] * 32, 2048),
        ("16 x (8192 + 256), 1 token", [(1, 8448)] * 16, 8192),
    ):
        case = Rows(rows, 1, shared=prefix)
        counts = case.batch.counts
        groups = cascade.find_groups(case.tables, [n - c for c, n in rows], PAGE)
        own = 4.0 * KV * DIM * (sum(n - prefix for _, n in rows) + prefix)
        plan = planned(case)
        run = lambda i, c=case, p=plan: c.run(i, backend, p)  # noqa: E731
        yield Trial("prefix", name, "each row alone", run, 1, own, case.flops)
        lists = cascade.prefix_lists(groups, counts, PAGE, HEADS // KV, torch.device("cuda"))
        joint = planned(case, prefix=lists)
        run = lambda i, c=case, p=joint: c.run(i, backend, p)  # noqa: E731
        yield Trial("prefix", name, "cascade", run, 1, own, case.flops, lambda c=case, p=joint: c.error(backend, p))


SECTIONS: dict[str, Callable[[], Iterator[Trial]]] = {
    "gemv": small_products,
    "decode": decoding,
    "prefix": shared_prefixes,
    "prefill": prefilling,
    "gemm": large_products,
    "gated": gated_products,
    "fp8": products_fp8,
    "elementwise": elementwise,
    "sampling": draws,
}


# --- measuring --------------------------------------------------------------------------------------------------


def median_seconds(trial: Trial) -> float:
    """Of one call, in a graph of many over rotating inputs."""
    for i in range(trial.sets):
        trial.run(i)
    torch.cuda.synchronize()
    began = time.perf_counter()
    trial.run(0)
    torch.cuda.synchronize()
    calls = max(trial.sets, min(64, int(3e-3 / max(time.perf_counter() - began, 2e-5))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            trial.run(i % trial.sets)
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / calls)
    return sorted(times)[len(times) // 2]


def describe(trial: Trial, seconds: float, error: float | None) -> str:
    rate = f"{trial.bytes / seconds / 1e12:6.2f} TB/s"
    if not trial.bytes:
        rate = f"{trial.flops / seconds / 1e12:6.0f} TFLOP/s"
    wrong = "" if error is None else f"error {error:.1e}" + ("  <-- WRONG" if not error < 0.03 else "")
    return f"{trial.kernel:18} {trial.shape:28} {seconds * 1e6:10.1f} us {rate:16} {wrong:16} {trial.variant}"


def trials(name: str) -> Iterator[Trial]:
    """A section's; one that fails to set up ends with a line that says so."""
    try:
        yield from SECTIONS[name]()
    except Exception as error:
        print(f"section {name} ended early, {type(error).__name__}: {error}", flush=True)


def compile_share(names: list[str], share: int, jobs: int) -> None:
    """Run every `jobs`-th trial once, silently: what it compiles stays in the disk cache."""
    for name in names:
        for number, trial in enumerate(trials(name)):
            if number % jobs == share:
                try:
                    trial.run(0)
                    torch.cuda.synchronize()
                except Exception:
                    continue


def measure(names: list[str], skip: int, results: Path) -> None:
    number = 0
    for name in names:
        for trial in trials(name):
            number += 1
            if number <= skip:
                continue
            results.with_suffix(".at").write_text(str(number))
            try:
                error = trial.error() if trial.error else None
                seconds = median_seconds(trial)
                print(describe(trial, seconds, error), flush=True)
                line = {"kernel": trial.kernel, "shape": trial.shape, "variant": trial.variant, "us": seconds * 1e6,
                        "bytes": trial.bytes, "flops": trial.flops, "error": error}  # fmt: skip
                with results.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            except Exception as error:
                failed(trial, error)


def failed(trial: Trial, error: Exception) -> None:
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:160]
    print(f"{trial.kernel:18} {trial.shape:28} FAILED {type(error).__name__}: {text} "
          f"({Path(last.filename).name}:{last.lineno}) {trial.variant}", flush=True)  # fmt: skip
    try:
        torch.cuda.synchronize()
    except Exception:
        os._exit(3)  # the device is lost to this process; a new one goes on behind this trial


def summary(results: Path) -> None:
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    best: dict[tuple[str, str], dict] = {}
    others: dict[tuple[str, str], dict] = {}
    for line in lines:
        if line["error"] is not None and not line["error"] < 0.03:
            continue
        library = line["variant"].startswith(("cublas", "library", "torch", "scaled", "CUDNN", "FLASH", "each row"))
        kept = others if library else best
        key = (line["kernel"], line["shape"])
        if key not in kept or line["us"] < kept[key]["us"]:
            kept[key] = line
    print("\nbest of each shape")
    for key, line in best.items():
        rate = line["bytes"] / line["us"] / 1e6 if line["bytes"] else line["flops"] / line["us"] / 1e6
        unit = "TB/s" if line["bytes"] else "TFLOP/s"
        against = f"x{others[key]['us'] / line['us']:.2f} of {others[key]['variant']}" if key in others else ""
        print(f"{key[0]:18} {key[1]:28} {line['us']:10.1f} us {rate:7.2f} {unit:8} {against:24} {line['variant']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, comma-separated")
    parser.add_argument("--json", type=Path, help="write one JSON line a measurement here")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile ahead; 0: none")
    parser.add_argument("--skip", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.only.split(",")
    torch.manual_seed(0)
    if args.share is not None:
        return compile_share(names, args.share, args.jobs)
    if args.skip is not None:
        return measure(names, args.skip, args.json)

    results = args.json or Path(tempfile.mkdtemp()) / "kernels.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text("")
    here = [sys.executable, __file__, "--only", args.only, "--json", str(results)]
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    began = time.perf_counter()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    ahead = [subprocess.Popen([*here, "--jobs", str(args.jobs), "--share", str(n)], **quiet) for n in range(args.jobs)]
    for process in ahead:
        try:
            process.wait(timeout=max(1.0, 120 - (time.perf_counter() - began)))
        except subprocess.TimeoutExpired:
            process.kill()
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    done = 0
    while True:
        code = subprocess.run([*here, "--skip", str(done)], stderr=subprocess.DEVNULL).returncode
        at = results.with_suffix(".at")
        if code == 0 or not at.exists() or int(at.read_text()) <= done:
            break
        done = int(at.read_text())
        print(f"restarted behind measurement {done} (exit {code})", flush=True)
    summary(results)
    print(f"all in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
