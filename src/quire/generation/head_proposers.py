"""Proposers over the target's own hidden states: see `heads`.

Between a step and the next they keep, for each sequence, the hidden states from which its last tokens were drawn.
Refuses to know: how the networks were trained, what becomes of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from quire.generation.heads import AHEAD, WINDOW, EagleDrafter, MedusaHeads
from quire.types.seams import DraftContext

BLOCK = 4096  # rows recorded together


class MedusaProposer:
    def __init__(self, heads: MedusaHeads):
        self._heads = heads

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[list[int]]:
        able = [i for i, context in enumerate(contexts) if context.state is not None]
        drafts: list[list[int]] = [[] for _ in contexts]
        if able:
            hidden = torch.stack([contexts[i].state for i in able])
            tokens = torch.tensor([contexts[i].tokens[-1] for i in able], device=hidden.device)
            count = max(budgets)
            best = torch.stack([logits.argmax(-1) for logits in self._heads(hidden, tokens)[:count]], -1)
            for i, guess in zip(able, self._heads.words.ids[best].tolist(), strict=True):
                drafts[i] = guess[: budgets[i]]
        return drafts

    def observe(self, context: DraftContext, tokens: Sequence[int]) -> None:
        drawn = context.hidden
        # Where a grammar forced tokens, nothing is known of the last one's place.
        context.state = drawn[-1].float() if drawn is not None and len(drawn) == len(tokens) else None

    def forget(self, context: DraftContext) -> None:
        pass


class _Trail:
    """The last positions of a sequence: what the layer reads there, keys and values; and what is new since."""

    __slots__ = ("hidden", "joined", "pages", "tokens")

    def __init__(self) -> None:
        self.hidden: list[torch.Tensor] = []
        self.tokens: list[int] = []
        self.joined: torch.Tensor | None = None
        self.pages: torch.Tensor | None = None  # [up to WINDOW, 2 hidden]


class EagleProposer:
    def __init__(self, drafter: EagleDrafter):
        self._drafter = drafter

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[list[int]]:
        able = [i for i, context in enumerate(contexts) if context.state is not None]
        drafts: list[list[int]] = [[] for _ in contexts]
        if able:
            trails = [contexts[i].state for i in able]
            self._read(trails)
            count = min(AHEAD, max(budgets[i] for i in able))
            for i, guess in zip(able, self._draw(trails, count), strict=True):
                drafts[i] = guess[: budgets[i]]
        return drafts

    def observe(self, context: DraftContext, tokens: Sequence[int]) -> None:
        drawn = context.hidden
        if drawn is None or len(drawn) != len(tokens):
            context.state = None  # a grammar forced tokens: positions without a hidden state
            return
        trail = context.state = context.state or _Trail()
        trail.hidden.append(drawn[-WINDOW:])
        trail.tokens.extend(tokens[-WINDOW:])
        if len(trail.hidden) > WINDOW:  # nobody asks: keep no more than will be read
            trail.hidden, trail.tokens = trail.hidden[-WINDOW:], trail.tokens[-sum(map(len, trail.hidden[-WINDOW:])) :]

    def forget(self, context: DraftContext) -> None:
        pass

    def _read(self, trails: list[_Trail]) -> None:
        """Keys and values of the positions that are new, all sequences at once."""
        counts = [len(trail.tokens) for trail in trails]
        if not sum(counts):
            return
        hidden = torch.cat([part for trail in trails for part in trail.hidden]).float()
        tokens = torch.tensor([token for trail in trails for token in trail.tokens], device=hidden.device)
        joined, pages = self._drafter.inputs(self._drafter.features(hidden), tokens)
        for trail, new, entries in zip(trails, joined.split(counts), pages.split(counts), strict=True):
            if len(new):
                trail.joined = new[-1]
                trail.pages = entries if trail.pages is None else torch.cat((trail.pages, entries))
                trail.pages = trail.pages[-WINDOW:]
                trail.hidden, trail.tokens = [], []

    def _draw(self, trails: list[_Trail], count: int) -> list[list[int]]:
        drafter = self._drafter
        found = [trail.pages for trail in trails if trail.pages is not None]
        pages = torch.stack([F.pad(p, (0, 0, WINDOW - len(p), 0)) for p in found])  # [n, WINDOW, 2 hidden]
        lengths = torch.tensor([len(p) for p in found], device=pages.device)
        apart = torch.arange(WINDOW - 1, -1, -1, device=pages.device)[None]
        seen = (apart < lengths[:, None])[:, None]  # [n, 1, WINDOW]
        joined = torch.stack([trail.joined for trail in trails if trail.joined is not None])[:, None]
        drawn: list[torch.Tensor] = []
        own: list[torch.Tensor] = []
        for ahead in range(count):
            state = drafter(joined, pages, apart + ahead, seen, own)
            drawn.append(drafter.words.ids[drafter.logits(state).argmax(-1)])
            if ahead + 1 < count:
                joined, entries = drafter.inputs(state, drawn[-1])
                own.append(entries)
        guesses: list[list[int]] = torch.cat(drawn, -1).tolist()
        return guesses


class Recorder:
    """Guesses nothing and keeps all: tokens drawn and the hidden states they were drawn from, to train on."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[list[int], list[torch.Tensor]]] = {}
        self._block = torch.empty(0, 0)  # rows go into large blocks: small ones among a step's tensors tear up the heap
        self._used = 0

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[list[int]]:
        return [[] for _ in contexts]

    def observe(self, context: DraftContext, tokens: Sequence[int]) -> None:
        known, states = self.answers.setdefault(context.admit.key, ([], []))
        if context.hidden is not None and len(context.hidden) == len(tokens):
            known += tokens
            states.append(self._stored(context.hidden))

    def forget(self, context: DraftContext) -> None:
        pass

    def _stored(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.device.type != "cpu":
            return rows  # a view of what its step showed, kept as it is
        if self._used + len(rows) > len(self._block):
            self._block = torch.empty(BLOCK, rows.shape[-1])
            self._used = 0
        place = self._block[self._used : self._used + len(rows)]
        self._used += len(rows)
        return place.copy_(rows)
