"""Fakes of the seams, for tests and experiments without a device.

`FakeExecutor` has no model but a memory that never lies: each KV entry is a digest of the whole token history
that led to it, the position it was rotated to, and what had been evicted by then. It checks that every row would
read exactly its own history through its page table (but what was evicted of it), whatever was shared, copied,
shifted, preempted or re-used, and draws tokens that depend on that history alone.

`FakeGrammars` knows choices only, and finds what may follow by looking at every token and every choice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.types.errors import InputError
from quire.types.fake_tiers import Entries, Entry, FakeTiers
from quire.types.grammar import GrammarSpec, TokenMasks, Vocabulary
from quire.types.kv import NULL_STATE, KVLayout
from quire.types.membership import PeerLink
from quire.types.plan import Admit, Capacity, RopeShift, Row, StepPlan, StepResult, TokenLogprobs
from quire.types.seams import DraftContext, DraftTree, ExecutorInfo, Grammar
from quire.types.transfer import KVConnector

_MASK = (1 << 61) - 1


def _mix(state: int, value: int) -> int:
    return ((state ^ (value + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 + (state >> 7)) & _MASK


def fake_token(tokens: list[int], seed: int, branch: int, vocab: int) -> int:
    """The token that follows `tokens` in the fake's world."""
    state = 1
    for token in tokens:
        state = _mix(state, token)
    return _mix(_mix(state, seed), branch) % vocab


def fake_draw(tokens: list[int], admit: Admit, vocab: int) -> list[int]:
    """What a draw gives: one token, and with a grammar sometimes the next few, as if it forced them."""
    drawn: list[int] = []
    while not drawn or (admit.params.grammar is not None and drawn[-1] % 3 == 0):
        drawn.append(fake_token([*tokens, *drawn], admit.seed, admit.branch, vocab))
    return drawn


def fake_options(tokens: list[int], count: int, vocab: int) -> tuple[list[int], list[float]]:
    """The likeliest tokens after `tokens`, and their log-probabilities."""
    state = fake_token(tokens, 0, 0, _MASK)
    scores = {token: -(_mix(state, token) % 1000) / 250 for token in range(vocab if count else 0)}
    best = sorted(scores, key=lambda token: (-scores[token], token))[:count]
    return best, [scores[token] for token in best]


class _Slot:
    def __init__(self, admit: Admit, groups: int):
        self.admit = admit
        self.tokens = list(admit.tokens)
        self.digests: list[int] = []
        self.tables: list[dict[int, int]] = [{} for _ in range(groups)]
        self.forced_at = -1  # where tokens that a grammar forced will be written
        self.shifted: int | None = None  # from this position on, KV is not quite what its history makes it

    def holds(self, position: int) -> int:
        """What is found at a position: its history, or where that is not quite true, its token."""
        approximate = self.shifted is not None and position >= self.shifted
        return ~self.tokens[position] if approximate else self.digest(position)

    def digest(self, position: int) -> int:
        while len(self.digests) <= position:
            state = self.digests[-1] if self.digests else 1 + self.admit.adapter
            self.digests.append(_mix(state, self.tokens[len(self.digests)]))
        return self.digests[position]

    def store(self, position: int, token: int) -> None:
        del self.tokens[position:], self.digests[position:]
        self.tokens.append(token)

    def cut(self, count: int) -> None:
        """Roll back the last tokens."""
        if count:
            del self.tokens[-count:]
            del self.digests[len(self.tokens) :]


def fake_draft(slot: _Slot, most: int, vocab: int) -> list[int]:
    """Up to `most` of the tokens that follow, one of them sometimes wrong."""
    state = _mix(len(slot.tokens), most)
    draft: list[int] = []
    while len(draft) < min(most, state % (most + 2)):
        draft.append(fake_token([*slot.tokens, *draft], slot.admit.seed, slot.admit.branch, vocab))
    rejected = (state >> 8) % (most + 2)
    if rejected < len(draft):
        draft[rejected] = (draft[rejected] + 1) % vocab
    return draft


class FakeTicket:
    def __init__(self, result: StepResult):
        self._result = result

    def result(self) -> StepResult:
        return self._result


class FakeExecutor:
    def __init__(self, layout: KVLayout, capacity: Capacity, *, vocab: int = 97, tiers: FakeTiers | None = None):
        self.layout = layout
        self.capacity = capacity
        self.tiers = tiers
        self.vocab = vocab
        self._slots: dict[int, _Slot] = {}
        self._kv: Entries = {}
        self._token: dict[int, int] = {}  # that a digest ends with
        self._taken: dict[bytes, dict[int, Entry]] = {}

    def start(self) -> Capacity:
        return self.capacity

    def describe(self) -> ExecutorInfo:
        return ExecutorInfo(device="none", dtype="none", vocab_size=self.vocab, reasons=[], startup_s={})

    def prepare(self, grammar: GrammarSpec) -> Future[Any]:
        ready: Future[Any] = Future()
        ready.set_result(None)
        return ready

    def check(self) -> None:
        pass

    def idle(self, *, quiet: bool) -> bool:
        return False

    def connect(self, peers: PeerLink) -> KVConnector | None:
        return None

    def load_adapter(self, slot: int, path: str) -> str:
        return path

    def unload_adapter(self, slot: int) -> None:
        pass

    def submit(self, plan: StepPlan) -> FakeTicket:
        if self.tiers is not None:
            self.tiers.start(plan, self._kv)
        for slot in plan.frees:
            self._slots.pop(slot, None)
        for admit in plan.admits:
            assert admit.slot not in self._slots, f"slot {admit.slot} is taken"
            self._slots[admit.slot] = _Slot(admit, len(self.layout.groups))
        for write in plan.writes:
            self._slots[write.slot].forced_at = -1
            for position, token in enumerate(write.tokens, write.start):
                self._slots[write.slot].store(position, token)
        written = [(d.slot, d.group, at) for d in plan.deltas for at in range(d.index, d.index + len(d.pages))]
        assert len(set(written)) == len(written), "two deltas write to the same place: on a GPU either may be the last"
        for delta in plan.deltas:
            table = self._slots[delta.slot].tables[delta.group]
            table.update(enumerate(delta.pages, delta.index))
            self._inherit(self._slots[delta.slot], delta.group)
        self._copy(plan)
        drafts = [fake_draft(self._slots[row.slot], row.drafts, self.vocab) for row in plan.rows]
        for row, draft in zip(plan.rows, drafts, strict=True):
            self._slots[row.slot].tokens += draft
            self._write(self._slots[row.slot], row, len(draft))
        for row, draft in zip(plan.rows, drafts, strict=True):
            self._read(self._slots[row.slot], row, len(draft))
        self._run_states(plan)
        for row, draft in zip(plan.rows, drafts, strict=True):
            self._slots[row.slot].cut(len(draft))
        result = self._draw(plan, drafts)
        self._keep_accepted(plan, result)
        result.deviations = [[self._deviation(p.slot, p.start + i) for i in range(p.count)] for p in plan.probes]
        if self.tiers is not None:
            result.transfers = self.tiers.poll(self._kv, some=not plan.computes)
        return FakeTicket(result)

    def _copy(self, plan: StepPlan) -> None:
        """Copies and rope_shifts: everything is read before anything is written."""
        size = max(g.tokens_per_page for g in self.layout.groups)
        moves = [((source, i), (target, i), 0) for source, target in plan.copies for i in range(size)]
        for rope_shift in plan.rope_shifts:
            size = self.layout.groups[rope_shift.group].tokens_per_page
            moves += [
                (divmod(source, size), divmod(target, size), rope_shift.by)
                for source, target in zip(rope_shift.sources, rope_shift.targets, strict=True)
            ]
        found = [(self._kv.get(source), target, by) for source, target, by in moves]
        for entry, target, by in found:
            if entry is not None:
                self._kv[target] = entry[0], entry[1] + by, entry[2]
        if plan.rope_shifts:
            self._blend(plan.rope_shifts, [self._slots[admit.slot] for admit in plan.admits])

    def _blend(self, rope_shifts: list[RopeShift], fresh: list[_Slot]) -> None:
        """What was shifted into a fresh slot from another history stands for its tokens alone, in that slot only."""
        size = self.layout.groups[0].tokens_per_page
        changed = {}
        for slot in fresh:
            history = {slot.digest(i) for i in range(len(slot.tokens))}
            owned = {page: index for index, page in slot.tables[0].items()}
            for place in (divmod(target, size) for rope_shift in rope_shifts for target in rope_shift.targets):
                digest, position, evicted = self._kv.get(place, (None, 0, 0))  # of a page's end, nothing yet
                if digest is not None and place[0] in owned and digest not in history:
                    changed[place] = ~self._token[digest], position, evicted
                    at = owned[place[0]] * size + place[1]
                    slot.shifted = at if slot.shifted is None else min(slot.shifted, at)
        self._kv |= changed

    def _inherit(self, slot: _Slot, group: int) -> None:
        """A branch of a request shares what was shifted for it."""
        size, request = self.layout.groups[group].tokens_per_page, slot.admit.key.split("/")[0]
        for other in self._slots.values():
            if other.shifted is not None and other.admit.key.split("/")[0] == request:
                at = other.shifted // size
                if slot.tables[group].get(at) == other.tables[group][at]:
                    slot.shifted = other.shifted

    def _write(self, slot: _Slot, row: Row, drafted: int) -> None:
        end = row.start + row.count + drafted
        assert end <= len(slot.tokens), "asked to compute tokens that are not known"
        assert row.start >= slot.admit.unread, "asked to compute tokens that the slot was not given"
        evicted = self._evicted(slot, row)
        for group, spec in enumerate(self.layout.groups):
            size = spec.tokens_per_page
            for index in range(row.start, end):
                place = index - row.shift
                page = slot.tables[group][place // size]
                assert page != 0, "a live position points at the null page"
                held = slot.digest(index) if row.shift else slot.holds(index)
                self._kv[page, place % size] = held, place, evicted
                self._token[slot.digest(index)] = slot.tokens[index]

    def _evicted(self, slot: _Slot, row: Row) -> int:
        """A digest of which tokens before a row are gone, 0 where none are."""
        if not row.shift:
            return 0
        size, history = self.layout.groups[0].tokens_per_page, [slot.digest(i) for i in range(row.start)]
        left = {self._kv[slot.tables[0][p // size], p % size][0] for p in range(row.start - row.shift)}
        state = 1
        for digest in history:
            if digest not in left:
                state = _mix(state, digest)
        return state

    def _mass(self, slot: _Slot, row: Row) -> list[float]:
        """Attention paid to pages: any function of page and query will do, if it adds up however rows are cut."""
        size = self.layout.groups[0].tokens_per_page
        pages = range(-(-(row.start + row.count - row.shift) // size))
        first = [self._kv[slot.tables[0][p], 0][0] for p in pages]
        seen = [range(max(row.start, row.shift + p * size), row.start + row.count) for p in pages]
        return [sum(_mix(d, q) % 1024 / 1024 for q in queries) for d, queries in zip(first, seen, strict=True)]

    def _token_mass(self, row: Row) -> list[float]:
        return [float(_mix(row.slot, p) % 1000 + 1) for p in range(row.start + row.count)]

    def _read(self, slot: _Slot, row: Row, drafted: int) -> None:
        """What a row sees is its own history in order, each entry where it was rotated to; with a shift, some of it."""
        count = row.start + row.count + drafted - row.shift
        for group, spec in enumerate(self.layout.groups):
            size = spec.tokens_per_page
            first = 0 if spec.window is None else max(0, row.start - spec.window + 1)
            seen = [self._kv.get((slot.tables[group][p // size], p % size)) for p in range(first, count)]
            if row.shift:
                history = {slot.digest(i): i for i in range(row.start + row.count + drafted)}
                indices = [history.get(entry[0], -1) for entry in seen if entry is not None]
                assert len(indices) == len(set(indices)) == count and indices == sorted(indices), (
                    f"{slot.admit.key}: sees another history, or its own out of order"
                )
                assert [entry[1] for entry in seen if entry] == list(range(count)), f"{slot.admit.key}: not shifted"
                continue
            for p, entry in enumerate(seen, first):
                assert entry == (slot.holds(p), p, 0), f"{slot.admit.key}: position {p} holds another history"

    def _run_states(self, plan: StepPlan) -> None:
        """States go on from exactly what led to them; all are read before any is written."""
        if not self.layout.states:
            return
        for row in plan.rows:
            slot = self._slots[row.slot]
            if row.start == 0:
                assert row.state == NULL_STATE, "the first token follows a state"
                continue
            held = [self._kv.get((page, 0)) for page in self._state_pages(row.state)]
            wanted = slot.digest(row.start - 1), 0, 0
            assert all(part == wanted for part in held), f"{slot.admit.key}: goes on from another state"
        for row in plan.rows:
            assert row.states[-1][0] == row.count and all(cell != NULL_STATE for _, cell in row.states)
        written = [cell for row in plan.rows for _, cell in row.states]
        assert len(set(written)) == len(written), "two rows write a cell"
        for row in plan.rows:
            for count, cell in row.states:
                self._store_state(cell, self._slots[row.slot].digest(row.start + count - 1))

    def _state_pages(self, cell: int) -> range:
        first, size = self.capacity.pages, self.layout.state_pages
        return range(first + cell * size, first + (cell + 1) * size)

    def _store_state(self, cell: int, digest: int) -> None:
        """A state is the digest of what led to it, in each of its pages."""
        for page in self._state_pages(cell):
            self._kv[page, 0] = digest, 0, 0

    def _keep_accepted(self, plan: StepPlan, result: StepResult) -> None:
        """Behind a draft, the state is that of the last token that was accepted."""
        for i, (_, accepted) in result.drafts.items() if self.layout.states else ():
            row = plan.rows[plan.samples[i].row]
            self._store_state(row.states[-1][1], self._slots[row.slot].digest(row.start + row.count + accepted - 1))

    def _draw(self, plan: StepPlan, drafts: list[list[int]]) -> StepResult:
        drawn: list[tuple[_Slot, int, list[int], int]] = []
        logprobs, draft_counts = {}, {}
        ends = [row.start + row.count for row in plan.rows]
        for i, sample in enumerate(plan.samples):
            slot = self._slots[sample.slot]
            assert ends[sample.row] == sample.position == len(slot.tokens), "sample is not at the end of its row"
            admit = slot.admit
            if slot.forced_at == sample.position:
                drawn.append((slot, sample.position, [], 0))
                continue
            accepted: list[int] = []
            for token in drafts[sample.row]:
                if token != fake_token([*slot.tokens, *accepted], admit.seed, admit.branch, self.vocab):
                    break
                accepted.append(token)
            tokens = accepted + fake_draw([*slot.tokens, *accepted], admit, self.vocab)
            drawn.append((slot, sample.position, tokens, len(accepted) + 1))
            if drafts[sample.row]:
                draft_counts[i] = len(drafts[sample.row]), len(accepted)
            if admit.params.logprobs is not None:
                options = fake_options(slot.tokens, admit.params.logprobs, self.vocab)
                logprobs[i] = [TokenLogprobs(token, -0.5, 1, *options) for token in tokens[: len(accepted) + 1]]
        for slot, position, tokens, known in drawn:
            for at, token in enumerate(tokens[:known], position):
                slot.store(at, token)
            if known < len(tokens):
                slot.forced_at = position + known
        scores = {
            i: [TokenLogprobs(0, -1.0, 1, [], []) for _ in range(row.count)]
            for i, row in enumerate(plan.rows)
            if row.score
        }
        pooled = {i: self._pool(self._slots[row.slot], row) for i, row in enumerate(plan.rows) if row.pool}
        mass = {i: self._mass(self._slots[row.slot], row) for i, row in enumerate(plan.rows) if row.mass}
        mass |= {i: self._token_mass(row) for i, row in enumerate(plan.rows) if row.token_mass}
        return StepResult(
            mass=mass,
            step=plan.step,
            tokens=[tokens for _, _, tokens, _ in drawn],
            drafts=draft_counts,
            forced={i: list(range(known, len(t))) for i, (_, _, t, known) in enumerate(drawn) if known < len(t)},
            logprobs=logprobs,
            scores=scores,
            pooled=pooled,
        )

    def _deviation(self, slot: int, position: int) -> float:
        return float(_mix(position, self._slots[slot].tokens[position]) % 1000)

    def _pool(self, slot: _Slot, row: Row) -> list[float]:
        """A hidden state here is the token itself, and its position."""
        states = [(float(slot.tokens[p]), float(p)) for p in range(row.start, row.start + row.count)]
        if row.pool == "mean":
            return [sum(column) for column in zip(*states, strict=True)]
        return list(states[0 if row.pool == "cls" else -1])

    def room_asleep(self) -> int:
        return self.capacity.pages

    def sleep(self, pages: list[int], level: int) -> None:
        self._kv = {place: digest for place, digest in self._kv.items() if place[0] in pages}

    def wake(self, on_progress: Callable[[], object]) -> None:
        pass

    def rank_memory(self) -> tuple[int, int]:
        return 0, 0

    kind = "fake"

    def read_pages(self, pages: list[int]) -> list[bytes]:
        """A page's bytes name a copy of its entries."""
        taken = []
        for page in pages:
            name = len(self._taken).to_bytes(8, "little").ljust(self.layout.page_bytes, b".")
            self._taken[name] = {i: digest for (p, i), digest in self._kv.items() if p == page}
            taken.append(name)
        return taken

    def write_pages(self, pages: list[int], content: list[bytes]) -> None:
        for page, name in zip(pages, content, strict=True):
            self._kv.update({(page, i): digest for i, digest in self._taken[name].items()})

    def close(self) -> None:
        self._slots.clear()


class FakeGrammars:
    """A GrammarBackend for choices."""

    threads = 1

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> FakeGrammar:
        choices = json.loads(spec.source) if spec.kind in ("choice", "each") else None
        if not choices:
            raise InputError(f"only choices are known here, not {spec.kind} {spec.source!r}")
        return FakeGrammar([choice.encode() for choice in choices], vocabulary)

    def accept_each(self, grammars: Sequence[Grammar], tokens: Sequence[int]) -> None:
        for grammar, token in zip(grammars, tokens, strict=True):
            grammar.accept([token])

    def fill_each(self, grammars: Sequence[Grammar], size: int) -> TokenMasks:
        rows = np.empty((len(grammars), size), np.uint8)
        for grammar, row in zip(grammars, rows, strict=True):
            grammar.fill(row)
        return rows


class FakeGrammar:
    def __init__(self, choices: list[bytes], vocabulary: Vocabulary, taken: tuple[int, ...] = ()):
        self._choices = choices
        self._vocabulary = vocabulary
        self._taken = taken
        self.error = ""

    @property
    def _text(self) -> bytes:
        return b"".join(self._vocabulary.tokens[t] for t in self._taken if t not in self._vocabulary.ends)

    @property
    def _left(self) -> list[bytes]:
        return [choice[len(self._text) :] for choice in self._choices if choice.startswith(self._text)]

    @property
    def done(self) -> bool:
        return bool(self._taken and self._taken[-1] in self._vocabulary.ends) or not any(self._left)

    def fill(self, row: npt.NDArray[np.uint8]) -> None:
        vocabulary, left = self._vocabulary, self._left
        bits = [
            b"" in left if i in vocabulary.ends else bool(piece) and any(rest.startswith(piece) for rest in left)
            for i, piece in enumerate(vocabulary.tokens)
        ]
        row[:] = np.packbits(bits, bitorder="little")[: len(row)]

    def accept(self, tokens: Sequence[int]) -> None:
        self._taken += tuple(tokens)
        if not self._left:
            self.error = f"{self._text!r} begins none of the choices"

    def forced(self) -> list[int]:
        common = bytes(c[0] for c in takewhile(lambda column: len(set(column)) == 1, zip(*self._left, strict=False)))
        tokens = self._vocabulary.encode(common.decode("utf-8", "ignore"))
        return tokens if len(self._left) == 1 else tokens[:-1]  # the last might go on otherwise

    def rollback(self, count: int) -> None:
        self._taken = self._taken[: len(self._taken) - count]
        self.error = ""

    def fork(self) -> FakeGrammar:
        return FakeGrammar(self._choices, self._vocabulary, self._taken)


class FakeProposer:
    """A Proposer that always says the same."""

    def __init__(self, draft: list[int] | DraftTree):
        self._draft = draft

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[list[int] | DraftTree]:
        return [self._draft if isinstance(self._draft, DraftTree) else self._draft[:budget] for budget in budgets]

    def observe(self, context: DraftContext, tokens: Sequence[int]) -> None:
        pass

    def forget(self, context: DraftContext) -> None:
        pass
