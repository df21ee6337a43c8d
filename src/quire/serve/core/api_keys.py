"""API keys: where they come from, what they allow, and comparing them in constant time.

Only SHA-256 digests are kept; a key is a long random string, so a digest says nothing about it. Keys come from a file
or the environment, never from the command line, which every user of the machine can read.
Refuses to know: HTTP, routes.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.types.errors import ConfigError, UnauthorizedError

INFERENCE, ADMIN = "inference", "admin"
SCOPES = (INFERENCE, ADMIN)
ENVIRONMENT = {"QUIRE_API_KEY": INFERENCE, "QUIRE_ADMIN_KEY": ADMIN}
LIMITS = ("concurrency", "tokens_per_minute")
LEVELS = ("weight", "slo_ttft", "slo_tpot")
MAX_FILE = 1 << 20
MIN_LENGTH = 16  # characters of a key given in clear
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")


@dataclass(frozen=True)
class Key:
    """One key by name: its digest, what it may do, and limits that override the server's (None: the server's)."""

    name: str
    digest: bytes = b""
    scopes: frozenset[str] = frozenset(SCOPES)
    concurrency: int | None = None
    tokens_per_minute: int | None = None
    weight: float = 1.0  # its share beside others, where the scheduler is fair between tenants
    slo_ttft: float = 0.0  # targets of its requests, in seconds, where they have none of their own; 0: the server's
    slo_tpot: float = 0.0


OPEN_KEY = Key("open")  # stands for everybody where no keys are configured


class KeyRing:
    """The keys of one server; without any, everything is open (and the server stays on loopback)."""

    def __init__(self, keys: list[Key] | None = None):
        self.keys = keys or []
        names = [key.name for key in self.keys]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"key names must differ; {min(twice)!r} is used twice")

    @property
    def open(self) -> bool:
        return not self.keys

    def find(self, presented: str | None) -> Key:
        """The key whose secret was presented. Every digest is compared, so time tells nothing."""
        if self.open:
            return OPEN_KEY
        if presented is None:
            raise UnauthorizedError("an API key is needed; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")
        given = digest(presented)
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, given):
                found = key
        if found is None:
            raise UnauthorizedError("the API key is not known here; check it, or ask the operator for a new one")
        return found


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def new_secret() -> str:
    return "sk-quire-" + secrets.token_urlsafe(32)


def load_keys(path: str | None, environment: Mapping[str, str] = os.environ) -> KeyRing:
    """Keys of the file, if one is named, and of QUIRE_API_KEY and QUIRE_ADMIN_KEY."""
    keys = _from_file(Path(path)) if path else []
    for variable, scope in ENVIRONMENT.items():
        if secret := environment.get(variable):
            keys.append(Key(variable, _clear(secret, variable), frozenset({scope})))
    return KeyRing(keys)


def _from_file(path: Path) -> list[Key]:
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            if info.st_size > MAX_FILE:
                raise ConfigError(f"{path} is too large for a key file ({info.st_size} bytes)")
            document = tomllib.load(file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the key file {path}: {error}") from None
    entries = document.pop("key", None)
    if not isinstance(entries, list) or not entries or document:
        raise ConfigError(f"{path}: a key file holds [[key]] tables and nothing else; `quire keys new` prints one")
    if any("key" in entry for entry in entries) and stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigError(f"{path} holds keys in clear but others can read it; chmod 600 it, or store sha256 digests")
    return [check_entry(path, entry) for entry in entries]


def check_entry(path: Path | str, entry: dict[str, Any]) -> Key:
    """One [[key]] table: name, sha256 (or key, in clear), scopes, concurrency, tokens_per_minute, weight, slo_ttft,
    slo_tpot."""
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{path}: every key needs a name of letters, digits and ._@- (at most 64), got {name!r}")
    if unknown := set(entry) - {"name", "sha256", "key", "scopes", *LIMITS, *LEVELS}:
        raise ConfigError(f"{path}: key {name!r} has an unknown field {min(unknown)!r}")
    if ("sha256" in entry) == ("key" in entry):
        raise ConfigError(f"{path}: key {name!r} needs either sha256 or key")
    scopes = entry.get("scopes", [INFERENCE])
    if not isinstance(scopes, list) or not scopes or not all(scope in SCOPES for scope in scopes):
        raise ConfigError(f"{path}: scopes of key {name!r} must be a list of {' and '.join(SCOPES)}, got {scopes!r}")
    for field in LEVELS:
        value = entry.get(field, 1)
        if isinstance(value, bool) or not (isinstance(value, int | float) and 0 < value < math.inf):
            raise ConfigError(f"{path}: {field} of key {name!r} must be a number above 0")
    for field in LIMITS:
        if field in entry and (not isinstance(entry[field], int) or isinstance(entry[field], bool) or entry[field] < 0):
            raise ConfigError(f"{path}: {field} of key {name!r} must be a whole number, 0 for no limit")
    hashed = _hashed(entry["sha256"], name, path) if "sha256" in entry else _clear(entry["key"], name)
    own = {field: entry[field] for field in (*LIMITS, *LEVELS) if field in entry}
    return Key(name, hashed, frozenset(scopes), **own)


def _hashed(value: Any, name: str, path: Path | str) -> bytes:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", value):
        raise ConfigError(f"{path}: sha256 of key {name!r} must be 64 hexadecimal digits")
    return bytes.fromhex(value)


def _clear(secret: Any, name: str) -> bytes:
    if not isinstance(secret, str) or len(secret) < MIN_LENGTH:
        raise ConfigError(f"key {name!r} is too short; use at least {MIN_LENGTH} random characters (`quire keys new`)")
    return digest(secret)
