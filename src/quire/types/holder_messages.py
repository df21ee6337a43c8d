"""How an engine and the process that holds weights speak: messages and descriptors of memory over a Unix socket.

    engine ── Find ──► Holding (and descriptors, if they are held)
           ── Keep (and descriptors) ──► Holding
           ── Drop ──► Holding

The first descriptor is of a file that says where tensors lie, the others are the blocks they lie in. Refuses to know:
what is in either.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from types import UnionType
from typing import Any

import msgspec

MAX_MESSAGE_BYTES = 4096
MAX_BLOCKS = 200  # of one model: the system passes at most 253 descriptors with a message


class Find(msgspec.Struct, frozen=True, tag=True):
    identity: str  # of files and of options that shape weights


class Keep(msgspec.Struct, frozen=True, tag=True):
    identity: str
    bytes: int


class Drop(msgspec.Struct, frozen=True, tag=True):
    identity: str


ToHolder = Find | Keep | Drop


class Holding(msgspec.Struct, frozen=True):
    """The answer: whether these weights are held now, and how many bytes the holder would hold of one model."""

    held: bool
    limit: int


def send_message(link: socket.socket, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
    socket.send_fds(link, [msgspec.json.encode(message)], descriptors)


def receive_message(link: socket.socket, kind: type | UnionType) -> tuple[Any, list[int]]:
    """EOFError: the other side is gone. OSError: not all descriptors came, as where this process may open no more."""
    data, descriptors, flags, _ = socket.recv_fds(link, MAX_MESSAGE_BYTES, MAX_BLOCKS + 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if not data:
            raise EOFError("the other side is gone")
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "descriptors of weights were lost: too many files are open")
        return msgspec.json.decode(data, type=kind), descriptors
    except BaseException:
        close_all(descriptors)
        raise


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
