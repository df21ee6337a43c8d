"""Why a grammar cannot be used, in words that say what to change, without the compiler's own names for its parts.

Refuses to know: the compiler, beyond how its messages read.
"""

from __future__ import annotations

import re

MAX_REASON_CHARS = 400
TOO_MANY_WAYS = "there are too many ways to go on at once (too many items); make it less ambiguous"
TOO_COMPLEX = "its patterns are too complex; make them shorter, or their repetitions smaller"
PLAIN = [
    (re.compile(r"too many (expressions|states)|lexer error|fuel", re.IGNORECASE), TOO_COMPLEX),
    (re.compile(r"Current row has \d+ items|too many items|items? limit", re.IGNORECASE), TOO_MANY_WAYS),
    (re.compile(r"Unable to determine if regex is empty"), TOO_COMPLEX),
    (re.compile(r"Regex is empty: .*", re.DOTALL), "no string fits a pattern together with what else is said of it"),
    (re.compile(r"number of nested parentheses"), "a pattern is nested too deeply, or a number has too many digits"),
    (re.compile(r"NoExtensionBias"), "it leads back to itself without an end"),
    (re.compile(r"coerce_one_of|verifiably disjoint"), "the options of a oneOf cannot be told apart"),
    (re.compile(r"grammar (size|limit)|symbols? .*limit|too large", re.IGNORECASE), "it is too large"),
]
LOCATED = re.compile(r"(at )?\d+\(\d+\): ")  # in the source, which is then quoted
# What is wrong with a part, without the grammar around it, which may be our own
EMBEDDED = re.compile(r"(?:compile JSON schema: |\(in regex\): )(.*?)(?: while processing |\s\d+ \| |\Z)", re.DOTALL)
ASSERTION = re.compile(r"lookarounds not supported yet; \w+")
ANCHORS = r"^ and $ are kept to only where a pattern begins and ends, \\b nowhere:"
NOISE = re.compile(
    r"<non-verbose/>|<state>.*|Unsatisfiable schema: |(?<=\W)derivre:*|Parser Error: |; consider .*"
    r"|Enable '\w+' option.*|Unimplemented keys:",
    re.DOTALL,
)


def plain_reason(message: str) -> str:
    if embedded := EMBEDDED.search(message):
        message = embedded[1]
    for pattern, words in PLAIN:
        if not LOCATED.match(message) and pattern.search(message):
            return words
    message = ASSERTION.sub(ANCHORS, message)
    text = " ".join(NOISE.sub(" ", message).split()).strip(" ;")
    return text if len(text) <= MAX_REASON_CHARS else text[:MAX_REASON_CHARS] + " ..."
