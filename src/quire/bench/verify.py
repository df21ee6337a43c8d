"""Checking a fast path by a plain one: are drawn tokens what the reference operations would have drawn?"""

from __future__ import annotations

import msgspec
import torch

from quire.kernels.batch_assembly import whole_sequence
from quire.model.blocks.stages import Stages
from quire.model.decoder import Model
from quire.types.kv import KVLayout


class Agreement(msgspec.Struct):
    tokens: int = 0
    equal: int = 0
    worst: float = 0.0  # largest gap between the reference's best logit and that of the token drawn, in deviations
    unchecked: int = 0  # answers for which there was no memory


@torch.inference_mode()
def agreement(model: Model, layout: KVLayout, answers: list[tuple[list[int], list[int]]]) -> Agreement:
    """Run (prompt, drawn tokens) pairs through the same weights in plain torch, whole, and compare each choice."""
    found = Agreement()
    fast = model.stages
    model.stages = Stages(model.spec, model.device, plain=True)
    try:
        for prompt, drawn in answers:
            try:
                logits = sequence_logits(model, layout, [*prompt, *drawn[:-1]], len(drawn))
            except torch.OutOfMemoryError:
                found.unchecked += 1
                continue
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
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # an engine leaves little: no piece of it should lie fallow
    batch, kv = whole_sequence(layout, len(tokens), model.device)
    hidden = model.forward(torch.tensor(tokens, device=model.device), batch, kv)
    return model.logits(hidden[-last:]).float()
