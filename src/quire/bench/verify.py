"""Checking a fast path by a plain one: are drawn tokens what the reference operations would have drawn?"""

from __future__ import annotations

import msgspec
import torch

from quire.kernels.attention import Batch, GroupBatch
from quire.kernels.kv import KVViews, allocate_kv
from quire.model.decoder import Model
from quire.model.stages import Stages
from quire.types.kv import KVLayout


class Agreement(msgspec.Struct):
    tokens: int = 0
    equal: int = 0
    worst: float = 0.0  # largest gap between the reference's best logit and that of the token drawn, in deviations


@torch.inference_mode()
def agreement(model: Model, layout: KVLayout, answers: list[tuple[list[int], list[int]]]) -> Agreement:
    """Run (prompt, drawn tokens) pairs through the same weights in plain torch, whole, and compare each choice."""
    found = Agreement()
    fast = model.stages
    model.stages = Stages(model.spec, model.device, plain=True)
    try:
        for prompt, drawn in answers:
            logits = sequence_logits(model, layout, [*prompt, *drawn[:-1]], len(drawn))
            best = logits.max(-1).values
            chosen = logits.gather(-1, torch.tensor(drawn, device=logits.device)[:, None])[:, 0]
            found.tokens += len(drawn)
            found.equal += int((best == chosen).sum())
            found.worst = max(found.worst, float(((best - chosen) / logits.std(-1)).max()))
    finally:
        model.stages = fast
    return found


def sequence_logits(model: Model, layout: KVLayout, tokens: list[int], last: int) -> torch.Tensor:
    """Of the last positions of one sequence, [last, vocabulary]."""
    device, count = model.device, len(tokens)
    positions = torch.arange(count, device=device)
    groups, used = [], 1
    for spec in layout.groups:
        pages = -(-count // spec.tokens_per_page)
        table = torch.arange(used, used + pages, dtype=torch.int32, device=device)[None]
        slots = table[0, positions // spec.tokens_per_page].long() * spec.tokens_per_page
        groups.append(GroupBatch(spec.tokens_per_page, table, slots + positions % spec.tokens_per_page))
        used += pages
    batch = Batch(
        positions=positions,
        query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
        kv_len=torch.tensor([count], dtype=torch.int32, device=device),
        counts=[count],
        kv_lens=[count],
        groups=tuple(groups),
    )
    kv = KVViews(allocate_kv(layout, used, device), layout)
    hidden = model.forward(torch.tensor(tokens, device=device), batch, kv)
    return model.logits(hidden[-last:]).float()
