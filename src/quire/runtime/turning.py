"""Cached keys at another position: KV entries are copied from slot to slot, keys rotated by the distance between.

A key is cached rotated by its position. Rotations add up, so a key that is to stand `by` positions further on is
rotated by that much more, with the model's own inverse frequencies; a factor on cos and sin (yarn) is in the key
already and stays. Values know no positions. Refuses to know: why entries move, who owns their pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from quire.kernels.eager.ops import rope, rope_tables
from quire.kernels.kv import KVViews, read_tokens, write_tokens
from quire.types.errors import ConfigError
from quire.types.plan import StepPlan, Turn

Moved = tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]  # group, where to, K, V

ELEMENTS = 1 << 24  # K and V read at a time, as float32, where that is safe


def begin_turns(plan: StepPlan, views: KVViews, inverse_frequencies: torch.Tensor | None) -> Callable[[], None]:
    """Read what the plan's page copies or other turns write over; what is returned ends the turns after the copies."""
    turns = plan.turns
    if inverse_frequencies is None:
        raise ConfigError("this model learned its positions one by one: its cached keys cannot be moved to others")
    sizes = [group.tokens_per_page for group in views.layout.groups]
    written = {(turn.group, slot) for turn in turns for slot in turn.targets}
    copied = {target for _, target in plan.copies}
    moved = [(t.group, source, target) for t in turns for source, target in zip(t.sources, t.targets, strict=True)]
    parts: Iterator[Moved] = (
        _turned(part, views, inverse_frequencies) for turn in turns for part in _parts(turn, views)
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


def _parts(turn: Turn, views: KVViews) -> list[Turn]:
    """The turn in pieces that are small in memory."""
    group = views.layout.groups[turn.group]
    step = max(1, ELEMENTS // (group.token_heads * group.head_dim))
    pieces = range(0, len(turn.sources), step)
    return [Turn(turn.group, turn.sources[i : i + step], turn.targets[i : i + step], turn.by) for i in pieces]


def _turned(turn: Turn, views: KVViews, inverse_frequencies: torch.Tensor) -> Moved:
    device = views.pool.device
    k, v = read_tokens(views, turn.group, torch.tensor(turn.sources, device=device))
    if turn.by:
        where = torch.tensor([turn.by], device=device)
        k = rope(k, *rope_tables(where, inverse_frequencies, 1.0, k.dtype))
    return turn.group, torch.tensor(turn.targets, device=device), k, v
