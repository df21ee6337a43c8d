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


def read_tokens(views: KVViews, group: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of some tokens, whatever kind of page they lie in: each float32 [slots, layers, kv_heads, head_dim], a
    copy, layers in the group's order. `slots`, int64: page * tokens_per_page + offset. Keys are rotated to the
    position they were computed at; rotating them further and writing them back moves a token."""
    page, offset = _places(views, group, slots)
    layers = [views.layers[layer] for layer in views.layout.groups[group].layers]
    k = torch.stack([layer.k_pages[page, offset].float() for layer in layers], dim=1)
    v = torch.stack([layer.v_pages[page, offset].float() for layer in layers], dim=1)
    return k, v


def write_tokens(views: KVViews, group: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Put K and V, shaped as `read_tokens` gives them, into the pages; rounded as these round."""
    page, offset = _places(views, group, slots)
    for place, index in enumerate(views.layout.groups[group].layers):
        layer = views.layers[index]
        layer.k_pages[page, offset] = k[:, place].to(layer.k_pages.dtype)
        layer.v_pages[page, offset] = v[:, place].to(layer.v_pages.dtype)


def _places(views: KVViews, group: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = views.layout.groups[group].tokens_per_page
    return slots // size, slots % size
