"""What sparse attention costs and saves: pass keys found in a haystack with all pages and with some, and the bytes that
attention reads.

A haystack holds several pass keys under names, far apart; each is asked for by itself, behind the same haystack, which
is computed once. The question is no part of the prompt but forced upon the answer (by a grammar), so that it is read
as decoding reads: sparsely. Refuses to know: how pages are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random

from quire.engine.llm import LLM
from quire.engine.request_progress import RequestProgress
from quire.types.grammar import GrammarSpec
from quire.types.sampling_params import SamplingParams

NAMES = ("Anna", "Bruno", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Irene", "Jakob", "Karla", "Leo")
NEEDLE = "\nThe pass key of {0} is {1}. Remember it: {1} is the pass key of {0}.\n"
QUESTION = "\\nWhat is the pass key of {0}? The pass key of {0} is "


def haystack(llm: LLM, length: int, filler: Sequence[int], keys: dict[str, str], rng: Random) -> list[int]:
    """So many tokens with these pass keys in it, at even depths."""
    needles = [llm.text.tokenizer.encode(NEEDLE.format(*pair), add_special=False) for pair in keys.items()]
    room = length - sum(map(len, needles))
    first = rng.randrange(max(1, len(filler) - room))
    hay = list(filler[first : first + room])
    found: list[int] = []
    for at, needle in enumerate(needles):
        begin, end = (room * part // len(needles) for part in (at, at + 1))
        middle = rng.randrange(begin, end)
        found += [*hay[begin:middle], *needle, *hay[middle:end]]
    return found


def asked(name: str, pages: int) -> SamplingParams:
    question = QUESTION.format(name)
    grammar = GrammarSpec("lark", f'start: "{question}" KEY\nKEY: /[0-9]{{5}}/')
    return SamplingParams(temperature=0.0, max_tokens=64, grammar=grammar, sparse_pages=pages)


def compare(
    llm: LLM, *, length: int, pages: int, haystacks: int, keys: int, filler: Sequence[int], seed: int = 1
) -> dict[str, float]:
    """Shares of pass keys found with all pages and with `pages` of them, and how much less attention reads."""
    rng = Random(seed)
    found = {0: 0, pages: 0}
    llm.reset()
    with RequestProgress(haystacks * keys * len(found), what="questions") as progress:
        for _ in range(haystacks):
            held = {name: str(rng.randrange(10_000, 100_000)) for name in rng.sample(NAMES, keys)}
            hay = haystack(llm, length, filler, held, rng)
            for budget, (name, key) in product(found, held.items()):
                (answer,) = llm.generate([hay], asked(name, budget))
                found[budget] += answer.outputs[0].text.endswith(key)
                progress.ended()
    stats = llm.stats()
    total = haystacks * keys
    return {
        "length": length,
        "pages_of_all": -(-length // llm.info.page_size),
        "sparse_pages": pages,
        "asked": total,
        "found_full": found[0] / total,
        "found_sparse": found[pages] / total,
        "bytes_full": stats.sparse_bytes_of_all,
        "bytes_sparse": stats.sparse_bytes,
        "bytes_factor": stats.sparse_bytes_of_all / max(1, stats.sparse_bytes),
    }
