"""GET /, /docs and /dashboard/...: the pages to look at. Files only, read once; what they show they fetch like any
client.

Refuses to know: data of any kind.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.generation import Serving

FRAME = "frame.html"  # what pages have in common
PAGES = {"index.html": ("Quire", "app.js"), "docs.html": ("Quire API", "docs.js")}  # title, script
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


@cache
def _files() -> dict[str, tuple[bytes, dict[str, str]]]:
    """Name → content and headers."""
    found, folder = {}, resources.files("quire.serve").joinpath("static")
    frame = folder.joinpath(FRAME).read_text(encoding="utf-8")
    for file in folder.iterdir():
        kind = TYPES.get(file.name[file.name.rfind(".") :])
        if kind is not None and file.name != FRAME:
            content = file.read_bytes()
            if file.name in PAGES:
                title, script = PAGES[file.name]
                page = frame.replace("$title", title).replace("$script", script)
                content = page.replace("$body", content.decode()).encode()
            tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            found[file.name] = (content, {**HEADERS, "content-type": kind, "etag": tag})
    return found


def router(serving: Serving) -> APIRouter:
    """The chat and the live view, and the API's pages."""
    routes = docs_router(serving)

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return _answer(request, "index.html")

    return routes


def docs_router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["dashboard"], include_in_schema=False)

    @routes.api_route("/docs", methods=["GET", "HEAD"])
    async def docs(request: Request) -> Response:
        return _answer(request, "docs.html")

    @routes.api_route("/dashboard/{name}", methods=["GET", "HEAD"])
    async def file(request: Request, name: str) -> Response:
        return _answer(request, name)

    return routes


def _answer(request: Request, name: str) -> Response:
    files = _files()
    if name not in files:
        raise HTTPException(404)
    content, headers = files[name]
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers)
