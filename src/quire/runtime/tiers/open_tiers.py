"""Options → the tiers of one engine: which there are, what they hold already, under which names.

names and checksums are keyed with one secret: the remote server's where there is one, else the disk's, else none
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from quire.runtime.tiers.disk import DiskFolder, DiskTier
from quire.runtime.tiers.host import HostTier
from quire.runtime.tiers.redis import RemoteTier, connect, shared_secret
from quire.runtime.tiers.signed_page import PageSigner
from quire.types.config import CacheOptions
from quire.types.errors import ConfigError
from quire.types.kv import KVLayout
from quire.types.option_checks import named_size, parse_size
from quire.types.seams import WeightSource
from quire.types.transfer import DISK, HOST, REMOTE, KVTier, TierSpec

log = logging.getLogger(__name__)

DEFAULT_DISK_BYTES = 16 << 30  # where none is said
FINGERPRINT_SAMPLE_BYTES = 4096  # bytes of each tensor, at three places, that go into a fingerprint


@dataclass
class Tiers:
    specs: list[TierSpec] = field(default_factory=list)
    stores: dict[str, KVTier] = field(default_factory=dict)
    naming: bytes = b""
    reasons: list[str] = field(default_factory=list)
    signal: threading.Event = field(default_factory=threading.Event)

    def add(self, spec: TierSpec, store: KVTier, why: str) -> None:
        self.specs.append(spec)
        self.stores[spec.name] = store
        self.reasons.append(why)


def open_tiers(options: CacheOptions, layout: KVLayout, fingerprint: bytes, *, pinned: bool) -> Tiers:
    """The tiers asked for, fastest first."""
    tiers = Tiers()
    if options.kv_host:
        pages = parse_size(options.kv_host) // layout.page_bytes
        if not pages:
            raise ConfigError(f"--kv-host {options.kv_host} is less than one page of {layout.page_bytes} bytes")
        store = HostTier(pages, layout.page_bytes, tiers.signal, pinned=pinned)
        tiers.add(TierSpec(HOST, pages), store, f"host tier: {pages} KV pages" + (", pinned" if pinned else ""))
    folder, size = _folder(options.kv_disk)
    client, secret = _server(options.kv_remote, folder)
    if folder is not None and not secret:
        secret = folder.secret()
    if not secret:
        return tiers
    signer = PageSigner(secret, fingerprint, layout)
    tiers.naming = signer.naming
    if folder is not None:
        disk = DiskTier(folder, signer, size, tiers.signal, fsync=options.kv_fsync)
        found = disk.scan()
        why = f"disk tier: {folder.path}, up to {disk.pages} KV pages, {len(found)} there already"
        tiers.add(TierSpec(DISK, disk.pages, found, kept=True), disk, why)
    if client is not None:
        tiers.add(TierSpec(REMOTE, 0, kept=True), RemoteTier(client, signer, tiers.signal), "remote tier: shared")
    elif options.kv_remote:
        tiers.reasons.append("remote tier: off until the next start, the server did not answer")
    return tiers


def _folder(disk: str | None) -> tuple[DiskFolder | None, int]:
    if not disk:
        return None, 0
    path, size = named_size(disk)
    folder = DiskFolder(Path(path).expanduser())
    return folder, parse_size(size) if size else min(DEFAULT_DISK_BYTES, shutil.disk_usage(folder.path).free // 2)


def _server(url: str | None, folder: DiskFolder | None) -> tuple[Any, bytes]:
    """A client and the secret engines share there. Without an answer the engine starts all the same."""
    if not url:
        return None, b""
    client = connect(url)
    try:
        secret = shared_secret(client, folder.secret() if folder is not None else b"")
    except Exception as error:
        log.warning("no remote KV tier: %s did not answer: %s", url.rpartition("@")[2], error)
        return None, b""
    return client, folder.secret(secret) if folder is not None else secret


def fingerprint(source: WeightSource, how: str, *, weights: bool = True) -> bytes:
    """Tells models apart whose pages must not be mistaken for each other: description, shapes and a sample of every
    tensor (unless its `weights` are not used), and `how` they are computed, since that changes a page's last bits."""
    digest = hashlib.blake2b(how.encode(), digest_size=16)
    digest.update(msgspec.json.encode(source.metadata(), enc_hook=str, order="sorted"))
    for name, info in sorted(source.tensors().items()) if weights else ():
        digest.update(msgspec.msgpack.encode(info))
        data = source.read(name).reshape(-1)
        for start in (0, max(0, len(data) // 2), max(0, len(data) - FINGERPRINT_SAMPLE_BYTES)):
            digest.update(data[start : start + FINGERPRINT_SAMPLE_BYTES].tobytes())
    return digest.digest()
