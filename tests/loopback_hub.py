"""A small hub on the loopback, with what huggingface_hub asks for: lists of files, files, ranges, gates; it drops
connections when told to."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """`files` by repository; `drops` says after how many bytes a file's next download breaks off."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.drops: dict[str, list[int]] = {}
        self.downloads: list[tuple[str, str | None]] = []  # file, Range
        self.requests = 0
        self.sent = 0  # bytes of files
        self.gated: set[str] = set()
        self.sizes: dict[tuple[str, str], int] = {}  # of files (repository, name) of which only the beginning is here

    def size(self, repository: str, name: str) -> int:
        return self.sizes.get((repository, name), len(self.files[repository][name]))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        self.server.requests += 1
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/revision/(\S+)|/tree/(\S+))?", path):
            self.describe(match[1], match[2], match[3])
        elif match := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path):
            self.file(match[1], match[3], with_body)
        else:
            self.missing("EntryNotFound")

    def missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def describe(self, repository: str, revision: str | None, tree: str | None) -> None:
        files = self.server.files.get(repository)
        if files is None:
            return self.missing("RepoNotFound")
        if revision not in (None, "main", COMMIT):
            return self.missing("RevisionNotFound")
        if repository in self.server.gated and tree:
            return self.gated()
        entries = [
            {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()} for n, d in files.items()
        ]
        siblings = [{"rfilename": name, "size": self.server.size(repository, name)} for name in files]
        gated = "manual" if repository in self.server.gated else False
        info = {"id": repository, "sha": COMMIT, "gated": gated, "siblings": siblings}
        body = json.dumps(entries if tree else info).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def gated(self) -> None:
        self.send_response(403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def file(self, repository: str, name: str, with_body: bool) -> None:
        if repository in self.server.gated:
            return self.gated()
        data = self.server.files.get(repository, {}).get(name)
        if data is None:
            return self.missing("EntryNotFound")
        wanted = self.headers.get("Range")
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "bytes=0-")
        assert match is not None
        start, size = int(match[1]), len(data)
        data = data[: int(match[2]) + 1] if match[2] else data
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{size}")
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if not with_body:
            return
        self.server.downloads.append((name, wanted))
        self.server.sent += len(data) - start
        drops = self.server.drops.get(name)
        if drops:
            self.wfile.write(data[start : start + drops.pop(0)])
            self.wfile.flush()
            self.close_connection = True  # fewer bytes than promised, then silence
        else:
            self.wfile.write(data[start:])


@contextmanager
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that HF_ENDPOINT names, and an empty cache."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 4096)  # small files, many pieces
    huggingface_hub.close_session()
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield server
    huggingface_hub.close_session()
    server.shutdown()
    server.server_close()
    thread.join()
