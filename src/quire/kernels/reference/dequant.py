"""GGUF block formats to floats, vectorised over blocks, on whatever device the bytes are.

A block is a run of elements of one row with its scales. Layouts (sizes in bytes; d, m, dmin are float16):

    Q8_0  d qs[32]                       Q2_K  scales[16] qs[64] d dmin
    Q4_0  d qs[16]                       Q3_K  hmask[32] qs[64] scales[12] d
    Q4_1  d m qs[16]                     Q4_K  d dmin scales[12] qs[128]
    Q5_0  d qh[4] qs[16]                 Q5_K  d dmin scales[12] qh[32] qs[128]
    Q5_1  d m qh[4] qs[16]               Q6_K  ql[128] qh[64] scales[16] d

Those of IQ types and MXFP4 are in iq_blocks.py.

Refuses to know: files, names, models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from quire.kernels.reference import iq_blocks as iq
from quire.kernels.reference.block_fields import fields, half
from quire.types.errors import ModelFileError

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


class BlockFormat(NamedTuple):
    elements: int
    nbytes: int
    decode: Callable[[torch.Tensor], torch.Tensor]  # [blocks, nbytes] uint8 → [blocks, elements] float32


def dequantize(raw: torch.Tensor, kind: str) -> torch.Tensor:
    """uint8 [..., bytes] → [..., elements]; float kinds keep their dtype, blocks become float32."""
    if kind in FLOATS:
        return raw.contiguous().view(FLOATS[kind])
    block = FORMATS.get(kind)
    if block is None:
        raise ModelFileError(f"weights of type {kind} are not supported; known: {', '.join([*FLOATS, *FORMATS])}")
    if raw.shape[-1] % block.nbytes:
        raise ModelFileError(f"{raw.shape[-1]} bytes are not a whole number of {kind} blocks of {block.nbytes} bytes")
    blocks = block.decode(raw.reshape(-1, block.nbytes))
    return blocks.view(*raw.shape[:-1], raw.shape[-1] // block.nbytes * block.elements)


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    """32 single bits of 4 bytes, each moved to bit 4: [blocks, 4] → [blocks, 32]."""
    return fields(data, 1, 1) << 4


def _q8_0(b: torch.Tensor) -> torch.Tensor:
    return b[:, 2:].contiguous().view(torch.int8).float() * half(b, 0)


def _q4_0(b: torch.Tensor) -> torch.Tensor:
    return half(b, 0) * (fields(b[:, 2:], 4, 16).float() - 8)


def _q4_1(b: torch.Tensor) -> torch.Tensor:
    return half(b, 0) * fields(b[:, 4:], 4, 16).float() + half(b, 2)


def _q5_0(b: torch.Tensor) -> torch.Tensor:
    q = fields(b[:, 6:], 4, 16) | _fifth_bits(b[:, 2:6])
    return half(b, 0) * (q.float() - 16)


def _q5_1(b: torch.Tensor) -> torch.Tensor:
    q = fields(b[:, 8:], 4, 16) | _fifth_bits(b[:, 4:8])
    return half(b, 0) * q.float() + half(b, 2)


def _groups(q: torch.Tensor, count: int) -> torch.Tensor:
    """Elements by the scale they share: [blocks, elements] → [blocks, count, elements / count]."""
    return q.view(q.shape[0], count, -1)


def _q2_k(b: torch.Tensor) -> torch.Tensor:
    scales, q = b[:, :16], fields(b[:, 16:80], 2, 32).float()
    d = half(b, 80) * (scales & 15).float()
    m = half(b, 82) * (scales >> 4).float()
    return (d[:, :, None] * _groups(q, 16) - m[:, :, None]).view(-1, 256)


def _q3_k(b: torch.Tensor) -> torch.Tensor:
    low, high = fields(b[:, 96:104], 4, 8), fields(b[:, 104:108], 2, 4)  # 16 scales: 4 bits + 2 bits
    d = half(b, 108) * ((low | (high << 4)).float() - 32)
    high_bits = fields(b[:, :32], 1, 32)  # a set bit means: do not subtract 4
    q = fields(b[:, 32:96], 2, 32).float() + (high_bits.float() * 4 - 4)
    return (d[:, :, None] * _groups(q, 16)).view(-1, 256)


def _scales_and_mins(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """12 bytes → 8 scales and 8 minima of 6 bits: the first four of each lie whole in bytes 0-3 and 4-7; the last
    four take their low bits from bytes 8-11 and their two high bits from the tops of bytes 0-7."""
    d, m, both = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((d & 0x3F, (both & 0x0F) | ((d >> 2) & 0x30)), dim=1)
    mins = torch.cat((m & 0x3F, (both >> 4) | ((m >> 2) & 0x30)), dim=1)
    return scales.float(), mins.float()


def _scaled_k(b: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    scales, mins = _scales_and_mins(b[:, 4:16])
    d, m = half(b, 0) * scales, half(b, 2) * mins
    return (d[:, :, None] * _groups(q.float(), 8) - m[:, :, None]).view(-1, 256)


def _q4_k(b: torch.Tensor) -> torch.Tensor:
    return _scaled_k(b, fields(b[:, 16:144], 4, 32))


def _q5_k(b: torch.Tensor) -> torch.Tensor:
    return _scaled_k(b, fields(b[:, 48:176], 4, 32) | (fields(b[:, 16:48], 1, 32) << 4))


def _q6_k(b: torch.Tensor) -> torch.Tensor:
    q = fields(b[:, :128], 4, 64) | (fields(b[:, 128:192], 2, 32) << 4)
    d = half(b, 208) * b[:, 192:208].contiguous().view(torch.int8).float()
    return (d[:, :, None] * _groups(q.float() - 32, 16)).view(-1, 256)


FORMATS = {
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "Q2_K": BlockFormat(256, 84, _q2_k),
    "Q3_K": BlockFormat(256, 110, _q3_k),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q5_K": BlockFormat(256, 176, _q5_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
    "IQ4_NL": BlockFormat(32, 18, iq.iq4_nl),
    "IQ4_XS": BlockFormat(256, 136, iq.iq4_xs),
    "IQ3_S": BlockFormat(256, 110, iq.iq3_s),
    "IQ3_XXS": BlockFormat(256, 98, iq.iq3_xxs),
    "IQ2_S": BlockFormat(256, 82, iq.iq2_s),
    "IQ2_XS": BlockFormat(256, 74, iq.iq2_xs),
    "IQ2_XXS": BlockFormat(256, 66, iq.iq2_xxs),
    "IQ1_M": BlockFormat(256, 56, iq.iq1_m),
    "IQ1_S": BlockFormat(256, 50, iq.iq1_s),
    "MXFP4": BlockFormat(32, 17, iq.mxfp4),
}
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")  # kinds that are integers of 4 bits times a scale and more


def four_bit_blocks(raw: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of bytes → integers [rows, columns], and of each block of 32 of them a scale and what is added, float32
    [rows, columns / 32]."""
    blocks = raw.reshape(-1, FORMATS[kind].nbytes)
    if kind == "Q4_K":
        scales, mins = _scales_and_mins(blocks[:, 4:16])
        numbers, scale, low = fields(blocks[:, 16:144], 4, 32), half(blocks, 0) * scales, -half(blocks, 2) * mins
    else:
        one = kind == "Q4_1"
        numbers, scale = fields(blocks[:, 4 if one else 2 :], 4, 16), half(blocks, 0)
        low = half(blocks, 2) if one else -8 * scale
    return numbers.view(len(raw), -1), scale.view(len(raw), -1), low.view(len(raw), -1)
