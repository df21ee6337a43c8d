"""Fakes of the seams, for tests and experiments without a device.

`FakeExecutor` has no model but a memory that never lies: each KV entry is a digest of the whole token history
that led to it. It checks that every row would read exactly its own history through its page table, whatever
was shared, copied, preempted or re-used, and draws tokens that depend on that history alone.
"""

from __future__ import annotations

from quire.types.kv import KVLayout
from quire.types.plan import Admit, Capacity, StepPlan, StepResult, TokenLogprobs

_MASK = (1 << 61) - 1


def _mix(state: int, value: int) -> int:
    return ((state ^ (value + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 + (state >> 7)) & _MASK


def fake_token(tokens: list[int], seed: int, branch: int, vocab: int) -> int:
    """The token that follows `tokens` in the fake's world."""
    state = 1
    for token in tokens:
        state = _mix(state, token)
    return _mix(_mix(state, seed), branch) % vocab


class _Slot:
    def __init__(self, admit: Admit, groups: int):
        self.admit = admit
        self.tokens = list(admit.tokens)
        self.digests: list[int] = []
        self.tables: list[dict[int, int]] = [{} for _ in range(groups)]

    def digest(self, position: int) -> int:
        while len(self.digests) <= position:
            state = self.digests[-1] if self.digests else 1
            self.digests.append(_mix(state, self.tokens[len(self.digests)]))
        return self.digests[position]

    def store(self, position: int, token: int) -> None:
        del self.tokens[position:], self.digests[position:]
        self.tokens.append(token)


class FakeTicket:
    def __init__(self, result: StepResult):
        self._result = result

    def result(self) -> StepResult:
        return self._result


class FakeExecutor:
    def __init__(self, layout: KVLayout, capacity: Capacity, *, vocab: int = 97):
        self.layout = layout
        self.capacity = capacity
        self.vocab = vocab
        self._slots: dict[int, _Slot] = {}
        self._kv: dict[tuple[int, int], int] = {}  # (page, offset) → digest

    def start(self) -> Capacity:
        return self.capacity

    def submit(self, plan: StepPlan) -> FakeTicket:
        for slot in plan.frees:
            self._slots.pop(slot, None)
        for admit in plan.admits:
            assert admit.slot not in self._slots, f"slot {admit.slot} is taken"
            self._slots[admit.slot] = _Slot(admit, len(self.layout.groups))
        for delta in plan.deltas:
            table = self._slots[delta.slot].tables[delta.group]
            table.update(enumerate(delta.pages, delta.index))
        self._copy(plan.copies)
        for row in plan.rows:
            self._write(self._slots[row.slot], row.start, row.count)
        for row in plan.rows:
            self._read(self._slots[row.slot], row.start, row.count)
        return FakeTicket(self._draw(plan))

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        size = max(g.tokens_per_page for g in self.layout.groups)
        before = {(page, i): self._kv.get((page, i)) for page, _ in copies for i in range(size)}
        for source, target in copies:
            for i in range(size):
                value = before[source, i]
                if value is not None:
                    self._kv[target, i] = value

    def _write(self, slot: _Slot, start: int, count: int) -> None:
        assert start + count <= len(slot.tokens), "asked to compute tokens nobody knows"
        for group, spec in enumerate(self.layout.groups):
            size = spec.tokens_per_page
            for p in range(start, start + count):
                page = slot.tables[group][p // size]
                assert page != 0, "a live position points at the null page"
                self._kv[page, p % size] = slot.digest(p)

    def _read(self, slot: _Slot, start: int, count: int) -> None:
        for group, spec in enumerate(self.layout.groups):
            size = spec.tokens_per_page
            first = 0 if spec.window is None else max(0, start - spec.window + 1)
            for p in range(first, start + count):
                found = self._kv.get((slot.tables[group][p // size], p % size))
                assert found == slot.digest(p), f"{slot.admit.key}: position {p} holds another history"

    def _draw(self, plan: StepPlan) -> StepResult:
        drawn, logprobs = [], {}
        ends = [row.start + row.count for row in plan.rows]
        for i, sample in enumerate(plan.samples):
            slot = self._slots[sample.slot]
            assert ends[sample.row] == sample.position == len(slot.tokens), "sample is not at the end of its row"
            admit = slot.admit
            token = fake_token(slot.tokens, admit.seed, admit.branch, self.vocab)
            drawn.append((slot, sample.position, token))
            if admit.params.logprobs is not None:
                logprobs[i] = TokenLogprobs(token, -0.5, 1, [token][: admit.params.logprobs], [-0.5])
        for slot, position, token in drawn:
            slot.store(position, token)
        scores = {
            i: [TokenLogprobs(0, -1.0, 1, [], []) for _ in range(row.count)]
            for i, row in enumerate(plan.rows)
            if row.score
        }
        return StepResult(step=plan.step, tokens=[[t] for _, _, t in drawn], logprobs=logprobs, scores=scores)

    def close(self) -> None:
        self._slots.clear()
