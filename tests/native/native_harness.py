"""Random packed matrices, small decoders and batches for the tests of the compiled kernels."""

import numpy as np
import torch

from quire.kernels.attention_backend import Batch, GroupBatch
from quire.kernels.cpu import PackedMatrix, Store
from quire.kernels.cpu import weights as w
from quire.kernels.kv_views import KVViews, allocate_kv
from quire.kernels.reference.dequant import FLOATS, FORMATS
from quire.types.kv import TokenShape, layout_for

# Where each format keeps fp16 factors: random bytes there would be infinities.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": (),
}  # fmt: skip


def random_raw(kind: str, rows: int, columns: int, generator: torch.Generator, size: float = 0.02) -> torch.Tensor:
    """Raw stored bytes of a random matrix, [rows, bytes per row] uint8."""
    if kind in FLOATS:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return torch.randn(rows, columns, generator=generator).mul(size * 8).to(dtype).view(torch.uint8)
    form = FORMATS[kind]
    elements, nbytes = form[0], form[1]
    blocks = torch.randint(0, 256, (rows * columns // elements, nbytes), generator=generator, dtype=torch.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = 118 + blocks[:, 0] % 4
    steps = 16 if kind == "Q8_0" or elements == 256 else 1  # quants or sub-scales reach so much further
    for at in HALVES[kind]:
        factor = (torch.rand(blocks.shape[0], 1, generator=generator) - 0.4) * size / steps
        blocks[:, at : at + 2] = factor.half().view(torch.uint8)
    return blocks.view(rows, -1)


def packed(
    kind: str, rows: int, columns: int, generator: torch.Generator, isa: str = "base"
) -> tuple[PackedMatrix, torch.Tensor]:
    """As for the plain kernel set, which keeps every kind at its own size."""
    raw = random_raw(kind, rows, columns, generator)
    matrix = PackedMatrix(Store(Store.needs(rows, columns, kind, isa)), rows, columns, kind, isa)
    matrix.fill(raw)
    return matrix, raw


def random_decoder(
    *, heads=4, kv_heads=2, head_dim=32, hidden=64, intermediate=96, vocab=50, windows=(None, None), kind="Q4_1",
    bias=False, qk_norm=False, rotary=None, seed=0,
) -> w.Decoder:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows, columns, kind=kind):
        return packed(kind, rows, columns, generator)[0]

    def vector(size, about=1.0):
        return about + 0.1 * torch.randn(size, generator=generator)

    def linear(rows, columns, kind=kind, bias=False):
        return w.Linear(matrix(rows, columns, kind), vector(rows, 0.0) if bias else None)

    def norm(size):
        return w.Norm(vector(size), eps=1e-5)

    q, kv = heads * head_dim, kv_heads * head_dim
    layers = [
        w.Layer(
            attention=w.Attention(
                q=linear(q, hidden, bias=bias), k=linear(kv, hidden, bias=bias), v=linear(kv, hidden, "Q8_0", bias),
                o=linear(hidden, q, bias=bias), heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                q_norm=norm(head_dim) if qk_norm else None, k_norm=norm(head_dim) if qk_norm else None,
                scale=head_dim**-0.5, window=window or 0,
            ),
            mlp=w.Mlp(linear(intermediate, hidden), linear(intermediate, hidden), linear(hidden, intermediate), 0),
            mixer_norm=norm(hidden), feed_norm=norm(hidden),
        )
        for window in windows
    ]  # fmt: skip
    rotary = rotary or head_dim
    return w.Decoder(
        hidden=hidden, rotation=[w.Rotation(10000.0 ** (-torch.arange(0, rotary, 2) / rotary))],
        embed=matrix(vocab, hidden, "Q8_0"), head=matrix(vocab, hidden, "Q8_0"), final_norm=norm(hidden),
        layer=layers,
    )  # fmt: skip


def kv_for(decoder: w.Decoder, pages: int, dtype: str, page_size: int) -> KVViews:
    attending = [layer.attention for layer in decoder.layer]
    shapes = [TokenShape(a.kv_heads, a.head_dim, a.window or None) for a in attending]
    layout = layout_for(shapes, page_size=page_size, dtype=dtype, own="float16")
    pool = allocate_kv(layout, pages, "cpu")
    pool[1:] = 255  # what nobody wrote must not be read: no number, in any float
    return KVViews(pool, layout)


def batch_of(rows: list[tuple[int, int]], tables: list[list[list[int]]], kv: KVViews) -> Batch:
    """rows: (first position, tokens) each; tables[g][r]: the pages of row r in KV group g."""
    positions = [p for start, count in rows for p in range(start, start + count)]
    lengths = [start + count for start, count in rows]
    groups = []
    for group, table in zip(kv.layout.groups, tables, strict=True):
        size = group.tokens_per_page
        wide = np.zeros((len(rows), max([len(pages) for pages in table], default=1)), dtype=np.int32)
        for r, pages in enumerate(table):
            wide[r, : len(pages)] = pages
        slots = [
            table[r][p // size] * size + p % size
            for r, (start, count) in enumerate(rows)
            for p in range(start, start + count)
        ]
        groups.append(GroupBatch(size, torch.from_numpy(wide), torch.tensor(slots, dtype=torch.int64)))
    counts = [count for _, count in rows]
    return Batch(
        positions=torch.tensor(positions, dtype=torch.int64),
        query_start=torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32),
        kv_len=torch.tensor(lengths, dtype=torch.int32),
        counts=counts,
        kv_lens=lengths,
        groups=tuple(groups),
    )


def own_pages(lengths: list[int], kv: KVViews, *, first: int = 1) -> list[list[list[int]]]:
    """Separate pages for rows of these lengths, group by group, shuffled so that neighbours are not in order."""
    tables = []
    for group in kv.layout.groups:
        table = []
        for length in lengths:
            need = -(-length // group.tokens_per_page)
            table.append(list(range(first + need - 1, first - 1, -1)))
            first += need
        tables.append(table)
    return tables
