"""How far cached KV is from what its context makes of it: the first layers computed anew, and compared.

The first layer's KV depends on a token and its position alone; the next is the first that shows what came before. Where
that changes much, so do the layers behind it. Refuses to know: where the KV came from, what is made of the answer.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.kv_views import KVViews, read_tokens
from quire.model import Runnable
from quire.runtime.slot_state import SlotState
from quire.runtime.staging import Staging
from quire.types.plan import Probe

COMPARED_LAYER = 1  # all before it are computed whole


def probe(probes: list[Probe], model: Runnable, kv: KVViews, slots: SlotState, staging: Staging) -> torch.Tensor:
    """Square of the distance between new and old values (keys add nothing: measured), and square of the new ones, for
    all tokens of the probes [2, tokens]. The KV of the first layers is then the new."""
    table = staging.upload(np.array([[p.slot, p.start, p.count, 0] for p in probes], dtype=np.int64).T)
    counts = [p.count for p in probes]
    kv_lens, adapted = [p.start + p.count for p in probes], slots.adapted(p.slot for p in probes)
    input_ids, batch = slots.batch(table, sum(counts), counts, kv_lens, adapted=adapted)
    layer = min(COMPARED_LAYER, len(model.spec.layers) - 1)
    (group,) = kv.layout.groups
    place = slice(group.layers.index(layer), group.layers.index(layer) + 1)
    where = batch.groups[0].kv_slots
    _, before = read_tokens(kv, 0, where, place)
    model.shallow(input_ids, batch, kv, layer)
    _, after = read_tokens(kv, 0, where, place)
    return torch.stack(((after - before).square().sum((1, 2, 3)), after.square().sum((1, 2, 3))))


def relative(found: torch.Tensor, probes: list[Probe]) -> torch.Tensor:
    """What `probe` found, of all ranks' heads, relative to the values of each probe: deviations [tokens]."""
    parts = found.split([probe.count for probe in probes], dim=1)
    return torch.cat([changed / size.mean().clamp(min=1e-30) for changed, size in parts])
