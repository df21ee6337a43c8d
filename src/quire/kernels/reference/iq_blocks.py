"""GGUF's IQ types and MXFP4 to floats: numbers chosen from a table, or several at once from a grid of points.

A block is a run of elements of one row. Layouts (sizes in bytes; d is a float16, e an exponent):

    IQ4_NL  d qs[16]                              IQ3_S   d qs[64] qh[8] signs[32] scales[4]
    IQ4_XS  d scales_h[2] scales_l[4] qs[128]     IQ3_XXS d qs[64] signs_and_scales[32]
    IQ2_S   d qs[32] signs[32] qh[8] scales[8]    IQ1_S   d qs[32] qh[16]
    IQ2_XS  d qs[64] scales[8]                    IQ1_M   qs[32] qh[16] scales[8], d in the tops of the scales
    IQ2_XXS d (qs[4] signs_and_scale[4])[8]       MXFP4   e qs[16]

Refuses to know: files, names, models.
"""

from __future__ import annotations

import torch

from quire.kernels.reference.block_fields import fields, half, split_words, words
from quire.kernels.reference.iq_grids import grid

_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_TWO_BITS = (0x08, 0x19, 0x2B)
_THREE_BITS_XXS = (0x04, 0x0C, 0x14, 0x1C, 0x24, 0x2C, 0x34, 0x3E)
_THREE_BITS_S = (1, 3, 5, 7, 9, 11, 13, 15)
_ONE_BIT = (-1, 0, 1)
_DELTA = 0.125  # by which the points of the 1-bit types are moved


def _chosen(numbers: torch.Tensor, table: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(table, dtype=torch.float32, device=numbers.device)[numbers.long()]


def _points(name: str, levels: tuple[int, ...], numbers: torch.Tensor) -> torch.Tensor:
    """[blocks, points] → [blocks, elements]"""
    return grid(name, levels, numbers.device)[numbers].flatten(1)


def _scaled(scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Scales [blocks, groups], values [blocks, elements]."""
    return (scales[:, :, None] * values.unflatten(1, (scales.shape[1], -1))).flatten(1)


def _signs(bits: torch.Tensor) -> torch.Tensor:
    """Bytes of sign bits, [blocks, bytes] → ±1, [blocks, 8 * bytes]."""
    return 1.0 - 2.0 * fields(bits, 1, 1).float()


def _even_signs(numbers: torch.Tensor) -> torch.Tensor:
    """Seven sign bits each; the eighth makes the number of minus signs even."""
    parity = sum((numbers >> bit) & 1 for bit in range(7)) & 1
    return _signs((numbers | (parity << 7)).to(torch.uint8))


def iq4_nl(b: torch.Tensor) -> torch.Tensor:
    return half(b, 0) * _chosen(fields(b[:, 2:], 4, 16), _NONLINEAR)


def iq4_xs(b: torch.Tensor) -> torch.Tensor:
    high = split_words(words(b[:, 2:4], 2), tuple(range(0, 16, 2)), 2)
    scales = (fields(b[:, 4:8], 4, 1).long() | (high << 4)) - 32
    return _scaled(half(b, 0) * scales.float(), _chosen(fields(b[:, 8:], 4, 16), _NONLINEAR))


def mxfp4(b: torch.Tensor) -> torch.Tensor:
    exponents = b[:, :1].int()
    halved = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return halved.view(torch.float32) * _chosen(fields(b[:, 1:], 4, 16), _E2M1_DOUBLED)


def iq2_xxs(b: torch.Tensor) -> torch.Tensor:
    runs = b[:, 2:].reshape(b.shape[0], 8, 8)
    numbers, other = runs[:, :, :4].flatten(1).long(), words(runs[:, :, 4:].flatten(1), 4)
    scales = half(b, 0) * (0.5 + (other >> 28).float()) * 0.25
    signs = _even_signs(split_words(other, (0, 7, 14, 21), 7))
    return _scaled(scales, _points("IQ2_XXS", _TWO_BITS, numbers)) * signs


def iq2_xs(b: torch.Tensor) -> torch.Tensor:
    numbers = words(b[:, 2:66], 2)
    scales = half(b, 0) * (0.5 + fields(b[:, 66:], 4, 1).float()) * 0.25
    return _scaled(scales, _points("IQ2_XS", _TWO_BITS, numbers & 511)) * _even_signs(numbers >> 9)


def iq2_s(b: torch.Tensor) -> torch.Tensor:
    numbers = b[:, 2:34].long() | (fields(b[:, 66:74], 2, 1).long() << 8)
    scales = half(b, 0) * (0.5 + fields(b[:, 74:], 4, 1).float()) * 0.25
    return _scaled(scales, _points("IQ2_S", _TWO_BITS, numbers)) * _signs(b[:, 34:66])


def iq3_xxs(b: torch.Tensor) -> torch.Tensor:
    other = words(b[:, 66:], 4)
    scales = half(b, 0) * (0.5 + (other >> 28).float()) * 0.5
    signs = _even_signs(split_words(other, (0, 7, 14, 21), 7))
    return _scaled(scales, _points("IQ3_XXS", _THREE_BITS_XXS, b[:, 2:66].long())) * signs


def iq3_s(b: torch.Tensor) -> torch.Tensor:
    numbers = b[:, 2:66].long() | (fields(b[:, 66:74], 1, 1).long() << 8)
    scales = half(b, 0) * (1 + 2 * fields(b[:, 106:], 4, 1)).float()
    return _scaled(scales, _points("IQ3_S", _THREE_BITS_S, numbers)) * _signs(b[:, 74:106])


def _moved(points: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Points [blocks, elements], moved up or `down` ([blocks, groups], not 0)."""
    return (points.unflatten(1, (down.shape[1], -1)) + torch.where(down == 0, _DELTA, -_DELTA)[:, :, None]).flatten(1)


def iq1_s(b: torch.Tensor) -> torch.Tensor:
    other = words(b[:, 34:], 2)
    numbers = b[:, 2:34].long() | (split_words(other, (0, 3, 6, 9), 3) << 8)
    scales = half(b, 0) * (2 * ((other >> 12) & 7) + 1).float()
    return _scaled(scales, _moved(_points("IQ1_S", _ONE_BIT, numbers), other & 0x8000))


def iq1_m(b: torch.Tensor) -> torch.Tensor:
    other, high = words(b[:, 48:], 2), fields(b[:, 32:48], 4, 1).long()
    tops = (other >> 12) << torch.tensor((0, 4, 8, 12), device=b.device)
    bits = tops.sum(1, keepdim=True)
    d = torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(torch.float16).float()
    numbers = b[:, :32].long() | ((high & 7) << 8)
    scales = d * (2 * split_words(other, (0, 3, 6, 9), 3) + 1).float()
    return _scaled(scales, _moved(_points("IQ1_S", _ONE_BIT, numbers), high & 8))
