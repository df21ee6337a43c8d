"""OpenAPI for bodies that FastAPI never sees: schemas come from the same structs that parse and write them.

Refuses to know: routes.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from quire.serve.errors import ErrorBody
from quire.serve.schema import ChatCompletion, ChatRequest, Completion, CompletionRequest, ModelCard, ModelList

_REF = "#/components/schemas/{name}"
_STRUCTS = (ChatRequest, ChatCompletion, CompletionRequest, Completion, ModelCard, ModelList, ErrorBody)


def _json(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=struct.__name__)}}}


def answers(struct: type[msgspec.Struct], **more: Any) -> dict[str, Any]:
    """`openapi_extra` of a route: what it answers, and the one shape of its errors."""
    return {
        "responses": {
            "200": {"description": "OK", "content": _json(struct) | more},
            "4XX": {"description": "The request is at fault", "content": _json(ErrorBody)},
            "5XX": {"description": "The server is at fault", "content": _json(ErrorBody)},
        }
    }


def generates(request: type[msgspec.Struct], answer: type[msgspec.Struct]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes a body and answers at once or in a stream of events."""
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    return {"requestBody": {"required": True, "content": _json(request)}, **answers(answer, **events)}


def install_schemas(app: FastAPI) -> None:
    """Add the structs' schemas to the app's OpenAPI document."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _, components = msgspec.json.schema_components(_STRUCTS, ref_template=_REF)
            build().setdefault("components", {}).setdefault("schemas", {}).update(components)
        return build()

    app.openapi = openapi  # type: ignore[method-assign]
