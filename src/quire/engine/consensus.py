"""Self-consistency: many branches answer, and the answer most of them arrive at counts.

The vote ends as soon as the branches still under way could not change it. Refuses to know: engines, tokens' meaning.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import msgspec

from quire.types.outputs import Delta

Extract = str | Callable[[str], str | None]
LAST_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


class Consensus(msgspec.Struct, kw_only=True):
    """`answer` is None if no branch had one. `tokens_saved` is an estimate: what the branches that were cut short
    had still to say, if branches go on ending as often as they did, and none is longer than it may be."""

    answer: str | None
    votes: dict[str, int]
    texts: list[str]
    asked: int  # branches
    ended: int  # of them, how many were heard to the end
    tokens: int
    tokens_saved: int


class Vote:
    def __init__(self, branches: int, extract: Extract, limit: int | None = None):
        self._limit = limit  # tokens of one branch
        self._extract = _by_pattern(extract) if isinstance(extract, str) else extract
        self._texts = [""] * branches
        self._lengths = [0] * branches
        self._ended: list[int] = []
        self._votes: Counter[str] = Counter()

    def take(self, delta: Delta) -> bool:
        """Whether the vote is decided, now that a branch has said this."""
        branch = delta.branch
        self._texts[branch] += delta.text
        self._lengths[branch] += len(delta.token_ids)
        if delta.finish_reason is None:
            return False
        self._ended.append(branch)
        answer = self._extract(self._texts[branch])
        if answer is not None:
            self._votes[answer] += 1
        return self._decided()

    def _decided(self) -> bool:
        """Whether no other answer could still draw level with the first."""
        open_ = len(self._texts) - len(self._ended)
        ranked = [count for _, count in self._votes.most_common(2)] + [0, 0]
        return not open_ or ranked[0] > ranked[1] + open_

    def result(self) -> Consensus:
        # Branches run in step, so those cut short are already the longer ones: what they had still to say is told by
        # how many tokens of all of them there were to an end.
        rest = sum(self._lengths) / max(1, len(self._ended))
        cut = [length for b, length in enumerate(self._lengths) if b not in self._ended]
        return Consensus(
            answer=self._votes.most_common(1)[0][0] if self._votes else None,
            votes=dict(self._votes.most_common()),
            texts=self._texts,
            asked=len(self._texts),
            ended=len(self._ended),
            tokens=sum(self._lengths),
            tokens_saved=round(sum(min(rest, self._limit - length if self._limit else rest) for length in cut)),
        )


def _by_pattern(pattern: str) -> Callable[[str], str | None]:
    """The last match of a pattern: its group, if it has one."""
    compiled = re.compile(pattern)

    def extract(text: str) -> str | None:
        matches = [match[match.lastindex or 0] for match in compiled.finditer(text)]
        return matches[-1] if matches else None

    return extract
