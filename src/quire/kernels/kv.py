"""The page pool as a tensor, and each layer's K and V in it as views that copy nothing.

    pool [pages, page_elements];  page of group g:  [layer in g][K, V][token in page][kv head][head dim]

Knows the layout's arithmetic. Refuses to know who owns which page.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from quire.types.kv import KVLayout


class LayerKV(NamedTuple):
    k_pages: torch.Tensor  # [pages, tokens_per_page, kv_heads, head_dim], strided
    v_pages: torch.Tensor
    group: int


def allocate_kv(layout: KVLayout, pages: int, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
    """Zeroed, so that pages nobody has written (the null page above all) hold finite numbers. On a CPU the system
    hands out zeroed memory as it is touched, so a page takes no room before its first use."""
    if torch.device(device).type != "cpu":
        return torch.zeros(pages, layout.page_elements, device=device, dtype=dtype)
    untouched = np.zeros((pages, layout.page_elements * dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype)


class KVViews:
    """`layers[l]` is where layer l keeps its K and V."""

    def __init__(self, pool: torch.Tensor, layout: KVLayout):
        self.pool = pool
        self.layout = layout
        views: dict[int, LayerKV] = {}
        for index, group in enumerate(layout.groups):
            used = group.tokens_per_page * group.token_elements()
            shape = (len(group.layers), group.parts, group.tokens_per_page, group.kv_heads, group.head_dim)
            by_layer = pool[:, :used].unflatten(1, shape)
            for place, layer in enumerate(group.layers):
                views[layer] = LayerKV(by_layer[:, place, 0], by_layer[:, place, 1], index)
        self.layers = tuple(views[layer] for layer in range(len(views)))

    def tokens(self, group: int) -> torch.Tensor:
        """The pages of a group by token, as integers of the elements' size (not every operation knows every kind of
        float): [pages, layers of the group, K and V, tokens_per_page, kv_heads, head_dim]."""
        spec = self.layout.groups[group]
        shape = (len(spec.layers), spec.parts, spec.tokens_per_page, spec.kv_heads, spec.head_dim)
        raw = self.pool.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[self.pool.itemsize])
        return raw[:, : spec.tokens_per_page * spec.token_elements()].unflatten(1, shape)


def read_tokens(
    views: KVViews, group: int, slots: torch.Tensor, layers: slice = slice(None)
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V at these KV slots (page * tokens_per_page + offset), each float32 [tokens, layers, kv_heads, dim]; of
    all layers of the group, or of some."""
    size = views.layout.groups[group].tokens_per_page
    found = views.tokens(group)[:, layers][slots // size, :, :, slots % size].view(views.pool.dtype).float()
    return found[:, :, 0], found[:, :, 1]


def write_tokens(views: KVViews, group: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The way back of `read_tokens`."""
    size, pages = views.layout.groups[group].tokens_per_page, views.tokens(group)
    pages[slots // size, :, :, slots % size] = torch.stack((k, v), 2).to(views.pool.dtype).view(pages.dtype)
