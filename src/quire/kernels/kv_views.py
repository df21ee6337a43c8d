"""The page pool as bytes, and each layer's K and V in it as views that copy nothing.

    pool uint8 [pages, page_bytes];  page of group g:  [layer in g][K, V][token in page][kv head][head dim]  numbers
                                                       [layer in g][K, V][token in page][kv head][scales]    fp16

Knows the layout's arithmetic and how each kind of page rounds. Refuses to know who owns which page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire.kernels.state_views import state_views
from quire.types.kv import KVGroup, KVLayout, blocks_of

STORED = {  # what the numbers of each kind lie in memory as: of fewer than 8 bits, see `pack_bits`
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int4": torch.uint8,
    "kivi4": torch.uint8,
    "kivi2": torch.uint8,
}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # what a scaled head's largest number becomes

Side = tuple[torch.Tensor, torch.Tensor | None]  # numbers, and their scales if they are scaled


class LayerKV(NamedTuple):
    """Where one layer keeps its K and V. Values that are a part of the keys lie in them."""

    k_pages: torch.Tensor  # [pages, tokens_per_page, kv_heads, head_dim], strided; of 4-bit numbers half as many bytes
    v_pages: torch.Tensor
    group: int = 0
    k_scales: torch.Tensor | None = None  # [pages, tokens_per_page, kv_heads, scales] float16, if pages are scaled
    v_scales: torch.Tensor | None = None
    shared: bool = False  # V is a part of K
    residual: LayerKV | None = None  # the latest tokens, unrounded, where rounded ones are read only behind them

    @property
    def sides(self) -> tuple[Side, Side]:
        return (self.k_pages, self.k_scales), (self.v_pages, self.v_scales)


def allocate_kv(layout: KVLayout, pages: int, device: torch.device | str) -> torch.Tensor:
    """Zeroed, so that pages nobody has written (the null page above all) hold finite numbers. On a CPU the system
    hands out zeroed memory as it is touched, so a page takes no room before its first use."""
    if torch.device(device).type != "cpu":
        return torch.zeros(pages, layout.page_bytes, device=device, dtype=torch.uint8)
    return torch.from_numpy(np.zeros((pages, layout.page_bytes), dtype=np.uint8))


class KVViews:
    """`layers[l]` is where layer l keeps its K and V; of recurrent ones, `states[l]` is where in `cells` their states
    are."""

    def __init__(self, pool: torch.Tensor, layout: KVLayout, cells: torch.Tensor | None = None):
        self.pool = pool
        self.cells = cells
        self.states = {} if cells is None else state_views(cells, layout)
        self.layout = layout
        views: dict[int, LayerKV] = {}
        for index, group in reversed([*enumerate(layout.groups)]):  # residuals before what they belong to
            numbers, scales = _numbers(pool, layout, group), _scales(pool, layout, group)
            for place, layer in enumerate(group.layers):
                k, v = numbers[:, place, 0], numbers[:, place, -1, ..., group.values_from or 0 :]
                k_scales, v_scales = (None, None) if scales is None else (scales[:, place, 0], scales[:, place, -1])
                views[layer] = LayerKV(
                    k,
                    v,
                    index,
                    k_scales,
                    v_scales,
                    shared=group.values_from is not None,
                    residual=None if group.residual is None else views[layer],
                )
        self.layers = dict(sorted(views.items()))

    def move(self, group: int, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """K and V at these KV slots (page * tokens_per_page + offset) to those; all are read before any is written."""
        spec = self.layout.groups[group]
        size = spec.tokens_per_page
        for part in (_numbers(self.pool, self.layout, spec), _scales(self.pool, self.layout, spec)):
            if part is not None:
                raw = _indexable(part)
                raw[targets // size, :, :, targets % size] = raw[sources // size, :, :, sources % size]


def _numbers(pool: torch.Tensor, layout: KVLayout, group: KVGroup) -> torch.Tensor:
    """[pages, layers, K and V, tokens, kv_heads, head_dim]"""
    dtype, width = STORED[group.dtype or layout.dtype], group.head_dim * min(layout.kind_of(group).bits, 8) // 8
    shape = (len(group.layers), group.parts, group.tokens_per_page, group.kv_heads, width)
    return pool.view(dtype)[:, : int(np.prod(shape))].unflatten(1, shape)


def _scales(pool: torch.Tensor, layout: KVLayout, group: KVGroup) -> torch.Tensor | None:
    """[pages, layers, K and V, tokens, kv_heads, scales]"""
    kind = layout.kind_of(group)
    count = kind.scales(group.head_dim)
    if not count:
        return None
    shape = (len(group.layers), group.parts, group.tokens_per_page, group.kv_heads, count)
    first = group.tokens_per_page * group.token_heads * group.head_dim * kind.bits // 16
    return pool.view(torch.float16)[:, first : first + int(np.prod(shape))].unflatten(1, shape)


def encode(x: torch.Tensor, dtype: torch.dtype, *, scaled: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Numbers [..., head_dim] as pages of this stored type keep them, and their scales."""
    if not scaled:
        return x.to(dtype), None
    wide = x.float()
    if dtype == torch.uint8:
        return encode_blocks(wide, 4)
    largest = LARGEST[dtype]
    scale = (wide.abs().amax(-1, keepdim=True) / largest).clamp_(max=65504).half()
    # against the scale as it will be read
    steps = (wide * torch.where(scale > 0, 1 / scale.float(), 0.0)).clamp_(-largest, largest)
    return (steps.round_() if dtype == torch.int8 else steps).to(dtype), scale


def encode_steps(x: torch.Tensor, bits: int, axis: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers as steps of `bits` bits, uint8, from the least of those that lie along an axis; and the scale and that
    minimum, float16, of one along it."""
    low, high = x.aminmax(dim=axis, keepdim=True)
    low, most = low.clamp(-65504, 65504).half(), (1 << bits) - 1
    scale = ((high - low.float()) / most).clamp_(0, 65504).half()
    steps = (x - low.float()) * torch.where(scale > 0, 1 / scale.float(), 0.0)
    return steps.round_().clamp_(0, most).to(torch.uint8), scale, low


def pack_bits(steps: torch.Tensor, bits: int) -> torch.Tensor:
    """Steps [..., dim] of 4 or 2 bits in bytes: of 4, number i and i + dim / 2 share one, of 2, i and every dim / 4."""
    parts = steps.chunk(8 // bits, dim=-1)
    return torch.stack([part << bits * i for i, part in enumerate(parts)]).sum(0, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.cat([packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], dim=-1)


def encode_blocks(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each 32 numbers of a head with a scale and a minimum of their own."""
    steps, scale, low = encode_steps(x.unflatten(-1, (blocks_of(x.shape[-1]), -1)), bits, -1)
    return pack_bits(steps.flatten(-2), bits), torch.cat((scale, low), dim=-2).squeeze(-1)


def decode_blocks(numbers: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    scale, low = scales.float().unsqueeze(-1).chunk(2, dim=-2)
    steps = unpack_bits(numbers, bits).float().unflatten(-1, (scale.shape[-2], -1))
    return (steps * scale + low).flatten(-2)


def decode(numbers: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """The reverse of `encode`, in float32 where there are scales."""
    if scales is None:
        return numbers
    return decode_blocks(numbers, scales, 4) if numbers.dtype == torch.uint8 else numbers.float() * scales


def take_pages(numbers: torch.Tensor, scales: torch.Tensor | None, pages: torch.Tensor) -> torch.Tensor:
    """One side of some pages decoded, [pages, tokens_per_page, kv_heads, head_dim]."""
    return decode(_indexable(numbers)[pages].view(numbers.dtype), None if scales is None else scales[pages])


def take_tokens(
    numbers: torch.Tensor, scales: torch.Tensor | None, page: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """One side of some tokens decoded, [tokens, kv_heads, head_dim]."""
    raw = _indexable(numbers)[page, offset].view(numbers.dtype)
    return decode(raw, None if scales is None else scales[page, offset])


def take_slots(sides: Sequence[Side], slots: torch.Tensor, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of each side the tokens at these KV slots (page * size + offset), zeros where a slot is -1."""
    known, there = slots.clamp(min=0), (slots >= 0)[:, None, None]
    return [take_tokens(*side, known // size, known % size).to(dtype).where(there, 0) for side in sides]


def put_tokens(kv: LayerKV, k: torch.Tensor, v: torch.Tensor, kv_slots: torch.Tensor) -> None:
    """K and V [tokens, kv_heads, head_dim] of one layer into their places; what `Ops.write_kv` does, in plain torch."""
    size = kv.k_pages.shape[1]
    where = (kv_slots // size, kv_slots % size)
    for (numbers, scales), x in zip(kv.sides[: 1 if kv.shared else 2], (k, v), strict=False):
        stored, beside = encode(x, numbers.dtype, scaled=scales is not None)
        _indexable(numbers).index_put_(where, _indexable(stored))
        if scales is not None and beside is not None:
            scales.index_put_(where, beside)


def read_tokens(
    views: KVViews, group: int, slots: torch.Tensor, layers: slice = slice(None)
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of some tokens, whatever kind of page they lie in: each float32 [slots, layers, kv_heads, head_dim], a
    copy, layers in the group's order, all or some. `slots`, int64: page * tokens_per_page + offset. Keys are rotated to
    the position they were computed at; rotating them further and writing them back moves a token."""
    spec, page, offset = _places(views, group, slots)
    numbers, scales = _numbers(views.pool, views.layout, spec), _scales(views.pool, views.layout, spec)
    raw = _indexable(numbers)[page, layers, :, offset].view(numbers.dtype)  # [slots, layers, K and V, kv_heads, dim]
    both = decode(raw, None if scales is None else scales[page, layers, :, offset]).float()
    return both[:, :, 0], both[:, :, -1, :, spec.values_from or 0 :]


def write_tokens(views: KVViews, group: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Put K and V, shaped as `read_tokens` gives them, into the pages; rounded as these round."""
    spec, page, offset = _places(views, group, slots)
    numbers, scales = _numbers(views.pool, views.layout, spec), _scales(views.pool, views.layout, spec)
    both = torch.stack((k, v), dim=2) if spec.values_from is None else k.unsqueeze(2)
    stored, beside = encode(both, numbers.dtype, scaled=scales is not None)
    _indexable(numbers)[page, :, :, offset] = _indexable(stored)
    if scales is not None and beside is not None:
        scales[page, :, :, offset] = beside


def _places(views: KVViews, group: int, slots: torch.Tensor) -> tuple[KVGroup, torch.Tensor, torch.Tensor]:
    spec = views.layout.groups[group]
    return spec, slots // spec.tokens_per_page, slots % spec.tokens_per_page


def _indexable(numbers: torch.Tensor) -> torch.Tensor:
    """Indexing knows no 8-bit floats."""
    return numbers.view(torch.uint8) if numbers.element_size() == 1 else numbers
