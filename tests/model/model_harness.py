"""Running a model over prompts in tests: pages, batches and chunks, without an engine."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from msgspec.structs import replace

from quire.kernels.attention_backend import Batch, GroupBatch
from quire.kernels.hidden_state_tap import HiddenStateTap
from quire.kernels.kv_views import KVViews, allocate_kv
from quire.kernels.state_views import Round, Run, cells_in, rounds_of
from quire.model import Model
from quire.types.kv import NULL_STATE


def run_model(
    model: Model,
    prompts: Sequence[Sequence[int]],
    chunk: int | None = None,
    page_size: int = 4,
    tap: HiddenStateTap | None = None,
    last: bool = False,
    kv_dtype: str | None = None,
    adapters: Sequence[int] | None = None,
    context: int = 1,
) -> list[torch.Tensor]:
    """Logits [len(prompt), vocabulary] of every prompt, or of the last token of each step. All prompts advance
    together, at most `chunk` tokens a step each; their pages lie scattered over the pool. `adapters`: the slot of each
    prompt's LoRA adapter. `context`: ranks between which tokens of a page are divided."""
    layout = model.spec.kv_layout(page_size=context * page_size, dtype=kv_dtype or model.kv_dtype)
    layout = replace(layout, ranks=context)
    pages = list(range(1, 1 + sum(layout.pages_for(len(p)) for p in prompts)))
    pool = allocate_kv(layout, 1 + len(pages), model.device)
    random.Random(0).shuffle(pages)
    tables = [[[pages.pop() for _ in range(-(-len(p) // g.tokens_per_page))] for p in prompts] for g in layout.groups]
    cells = None
    if layout.states:
        cells = cells_in(allocate_kv(layout, (1 + len(prompts)) * layout.state_pages, model.device), layout)
    kv = KVViews(pool, layout.own, cells)
    done, logits = [0] * len(prompts), [[] for _ in prompts]
    while any(n < len(p) for n, p in zip(done, prompts, strict=True)):
        rows = [
            (i, n, min(len(p), n + (chunk or len(p))))
            for i, (n, p) in enumerate(zip(done, prompts, strict=True))
            if n < len(p)
        ]
        groups = tuple(
            _group(group.tokens_per_page, table, rows, model.device)
            for group, table in zip(layout.groups, tables, strict=True)
        )
        batch = _batch(rows, groups, model.device)
        if layout.states:
            batch.states = _rounds(rows, model.device)
        if adapters is not None:
            batch.adapters = torch.tensor([adapters[i] for i, a, b in rows for _ in range(a, b)], device=model.device)
        ids = torch.tensor([t for i, a, b in rows for t in prompts[i][a:b]], device=model.device)
        with torch.inference_mode():
            out = model.logits(model.forward(ids, batch, kv, tap=tap, last=last)).cpu()
        for (i, _, end), part in zip(rows, out.split([1] * len(rows) if last else batch.counts), strict=True):
            logits[i].append(part)
            done[i] = end
    return [torch.cat(parts) for parts in logits]


def _rounds(rows: list[tuple[int, int, int]], device: torch.device) -> list[Round]:
    """Each prompt's state is in a cell of its own; rows of many tokens leave one behind half way too."""
    runs, at = [], 0
    for i, begin, end in rows:
        cell, half = i + 1, (end - begin) // 2
        source = cell if begin else NULL_STATE
        if half > 4:
            runs += [Run(at, half, source, cell, 0), Run(at + half, end - begin - half, cell, cell, 1)]
        else:
            runs.append(Run(at, end - begin, source, cell, 0))
        at += end - begin
    return rounds_of(runs, device)


def _batch(rows: list[tuple[int, int, int]], groups: tuple[GroupBatch, ...], device: torch.device) -> Batch:
    counts = [end - begin for _, begin, end in rows]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return Batch(
        positions=torch.cat([torch.arange(begin, end) for _, begin, end in rows]).to(device),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_len=torch.tensor([end for *_, end in rows], dtype=torch.int32, device=device),
        counts=counts,
        kv_lens=[end for *_, end in rows],
        groups=groups,
    )


def _group(size: int, tables: list[list[int]], rows: list[tuple[int, int, int]], device: torch.device) -> GroupBatch:
    table = torch.zeros(len(rows), max(len(tables[i]) for i, *_ in rows), dtype=torch.int32)
    for row, (i, *_) in enumerate(rows):
        table[row, : len(tables[i])] = torch.tensor(tables[i])
    slots = [tables[i][p // size] * size + p % size for i, begin, end in rows for p in range(begin, end)]
    return GroupBatch(size, table.to(device), torch.tensor(slots, device=device))
