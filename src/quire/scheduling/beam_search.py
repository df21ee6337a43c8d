"""Beam searches under way: sequences that step together, and fork and end as their search decides.

    root ──► W beams ──► (each computes one token) ──► all have their options ──► chosen
                              ▲                                                      │
                              └── the first choice of a beam goes on in its place, others fork off it, ◄┘
                                  beams without a choice are let go

Knows: sequences, page tables. Refuses to know: slots, plans, other requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from quire.memory.manager import KVManager
from quire.scheduling.beam_group import BeamGroup, Hypothesis
from quire.scheduling.sequence import Sequence
from quire.scheduling.sequence_group import SequenceGroup
from quire.types.beam import BeamParams
from quire.types.counts import Counts
from quire.types.errors import ContextLengthError, InputError
from quire.types.events import TokenEvent
from quire.types.plan import TokenLogprobs
from quire.types.request import FinishReason, Request


class Search(SequenceGroup):
    """One request's search."""

    def __init__(self, root: Sequence, params: BeamParams):
        request = root.request
        ends = set(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            ends |= set(request.eos_token_ids)
        super().__init__(request, [root])
        self.root = root
        self.rank = root.rank  # as it came: its place among searches in each other's way
        self.width = params.beams
        self._options: dict[Sequence, TokenLogprobs] = {}
        self._groups = [
            BeamGroup(params, params.beams // params.groups, root.limit - root.prompt_len, ends)
            for _ in range(params.groups)
        ]
        self._beams: list[list[Sequence]] = [[root] for _ in self._groups]

    @property
    def live(self) -> list[Sequence]:
        """Its sequences, each once."""
        return list(dict.fromkeys(seq for beams in self._beams for seq in beams))

    def learn(self, seq: Sequence, options: TokenLogprobs) -> bool:
        """What may follow a beam is known; True if it now is of all of them."""
        self._options[seq] = options
        return len(self._options) == len(self.live)

    def lost(self, seq: Sequence) -> None:
        """A beam was preempted: it will be computed again."""
        self._options.pop(seq, None)

    def advance(self, fork: Callable[[Sequence], Sequence]) -> list[Sequence]:
        """One step of every group; returns the sequences to let go. With none live, the search is over."""
        before, placed, tokens = self.live, set[Sequence](), dict[Sequence, int]()
        taken: Counter[int] = Counter()
        for at, group in enumerate(self._groups):
            if group.done:
                continue
            beams = self._beams[at]
            answers = [seq.tokens[seq.prompt_len :] for seq in beams]
            chosen = group.advance(answers, [self._options[seq] for seq in beams], taken)
            self._beams[at] = []
            for choice in chosen:
                parent = beams[choice.parent]
                seq = fork(parent) if parent in placed else parent
                placed.add(seq)
                tokens[seq] = choice.token
                self._beams[at].append(seq)
            taken.update(choice.token for choice in chosen)
        for seq, token in tokens.items():
            seq.tokens.append(token)
            seq.unsent = 1  # the slot holds what the device drew
        self._options.clear()
        return [seq for seq in before if seq not in placed]

    def results(self, count: int) -> list[Hypothesis]:
        """The best finished answers of all groups."""
        finished = [hypothesis for group in self._groups for hypothesis in group.finished]
        return sorted(finished, key=lambda hypothesis: -hypothesis.score)[:count]


def check_fits(request: Request, params: BeamParams, limit: int, memory: KVManager, slots: int) -> None:
    """Refuse a search whose beams could not all be there at once."""
    if memory.contiguous:
        raise InputError("beam search forks sequences, which static batching cannot; use another scheduler")
    if params.beams > slots:
        raise InputError(f"{params.beams} beams need as many slots, there are {slots}; raise max_seqs", param="beams")
    whole, apart = memory.layout.pages_for(limit), memory.layout.pages_for(limit - len(request.prompt))
    own = min(whole, apart + len(memory.layout.groups)) if memory.prefix_cache else whole
    if whole + (params.beams - 1) * own > memory.pool.total:
        raise ContextLengthError(
            f"{params.beams} beams of up to {limit} tokens may need more than the whole KV pool holds "
            f"({memory.pool.total} pages); lower beams or max_tokens, or raise kv_memory"
        )


def answers(request: Request, found: list[Hypothesis], cached: int) -> list[TokenEvent]:
    """Each hypothesis as a branch that comes whole."""
    return [
        TokenEvent(
            request.id,
            branch,
            0,
            hypothesis.tokens,
            finish=FinishReason.STOP if hypothesis.ended else FinishReason.LENGTH,
            counts=Counts(cached),
            score=hypothesis.score,
        )
        for branch, hypothesis in enumerate(found)
    ]
