"""OpenAPI for bodies that FastAPI never sees: schemas come from the same structs that parse and write them.

Refuses to know: routes.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from quire.serve.http.error_bodies import ErrorBody

_REF = "#/components/schemas/{name}"

# Structs that routes named, by the name they have in the document.
_named: dict[str, type[msgspec.Struct]] = {}


# One item of a stream, by its media type.
_STREAMS: dict[str, dict[str, Any]] = {
    "text/event-stream": {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}},
    "application/x-ndjson": {"type": "object"},
}


def _json(struct: type[msgspec.Struct]) -> dict[str, Any]:
    known = _named.setdefault(struct.__name__, struct)
    assert known is struct, f"two structs are called {struct.__name__}"
    return {"application/json": {"schema": {"$ref": _REF.format(name=struct.__name__)}}}


def answers(
    struct: type[msgspec.Struct] | None,
    *,
    error: type[msgspec.Struct] = ErrorBody,
    media: str | None = None,
    takes: type[msgspec.Struct] | None = None,
) -> dict[str, Any]:
    """`openapi_extra` of a route: the body it takes, what it answers (also as a stream of type `media`, or as nothing
    but that), and the shape of its errors."""
    content = _json(struct) if struct is not None else {}
    if media is not None:
        content[media] = {"schema": _STREAMS.get(media, {"type": "string"})}
    extra: dict[str, Any] = {
        "responses": {
            "200": {"description": "OK", "content": content},
            "4XX": {"description": "The request is at fault", "content": _json(error)},
            "5XX": {"description": "The server is at fault", "content": _json(error)},
        }
    }
    if takes is not None:
        extra["requestBody"] = {"required": True, "content": _json(takes)}
    return extra


def queried(**parameters: Any) -> dict[str, Any]:
    """... of a route with a query: its parameters, none of them required."""
    return {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in parameters.items()]}


def generates(request: type[msgspec.Struct], answer: type[msgspec.Struct]) -> dict[str, Any]:
    """... of a route that takes a body and answers at once or in a stream of events."""
    return answers(answer, takes=request, media="text/event-stream")


def install_schemas(app: FastAPI, *, strict: bool) -> None:
    """Add the structs' schemas to the app's OpenAPI document. `strict`: requests have no other fields than these."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = build()
            _, components = msgspec.json.schema_components(_named.values(), ref_template=_REF)
            for schema in components.values() if not strict else ():
                schema.pop("additionalProperties", None)
            document.setdefault("components", {}).setdefault("schemas", {}).update(components)
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)  # FastAPI's own way to refuse, which is never taken here
        return build()

    app.openapi = openapi  # type: ignore[method-assign]
