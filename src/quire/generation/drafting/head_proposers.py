"""Proposers over the target's own hidden states: see `heads`.

Between a step and the next they keep, for each sequence, the hidden states from which its last tokens were sampled.
Refuses to know: how the networks were trained, what becomes of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from quire.generation.drafting.heads import WINDOW_TOKENS, EagleDrafter, MedusaHeads
from quire.generation.drafting.mtp import MtpDrafter
from quire.generation.drafting.published_heads import Eagle3Drafter, PublishedMedusaHeads
from quire.types.seams import DraftContext, DraftTree

RECORD_BLOCK_ROWS = 4096  # copied into one tensor
MAX_DEPTH = 5  # tokens ahead: as far as drafters are trained to draft from their own states


class MedusaProposer:
    def __init__(self, heads: MedusaHeads | PublishedMedusaHeads):
        self._heads = heads

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[list[int]]:
        ready = [i for i, context in enumerate(contexts) if context.state is not None]
        drafts: list[list[int]] = [[] for _ in contexts]
        if ready:
            hidden = torch.stack([contexts[i].state for i in ready])
            tokens = torch.tensor([contexts[i].tokens[-1] for i in ready], device=hidden.device)
            count = max(budgets)
            best = torch.stack([logits.argmax(-1) for logits in self._heads(hidden, tokens)[:count]], -1)
            for i, draft in zip(ready, self._heads.words.ids[best].tolist(), strict=True):
                drafts[i] = draft[: budgets[i]]
        return drafts

    def observe(self, context: DraftContext, tokens: Sequence[int]) -> None:
        hidden = context.hidden
        # Where a grammar forced tokens, the last one's hidden state is missing.
        context.state = hidden[-1].float() if hidden is not None and len(hidden) == len(tokens) else None

    def forget(self, context: DraftContext) -> None:
        pass


class _Window:
    """The last positions of a sequence: the layer's input, keys and values there; and what came since."""

    __slots__ = ("hidden", "joined", "kv", "tokens")

    def __init__(self) -> None:
        self.hidden: list[torch.Tensor] = []
        self.tokens: list[int] = []
        self.joined: torch.Tensor | None = None
        self.kv: torch.Tensor | None = None  # [up to WINDOW_TOKENS, 2 hidden]


class EagleProposer:
    """`width`: branches followed at every depth; with one, drafts are chains."""

    def __init__(self, drafter: EagleDrafter | Eagle3Drafter | MtpDrafter, width: int = 1):
        self._drafter = drafter
        self._width = width

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[list[int] | DraftTree]:
        ready = [i for i, context in enumerate(contexts) if context.state is not None]
        drafts: list[list[int] | DraftTree] = [[] for _ in contexts]
        if ready:
            windows = [contexts[i].state for i in ready]
            self._extend(windows)
            most = [budgets[i] for i in ready]
            for i, draft in zip(ready, self._draft(windows, most), strict=True):
                drafts[i] = draft
        return drafts

    def observe(self, context: DraftContext, tokens: Sequence[int]) -> None:
        hidden = context.hidden
        if hidden is None or len(hidden) != len(tokens):
            context.state = None  # not tapped, or a grammar forced tokens: positions without a hidden state
            return
        window = context.state = context.state or _Window()
        window.hidden.append(hidden)
        window.tokens.extend(tokens)
        if len(window.tokens) > 2 * WINDOW_TOKENS:  # while no draft is asked for: keep no more than will be read
            window.hidden, window.tokens = [torch.cat(window.hidden)[-WINDOW_TOKENS:]], window.tokens[-WINDOW_TOKENS:]

    def forget(self, context: DraftContext) -> None:
        pass

    def _extend(self, windows: list[_Window]) -> None:
        """Keys and values of the positions that are new, all sequences at once."""
        counts = [len(window.tokens) for window in windows]
        if not sum(counts):
            return
        hidden = torch.cat([part for window in windows for part in window.hidden]).float()
        tokens = torch.tensor([token for window in windows for token in window.tokens], device=hidden.device)
        joined, kv = self._drafter.inputs(self._drafter.features(hidden), tokens)
        for window, new, entries in zip(windows, joined.split(counts), kv.split(counts), strict=True):
            if len(new):
                window.joined = new[-1]
                window.kv = entries if window.kv is None else torch.cat((window.kv, entries))
                window.kv = window.kv[-WINDOW_TOKENS:]
                window.hidden, window.tokens = [], []

    def _draft(self, windows: list[_Window], budgets: list[int]) -> list[list[int] | DraftTree]:
        """Depth by depth the likeliest few branches are followed; of all candidates, the likeliest are the draft."""
        drafter = self._drafter
        found = [window.kv for window in windows if window.kv is not None]
        kv = torch.stack([F.pad(p, (0, 0, WINDOW_TOKENS - len(p), 0)) for p in found])  # [n, WINDOW_TOKENS, 2 hidden]
        lengths = torch.tensor([len(p) for p in found], device=kv.device)
        distances = torch.arange(WINDOW_TOKENS - 1, -1, -1, device=kv.device)[None]
        mask = (distances < lengths[:, None])[:, None]  # [n, 1, WINDOW_TOKENS]
        joined = torch.stack([window.joined for window in windows if window.joined is not None])[
            :, None
        ]  # [n, t, hidden]
        draft_kv: list[torch.Tensor] = []
        logprob = joined.new_zeros(len(windows), 1)  # of the branches followed: [n, t]
        candidates: list[tuple[torch.Tensor, torch.Tensor]] = []  # tokens [n, t * width] and their log-probabilities
        followed_at: list[torch.Tensor] = []  # which of them were followed, [n, t of the next depth]
        depth = min(MAX_DEPTH, max(budgets))
        for ahead in range(depth):
            states = drafter(joined, kv, distances + ahead, mask, draft_kv)
            best = drafter.logits(states).log_softmax(-1).topk(self._width)  # [n, t, width]
            tokens, logprobs = drafter.words.ids[best.indices].flatten(1), (logprob[..., None] + best.values).flatten(1)
            candidates.append((tokens, logprobs))
            if ahead + 1 < depth:
                logprob, pick = logprobs.topk(self._width)
                followed_at.append(pick)
                parent = (pick // self._width)[..., None]
                draft_kv = [part.take_along_dim(parent, 1) for part in draft_kv]
                states = states.take_along_dim(parent, 1)
                joined, entries = drafter.inputs(states, tokens.take_along_dim(pick, 1))
                draft_kv.append(entries)
        return _best_trees(candidates, followed_at, self._width, budgets)


def _best_trees(
    candidates: list[tuple[torch.Tensor, torch.Tensor]], followed_at: list[torch.Tensor], width: int, budgets: list[int]
) -> list[list[int] | DraftTree]:
    """The likeliest candidates of each sequence: none is likelier than the one it follows, so they make a tree."""
    tokens, logprobs = (torch.cat(part, 1).tolist() for part in zip(*candidates, strict=True))  # [n, candidates]
    followed = [pick.tolist() for pick in followed_at]
    begins = [sum(part.shape[1] for part, _ in candidates[:depth]) for depth in range(len(candidates))]
    drafts: list[list[int] | DraftTree] = []
    for i, budget in enumerate(budgets):
        parents = [-1] * candidates[0][0].shape[1]
        for depth, pick in enumerate(followed):
            parents += [begins[depth] + parent for parent in pick[i] for _ in range(width)]
        chosen = sorted(sorted(range(len(parents)), key=lambda g: -logprobs[i][g])[:budget])
        index = {g: at for at, g in enumerate(chosen)} | {-1: -1}
        tree = DraftTree([tokens[i][g] for g in chosen], [index[parents[g]] for g in chosen])
        chain = tree.parents == list(range(-1, len(chosen) - 1))
        drafts.append(tree.tokens if chain else tree)
    return drafts


class Recorder:
    """Drafts nothing and records all: tokens sampled and the hidden states they were sampled from, to train on."""

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
            states.append(self._copied(context.hidden))

    def forget(self, context: DraftContext) -> None:
        pass

    def _copied(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.device.type != "cpu":
            return rows  # a view of what its step returned, kept as it is
        if self._used + len(rows) > len(self._block):
            self._block = torch.empty(RECORD_BLOCK_ROWS, rows.shape[-1])
            self._used = 0
        place = self._block[self._used : self._used + len(rows)]
        self._used += len(rows)
        return place.copy_(rows)
