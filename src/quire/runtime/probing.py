"""How far cached KV is from what its context makes of it: the first layers computed anew, and compared.

The first layer's KV depends on a token and its position alone; the next is the first that shows what came before. Where
that changes much, so do the layers behind it. Refuses to know: where the KV came from, what is made of the answer.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.kv import KVViews, read_tokens
from quire.model import Model, NativeModel
from quire.runtime.slots import SlotState
from quire.runtime.staging import Staging
from quire.types.plan import Probe

LAYER = 1  # compared; all before it are computed whole


def probe(
    probes: list[Probe], model: Model | NativeModel, kv: KVViews, slots: SlotState, staging: Staging
) -> torch.Tensor:
    """Square of the distance between new and old K and V, relative to the new, for all tokens of the probes [tokens].
    The KV of the first layers is then the new."""
    table = staging.upload(np.array([[p.slot, p.start, p.count] for p in probes], dtype=np.int64).T)
    counts = [p.count for p in probes]
    input_ids, batch = slots.batch(table, sum(counts), counts, [p.start + p.count for p in probes])
    layer = min(LAYER, model.spec.layers - 1)
    (group,) = kv.layout.groups
    place = slice(group.layers.index(layer), group.layers.index(layer) + 1)
    where = batch.groups[0].kv_slots
    before = read_tokens(kv, 0, where, place)
    model.shallow(input_ids, batch, kv, layer)
    after = read_tokens(kv, 0, where, place)
    changed = [
        (new - old).square().sum((1, 2, 3)) / new.square().sum((1, 2, 3)).clamp_(min=1e-12)
        for new, old in zip(after, before, strict=True)
    ]
    return changed[0] + changed[1]
