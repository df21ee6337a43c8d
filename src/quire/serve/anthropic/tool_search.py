"""Tools that are not told to the model until it has found them: Anthropic's tool search, by words (BM25) or by regex.

Refuses to know: how tools are described to a model, messages, HTTP.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from quire.serve.core.prepare_pool import off_loop
from quire.text import Tool

FOUND = 5  # tools that one search returns
MAX_PATTERN = 200  # characters, as with Anthropic
REGEX_SECONDS = 2.0
_K1, _B = 1.5, 0.75  # of BM25, as usual
_WORD = re.compile(r"[a-z0-9]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

# A pattern that a model wrote may take for ever, and no thread can be stopped: this runs in a process that can.
_MATCH = (
    "import json,re,sys\n"
    "pattern,texts=json.load(sys.stdin)\n"
    "found=re.compile(pattern,re.I)\n"
    "print(json.dumps([i for i,text in enumerate(texts) if found.search(text)]))\n"
)


class SearchError(Exception):
    """A search that could not be made; `code` is Anthropic's name for why."""

    def __init__(self, code: str):
        super().__init__(code)
        self.code = code


def search_tool(name: str) -> Tool:
    """The search as a tool that the model may call."""
    regex = name.startswith("tool_search_tool_regex")
    how = "a regular expression (Python's re, case is ignored)" if regex else "words in any order"
    query = {"type": "string", "description": f"What to look for: {how}."}
    return Tool(
        name=name,
        description=(
            "Finds further tools by their names, descriptions and parameters. "
            "Those it returns can be called from then on."
        ),
        parameters={
            "type": "object",
            "properties": {"query": query},
            "required": ["query"],
            "additionalProperties": False,
        },
    )


async def search(name: str, query: Any, tools: Sequence[Tool]) -> list[Tool]:
    """The best few of `tools`, by the search of that name."""
    if not isinstance(query, str) or not query.strip():
        raise SearchError("invalid_tool_input")
    texts = [_text(tool) for tool in tools]
    if name.startswith("tool_search_tool_regex"):
        if len(query) > MAX_PATTERN:
            raise SearchError("pattern_too_long")
        places = await _matching(query, texts)
    else:
        places = await off_loop(sum(map(len, texts)), lambda: _ranked(query, texts))
    return [tools[place] for place in places[:FOUND]]


def _text(tool: Tool) -> str:
    found = [tool.name, tool.description]
    for name, schema in (tool.parameters.get("properties") or {}).items():
        found += [name, str(schema.get("description", "")) if isinstance(schema, dict) else ""]
    return "\n".join(found)


async def _matching(pattern: str, texts: list[str]) -> list[int]:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        raise SearchError("invalid_pattern") from None
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", _MATCH, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        out, _ = await asyncio.wait_for(process.communicate(json.dumps([pattern, texts]).encode()), REGEX_SECONDS)
    except TimeoutError:
        raise SearchError("unavailable") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise SearchError("unavailable")
    return list(json.loads(out))


def _words(text: str) -> list[str]:
    return _WORD.findall(_CAMEL.sub(" ", text).lower())


def _ranked(query: str, texts: list[str]) -> list[int]:
    """Places of the texts that have any of the words, best first."""
    counted = [Counter(_words(text)) for text in texts]
    sizes = [sum(words.values()) for words in counted]
    mean = sum(sizes) / max(1, len(sizes)) or 1.0
    scores = [0.0] * len(texts)
    for word in set(_words(query)):
        having = sum(word in words for words in counted)
        weight = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        for place, words in enumerate(counted):
            if count := words[word]:
                scores[place] += weight * count * (_K1 + 1) / (count + _K1 * (1 - _B + _B * sizes[place] / mean))
    return sorted((place for place, score in enumerate(scores) if score > 0), key=lambda place: -scores[place])
