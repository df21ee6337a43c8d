"""The KV layout as data: which layers share a page table, and what one page holds.

There is one pool of equal-byte pages. Layers are gathered into groups (full attention, a sliding window);
a page belongs to one group at a time and holds `tokens_per_page` tokens for *all* layers of that group, so a
page is contiguous and moves between tiers and machines in one copy:

    page p of group g:  [layer in g][K, V][token in page][kv head][head dim]
"""

from __future__ import annotations

import math

import msgspec

NULL_PAGE = 0  # never allocated: padding rows and windows that have moved on point here


class KVGroup(msgspec.Struct, frozen=True):
    layers: tuple[int, ...]
    tokens_per_page: int
    kv_heads: int
    head_dim: int
    window: int | None = None  # tokens a query sees, itself included; None: all of them
    parts: int = 2  # K and V

    def token_elements(self) -> int:
        return len(self.layers) * self.parts * self.kv_heads * self.head_dim


class KVLayout(msgspec.Struct, frozen=True):
    groups: tuple[KVGroup, ...]
    dtype: str
    itemsize: int

    @property
    def page_elements(self) -> int:
        """Elements of one page: the largest group's need; smaller groups leave a tail unused."""
        return max(g.tokens_per_page * g.token_elements() for g in self.groups)

    @property
    def page_bytes(self) -> int:
        return self.page_elements * self.itemsize

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all groups while it is inside every window."""
        return sum(g.token_elements() for g in self.groups) * self.itemsize

    @property
    def alignment(self) -> int:
        """Prefix hits end on multiples of this many tokens: a page boundary in every group."""
        return math.lcm(*(g.tokens_per_page for g in self.groups))

    def group_of(self, layer: int) -> int:
        return next(i for i, g in enumerate(self.groups) if layer in g.layers)

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens of one sequence need, ignoring what windows give back."""
        return sum(-(-tokens // g.tokens_per_page) for g in self.groups)


def layout_for(
    windows: list[int | None], *, kv_heads: int, head_dim: int, page_size: int, dtype: str, itemsize: int
) -> KVLayout:
    """Group layers by window; the group with most layers gets `page_size` tokens a page, the others as many
    as fit the same bytes."""
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window, []).append(layer)
    most = max(len(layers) for layers in by_window.values())
    groups = tuple(
        KVGroup(
            layers=tuple(layers),
            tokens_per_page=page_size * (most // len(layers)),
            kv_heads=kv_heads,
            head_dim=head_dim,
            window=window,
        )
        for window, layers in by_window.items()
    )
    return KVLayout(groups=groups, dtype=dtype, itemsize=itemsize)
