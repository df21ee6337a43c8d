"""What engines say to each other about pages that are handed over.

Refuses to know: how frames travel, what answers them.
"""

from __future__ import annotations

import msgspec

from quire.types.transfer import Key


class PageRequest(msgspec.Struct, tag=True):
    handover: str
    keys: list[Key]
    waits: bool
    timeout: float


class Pages(msgspec.Struct, tag=True):
    """Followed by the signed pages of these keys, or the same part of each (`KVLayout.layer_parts`)."""

    handover: str
    keys: list[Key]
    part: int = -1


class PagesUnavailable(msgspec.Struct, tag=True):
    """These will not come."""

    handover: str
    keys: list[Key]


class Cancel(msgspec.Struct, tag=True):
    """Nobody waits any more: all came, or it took too long."""

    handover: str


class Received(msgspec.Struct, tag=True):
    """A message of pages was read, the oldest that was not, whether or not anybody waits for it."""


class Probe(msgspec.Struct, tag=True):
    """Nothing: sending it shows whether anybody is there."""


Frame = PageRequest | Pages | PagesUnavailable | Cancel | Received | Probe
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    return _encoder.encode(frame)


def decode(data: bytes) -> Frame:
    """msgspec.MsgspecError or ValueError: it is none."""
    return _decoder.decode(data)
