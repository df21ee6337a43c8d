"""Asking a running server something, for commands that look at one."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from quire.types.errors import QuireError


def ask_server(url: str, path: str, key: str, *, who: str = "a key") -> dict[str, Any]:
    """The JSON that a server answers with; `who` says what kind of key it wants."""
    address = (url if "://" in url else f"http://{url}").rstrip("/") + path
    if not address.startswith(("http://", "https://")):
        raise QuireError(f"{url} is no address of a server; one is http://HOST:PORT")
    try:
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {key}"} if key else {})
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, Any] = json.loads(answer.read(1 << 22))
            return found
    except urllib.error.HTTPError as error:
        raise QuireError(f"{address} answered {error.code}; is it the right address, and the key {who}?") from None
    except (urllib.error.URLError, ValueError, OSError) as error:
        raise QuireError(f"cannot ask {address}: {error}; is the server running there?") from None
