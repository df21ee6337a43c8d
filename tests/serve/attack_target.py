"""A server over the fake frontend in a process of its own, whose memory can be measured: its folder, then its keys."""

from __future__ import annotations

import sys
from pathlib import Path

from fake_frontend import FakeFrontend

from quire.serve.core.api_keys import Key, KeyRing, digest
from quire.serve.http.server import ServerUrl, run_server
from quire.types.serving import ServeOptions


def announce(url: ServerUrl, model: str, locked: bool) -> None:
    print(url, url.admin, url.grpc_port, flush=True)


def main(folder: Path, *names: str) -> None:
    keys = KeyRing([Key(name, digest(f"{name}-secret-0123456789")) for name in names])
    options = ServeOptions(port=0, grpc_port=0, grace=1, files=str(folder), log_level="error")
    run_server(FakeFrontend, options, keys=keys, announce=announce)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
