"""How a request body says what becomes of its fields: honoured, an extension, accepted without effect, or refused.

A field is declared once, in the struct that parses it; its place in the OpenAPI document and its line in docs/api.md
come from that declaration. Refuses to know: any particular API.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from quire.serve.core.context import current
from quire.types.blend import BlendParams
from quire.types.errors import InputError
from quire.types.request import MAX_HOLD

# Bounded here because Python's integers are not, and JSON's digits are free.
Int = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=1, le=1 << 30)]
Name = Annotated[str, Meta(max_length=256)]


def extension(meaning: str, **bounds: Any) -> Meta:
    """A field that the published API does not have."""
    return Meta(description=f"Extension: {meaning}.", extra={"kind": "extension", "note": meaning}, **bounds)


def noted(meaning: str, **bounds: Any) -> Meta:
    """A field honoured in a way worth a word."""
    sentence = f"{meaning[0].upper()}{meaning[1:]}."
    return Meta(description=sentence, extra={"kind": "honoured", "note": meaning}, **bounds)


def unused(why: str = "a label") -> Meta:
    """A field whose value changes nothing anywhere: labels and hints."""
    return Meta(description=f"Accepted without effect: {why}.", extra={"kind": "no effect", "note": why})


def refused(*neutral: Any, why: str = "") -> Meta:
    """A published field this server cannot act on. `neutral` are the values, besides null, that ask for nothing."""
    values = ", ".join(msgspec.json.encode(value).decode() for value in neutral)
    note = f"only {values}" if neutral else "only null"
    return Meta(
        description=f"Refused but for null{', ' + values if neutral else ''}.",
        extra={"kind": "refused", "note": f"{note}; {why}" if why else note, "neutral": neutral},
        extra_json_schema={"enum": [None, *neutral]},
    )


def left_out(*neutral: Any, why: str = "") -> Meta:
    """A published field this server cannot act on and that a request does without: the response's headers name it.
    Where strictness was asked for it is refused. `neutral` as for `refused`."""
    note = f"ignored and named in a header{'; ' + why if why else ''}"
    return Meta(description=f"{note.capitalize()}.", extra={"kind": "no effect", "note": note, "left_out": neutral})


# Kinds of fields that bodies of several APIs have.
MAX_TOOLS = 128
ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
JsonSchema = Annotated[dict[str, Any], Meta(description="A JSON schema.")]
# OpenAI's bounds: 16 pairs, keys of 64 characters, values of 512.
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
SessionId = Annotated[str, extension("keep this conversation's pages when the answer has ended", max_length=256)]
SessionTtl = Annotated[float, extension("for so many seconds (300)", gt=0, le=MAX_HOLD)]
BlendField = Annotated[BlendParams, extension("chunks (documents) whose KV may be reused at another place")]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class ServiceLevel(msgspec.Struct, forbid_unknown_fields=True):
    """Targets of one request, in seconds."""

    ttft: Annotated[float, Meta(gt=0, le=86_400, description="to the first token")] | None = None
    tpot: Annotated[float, Meta(gt=0, le=3_600, description="for each token after it")] | None = None


Slo = Annotated[ServiceLevel, extension("targets in seconds, `ttft` and `tpot` (`--scheduler slo` or `auto`)")]


class Field(NamedTuple):
    name: str
    kind: str  # honoured, extension, no effect, refused
    note: str
    neutral: tuple[Any, ...]
    left_out: bool = False


def fields_of(body: type[msgspec.Struct]) -> list[Field]:
    """Every field of a body as its declaration describes it, by the name it has in JSON."""
    hints = typing.get_type_hints(body, include_extras=True)
    out = []
    for inner, outer in zip(body.__struct_fields__, body.__struct_encode_fields__, strict=True):
        extra = next((meta.extra for meta in _metas(hints[inner]) if meta.extra), {})
        spare = "left_out" in extra
        neutral = extra["left_out"] if spare else extra.get("neutral", ())
        out.append(Field(outer, extra.get("kind", "honoured"), extra.get("note", ""), neutral, spare))
    return out


def _metas(hint: Any) -> Iterator[Meta]:
    yield from (meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, Meta))
    if typing.get_origin(hint) is not list:
        for part in typing.get_args(hint):
            yield from _metas(part)


@cache
def _refused_fields(body: type[msgspec.Struct]) -> list[Field]:
    return [field for field in fields_of(body) if field.kind == "refused" or field.left_out]


def refuse_unsupported(body: msgspec.Struct) -> None:
    """Raise for a refused field that asks for something; note one that is left out."""
    for name, _, _, neutral, spare in _refused_fields(type(body)):
        value = getattr(body, name)
        if value is not None and not any(value == item and type(value) is type(item) for item in neutral):
            if spare and not current().strict_fields:
                current().ignored.add(name)
                continue
            advice = "leave it out"
            if neutral:
                advice += f" or set it to {msgspec.json.encode(neutral[0]).decode()}"
            message = f"{name} is not supported with this value by this server; {advice}"
            raise InputError(message, param=name, code="unsupported_parameter")
