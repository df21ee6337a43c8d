"""The least and the largest of the keys of each page, dimension by dimension: what bounds the scores of a query there
(Quest, Tang et al. 2024), kept beside the pages.

Only full pages behind the last tokens of a sequence need bounds, so that a page's are computed once, when they are
first wanted after it changed. Whoever changes a page says so (`forget`). Refuses to know: sequences, queries.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.kv_views import KVViews, take_pages

PAGES_AT_ONCE = 256  # read together
LARGEST = 65504.0  # of float16


class PageBounds:
    def __init__(self, kv: KVViews):
        self._kv = kv
        pages = kv.pool.shape[0]
        self.groups: list[torch.Tensor | None] = []  # [pages, layers, 2, kv_heads, head_dim] float16
        self._known: list[torch.Tensor] = []
        for group in kv.layout.groups:
            shape = (pages, len(group.layers), 2, group.kv_heads, group.head_dim)
            wanted = group.window is None and group.values_from is None
            # zeroed memory that takes no room before it is written to
            self.groups.append(torch.from_numpy(np.zeros(shape, dtype=np.float16)) if wanted else None)
            self._known.append(torch.zeros(pages, dtype=torch.bool))

    def forget(self, group: int, pages: torch.Tensor | list[int]) -> None:
        """These pages have changed."""
        self._known[group][pages] = False

    def refresh(self, group: int, pages: torch.Tensor) -> int:
        """Make the bounds of these pages right; how many were not."""
        bounds, known = self.groups[group], self._known[group]
        stale = pages[~known[pages.long()]].unique()
        if bounds is None or not len(stale):
            return 0
        for some in stale.long().split(PAGES_AT_ONCE):
            for place, layer in enumerate(self._kv.layout.groups[group].layers):
                view = self._kv.layers[layer]
                keys = take_pages(view.k_pages, view.k_scales, some).float()  # [pages, tokens, kv_heads, head_dim]
                least, largest = keys.aminmax(dim=1)
                bounds[some, place] = torch.stack((least, largest), 1).clamp_(-LARGEST, LARGEST).half()
        known[stale.long()] = True
        return len(stale)
