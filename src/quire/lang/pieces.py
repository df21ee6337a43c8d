"""What prompts are made of: text, holes for the model to fill, turns of a chat, what other prompts found out.

Pieces are plain data; adding one to a prompt is what makes something happen. Refuses to know: engines, tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from quire.lang.where import OneOf, Where, where_of
from quire.types.errors import InputError
from quire.types.grammar import GrammarSpec
from quire.types.sampling_params import SamplingParams

MAX_TOKENS = 256


@dataclass(frozen=True)
class Gen:
    """A hole that the model fills."""

    name: str
    params: SamplingParams
    value: Callable[[str], Any] = str
    holds: Callable[[str], bool] | None = None  # whether a text that was cut off will do all the same


@dataclass(frozen=True)
class Select:
    """A hole that one of a few texts fills."""

    name: str
    options: tuple[str, ...]
    by: Literal["likelihood", "grammar"]
    temperature: float = 0.0


class Readable(Protocol):
    """A prompt whose holes can be waited for and read."""

    def __await__(self) -> Generator[Any, None, Any]: ...

    def __getitem__(self, name: str) -> Any: ...


@dataclass(frozen=True)
class Join:
    """A text that is known once other prompts have got so far."""

    prompts: tuple[Readable, ...]
    name: str
    each: str


@dataclass(frozen=True)
class Chunk:
    """A text whose KV may be reused wherever it stands."""

    text: str


@dataclass(frozen=True)
class Begin:
    role: str


@dataclass(frozen=True)
class End:
    pass


@dataclass(frozen=True)
class Turn:
    role: str
    pieces: tuple[Piece, ...]


Hole = Gen | Select
Piece: TypeAlias = "str | Hole | Turn | Join | Chunk | Sequence[Piece]"
Atom = str | Hole | Join | Chunk | Begin | End


def gen(
    name: str = "",
    *,
    where: Where | str | None = None,
    schema: Any = None,
    max_tokens: int | None = MAX_TOKENS,
    stop: str | Sequence[str] = (),
    **sampling: Any,
) -> Gen:
    """A hole for the model to fill; its value is read as `prompt[name]`.

    `where` holds it to a constraint (a text is a regular expression), `schema` to JSON: a schema, or a type that
    msgspec or pydantic can describe, which the value then has. Other words are those of SamplingParams.
    """
    if where is not None and schema is not None:
        raise InputError("a hole takes `where` or `schema`, not both", param="where")
    stops = ([stop] if stop else []) if isinstance(stop, str) else list(stop)
    grammar, value, holds = None, str, None  # type: tuple[GrammarSpec | None, Callable[[str], Any], Any]
    if where is not None:
        constraint = where_of(where)
        grammar, value, holds = constraint.grammar(), constraint.value, constraint.holds
    elif schema is not None:
        source, value = _schema_of(schema)
        grammar, holds = GrammarSpec("json_schema", json.dumps(source)), lambda text: False
    return Gen(name, SamplingParams(max_tokens=max_tokens, stop=stops, grammar=grammar, **sampling), value, holds)


def select(
    name: str, options: Iterable[str], *, by: Literal["likelihood", "grammar"] = "likelihood", temperature: float = 0.0
) -> Select:
    """A hole that one of `options` fills. By `likelihood`, each is scored whole and the one with the best mean
    log-probability per token taken (`prompt.scores(name)` tells them all); by `grammar`, the model draws its way
    through what they have in common, which is one call instead of one per option."""
    chosen = tuple(options)
    OneOf(*chosen)  # refuses what makes no sense
    if by not in ("likelihood", "grammar"):
        raise InputError(f"select by likelihood or by grammar, not by {by!r}", param="by")
    return Select(name, chosen, by, temperature)


def join(prompts: Iterable[Readable], name: str, each: str = "{}\n") -> Join:
    """What `prompts` put into their hole `name`, one after the other, each written as `each`. Nothing waits: whoever
    goes on from it does, until the last of them is known."""
    return Join(tuple(prompts), name, each)


def chunk(text: str) -> Chunk:
    """A document whose KV is computed once and reused wherever it stands, in other orders and behind other texts. It
    is tokenised by itself; servers that know nothing of it read it as any text."""
    if not isinstance(text, str):
        raise InputError(f"a chunk is a text, got {text!r}", param="text")
    return Chunk(text)


def system(*pieces: Piece) -> Turn:
    return Turn("system", pieces)


def user(*pieces: Piece) -> Turn:
    return Turn("user", pieces)


def assistant(*pieces: Piece) -> Turn:
    return Turn("assistant", pieces)


def atoms(piece: Piece) -> Iterator[Atom]:
    """A piece taken apart, turns included."""
    if isinstance(piece, str | Gen | Select | Join | Chunk):
        yield piece
    elif isinstance(piece, Turn):
        yield Begin(piece.role)
        for part in piece.pieces:
            yield from atoms(part)
        yield End()
    elif isinstance(piece, Sequence):
        for part in piece:
            yield from atoms(part)
    else:
        raise InputError(f"a prompt is made of texts, holes and turns, not of {type(piece).__name__}")


def _schema_of(given: Any) -> tuple[dict[str, Any], Callable[[str], Any]]:
    """A JSON schema, and how a text that keeps to it is read."""
    if isinstance(given, dict):
        return given, json.loads
    if hasattr(given, "model_json_schema"):  # pydantic's
        return _closed(given.model_json_schema()), given.model_validate_json
    try:
        return _closed(msgspec.json.schema(given)), msgspec.json.Decoder(given).decode
    except TypeError as error:
        raise InputError(f"{given!r} has no JSON schema: {error}", param="schema") from error


def _closed(schema: Any) -> Any:
    """The schema of a type without room for fields the type does not have, which a model may go on inventing."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _closed(value) for key, value in schema.items()}
    return {"additionalProperties": False, **inner} if isinstance(inner.get("properties"), dict) else inner
