"""How much attention rows pay, for those that ask: by page (KV eviction) or by token (chunk reuse).

Refuses to know: how it is computed, what it is for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from quire.kernels.attention_backend import Batch
from quire.types.plan import Row


def measure_attention(batch: Batch, rows: Sequence[Row]) -> None:
    """Have the rows that ask report what they pay: to each token, if any wants that, else to each page."""
    batch.asks = [i for i, row in enumerate(rows) if row.mass or row.token_mass]
    if batch.asks:
        batch.mass_tokens = 1 if any(row.token_mass for row in rows) else batch.groups[0].tokens_per_page
        runs = -(-max(batch.kv_lens[i] for i in batch.asks) // batch.mass_tokens)
        batch.mass = torch.zeros(batch.rows, runs, device=batch.positions.device)


def measured_attention(batch: Batch, rows: Sequence[Row]) -> dict[int, torch.Tensor]:
    """By row, what it paid to each page or token."""
    if batch.mass is None:
        return {}
    size = batch.groups[0].tokens_per_page
    found = {i: batch.mass[i, : -(-batch.kv_lens[i] // batch.mass_tokens)] for i in batch.asks}
    for i, paid in found.items():
        if not rows[i].token_mass and batch.mass_tokens < size:
            found[i] = F.pad(paid, (0, -len(paid) % size)).view(-1, size).sum(1)
    return found
