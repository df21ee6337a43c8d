"""Proposers over the target's own hidden states: see `heads`.

Between a step and the next they keep, for each sequence, the hidden states from which its last tokens were drawn.
Refuses to know: how the networks were trained, what becomes of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from quire.generation.drafting.heads import WINDOW, EagleDrafter, MedusaHeads
from quire.types.seams import DraftContext, Tree

BLOCK = 4096  # rows recorded together
DEEP = 5  # tokens ahead, at most: as far as drafters are trained to go on by themselves


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
    """`width`: branches that it follows at every depth; with one, drafts are chains."""

    def __init__(self, drafter: EagleDrafter, width: int = 1):
        self._drafter = drafter
        self._width = width

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[list[int] | Tree]:
        able = [i for i, context in enumerate(contexts) if context.state is not None]
        drafts: list[list[int] | Tree] = [[] for _ in contexts]
        if able:
            trails = [contexts[i].state for i in able]
            self._read(trails)
            most = [budgets[i] for i in able]
            for i, guess in zip(able, self._draw(trails, most), strict=True):
                drafts[i] = guess
        return drafts

    def observe(self, context: DraftContext, tokens: Sequence[int]) -> None:
        drawn = context.hidden
        if drawn is None or len(drawn) != len(tokens):
            context.state = None  # nothing was shown, or a grammar forced tokens: positions without a hidden state
            return
        trail = context.state = context.state or _Trail()
        trail.hidden.append(drawn)
        trail.tokens.extend(tokens)
        if len(trail.tokens) > 2 * WINDOW:  # nobody asks: keep no more than will be read
            trail.hidden, trail.tokens = [torch.cat(trail.hidden)[-WINDOW:]], trail.tokens[-WINDOW:]

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

    def _draw(self, trails: list[_Trail], budgets: list[int]) -> list[list[int] | Tree]:
        """Depth by depth the likeliest few branches are followed; of all guesses met, the likeliest are the draft."""
        drafter = self._drafter
        found = [trail.pages for trail in trails if trail.pages is not None]
        pages = torch.stack([F.pad(p, (0, 0, WINDOW - len(p), 0)) for p in found])  # [n, WINDOW, 2 hidden]
        lengths = torch.tensor([len(p) for p in found], device=pages.device)
        apart = torch.arange(WINDOW - 1, -1, -1, device=pages.device)[None]
        seen = (apart < lengths[:, None])[:, None]  # [n, 1, WINDOW]
        joined = torch.stack([trail.joined for trail in trails if trail.joined is not None])[:, None]  # [n, t, hidden]
        own: list[torch.Tensor] = []
        chance = joined.new_zeros(len(trails), 1)  # of the branches followed, as logarithms: [n, t]
        met: list[tuple[torch.Tensor, torch.Tensor]] = []  # guesses [n, t * width] and their chances
        picks: list[torch.Tensor] = []  # which of them were followed, [n, t of the next depth]
        depth = min(DEEP, max(budgets))
        for ahead in range(depth):
            states = drafter(joined, pages, apart + ahead, seen, own)
            best = drafter.logits(states).log_softmax(-1).topk(self._width)  # [n, t, width]
            tokens, chances = drafter.words.ids[best.indices].flatten(1), (chance[..., None] + best.values).flatten(1)
            met.append((tokens, chances))
            if ahead + 1 < depth:
                chance, pick = chances.topk(self._width)
                picks.append(pick)
                parent = (pick // self._width)[..., None]
                own = [part.take_along_dim(parent, 1) for part in own]
                states = states.take_along_dim(parent, 1)
                joined, entries = drafter.inputs(states, tokens.take_along_dim(pick, 1))
                own.append(entries)
        return _chosen(met, picks, self._width, budgets)


def _chosen(
    met: list[tuple[torch.Tensor, torch.Tensor]], picks: list[torch.Tensor], width: int, budgets: list[int]
) -> list[list[int] | Tree]:
    """The likeliest guesses of each sequence: no guess is likelier than the one it follows, so they make a tree."""
    tokens, chances = (torch.cat(part, 1).tolist() for part in zip(*met, strict=True))  # [n, guesses]
    followed = [pick.tolist() for pick in picks]
    begins = [sum(part.shape[1] for part, _ in met[:depth]) for depth in range(len(met))]
    drafts: list[list[int] | Tree] = []
    for i, budget in enumerate(budgets):
        parents = [-1] * met[0][0].shape[1]
        for depth, pick in enumerate(followed):
            parents += [begins[depth] + parent for parent in pick[i] for _ in range(width)]
        likely = sorted(sorted(range(len(parents)), key=lambda g: -chances[i][g])[:budget])
        place = {guess: at for at, guess in enumerate(likely)} | {-1: -1}
        tree = Tree([tokens[i][g] for g in likely], [place[parents[g]] for g in likely])
        chain = tree.parents == list(range(-1, len(likely) - 1))
        drafts.append(tree.tokens if chain else tree)
    return drafts


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
