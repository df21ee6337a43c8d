"""Cached keys at another position: KV entries are copied from slot to slot, keys rotated by the distance between.

A key is cached rotated by its position. Rotations add up, so a key that is to stand `by` positions further on is
rotated by that much more, with the model's own inverse frequencies; a factor on cos and sin (yarn) is in the key
already and stays. Values know no positions. Refuses to know: why entries move, who owns their pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from quire.kernels.eager.torch_ops import rope, rope_tables
from quire.kernels.kv_views import KVViews, read_tokens, write_tokens
from quire.types.errors import ConfigError
from quire.types.plan import RopeShift, StepPlan

Moved = tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]  # group, where to, K, V

SLICE_ELEMENTS = 1 << 24  # K and V read at a time, as float32, where that is safe


def begin_rope_shifts(
    plan: StepPlan, views: KVViews, inverse_frequencies: list[torch.Tensor] | None
) -> Callable[[], None]:
    """Read what the plan's page copies or other shifts write over; what is returned ends them after the copies."""
    rope_shifts = plan.rope_shifts
    if inverse_frequencies is None:
        raise ConfigError("this model learned its positions one by one: its cached keys cannot be moved to others")
    sizes = [group.tokens_per_page for group in views.layout.groups]
    written = {(shift.group, slot) for shift in rope_shifts for slot in shift.targets}
    copied = {target for _, target in plan.copies}
    moved = [
        (s.group, source, target) for s in rope_shifts for source, target in zip(s.sources, s.targets, strict=True)
    ]
    parts: Iterator[Moved] = (
        _shifted(part, views, inverse_frequencies) for shift in rope_shifts for part in _parts(shift, views)
    )
    if any(
        (source != target and (group, source) in written) or source // sizes[group] in copied
        for group, source, target in moved
    ):
        parts = iter(list(parts))

    def end() -> None:
        for group, slots, k, v in parts:
            write_tokens(views, group, slots, k, v)

    return end


def _parts(shift: RopeShift, views: KVViews) -> list[RopeShift]:
    """The shift in pieces that are small in memory."""
    group = views.layout.groups[shift.group]
    step = max(1, SLICE_ELEMENTS // (group.token_heads * group.head_dim))
    pieces = range(0, len(shift.sources), step)
    return [RopeShift(shift.group, shift.sources[i : i + step], shift.targets[i : i + step], shift.by) for i in pieces]


def _shifted(shift: RopeShift, views: KVViews, inverse_frequencies: list[torch.Tensor]) -> Moved:
    device = views.pool.device
    k, v = read_tokens(views, shift.group, torch.tensor(shift.sources, device=device))
    if shift.by:
        where = torch.tensor([shift.by], device=device)
        layers = views.layout.groups[shift.group].layers
        for frequencies in {id(each): each for each in map(inverse_frequencies.__getitem__, layers)}.values():
            alike = [place for place, layer in enumerate(layers) if inverse_frequencies[layer] is frequencies]
            tables = rope_tables(where, frequencies, 1.0, k.dtype)
            if len(alike) == len(layers):
                k = rope(k, *tables)
            else:
                k[:, alike] = rope(k[:, alike], *tables)
    return shift.group, torch.tensor(shift.targets, device=device), k, v
