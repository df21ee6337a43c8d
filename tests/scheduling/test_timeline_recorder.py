"""What is written down as sequences run: where time went, why prefixes missed, which rows were in vain."""

from __future__ import annotations

from quire.observe.explanations import explain
from quire.observe.ledger import Entry
from quire.observe.metrics import Metrics, RequestMeter
from quire.scheduling import Scheduler
from quire.types.config import SchedulerOptions
from quire.types.fakes import FakeExecutor
from quire.types.kv import TokenShape, layout_for
from quire.types.plan import Capacity, StepResult
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams
from quire.types.timeline import MAX_CHUNKS, PrefixOutcome

PAGE = 4


class Engine:
    """The real scheduler over the fake executor, with a clock that ticks once a step."""

    def __init__(
        self,
        *,
        pages: int = 64,
        depth: int = 1,
        batch: int = 64,
        chunk: int | None = None,
        prefix_cache: bool = True,
        padding: int = 0,
    ):
        layout = layout_for([TokenShape(1, 1, window) for window in [None]], page_size=PAGE, dtype="float32")
        capacity = Capacity(pages=pages + 1, slots=8, max_model_len=256, max_batch_tokens=batch, depth=depth)
        self.executor = FakeExecutor(layout, capacity)
        self.scheduler = Scheduler(SchedulerOptions(prefill_chunk=chunk), layout, capacity, prefix_cache=prefix_cache)
        self.now = 100.0
        self.padding = padding
        self._in_flight: list[tuple[object, StepResult]] = []

    def submit(self, id: str, prompt: list[int], tokens: int = 4, *, salt: str = "", **fields: object) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, **fields.pop("params", {}))  # type: ignore[arg-type]
        self.scheduler.submit(
            Request(id=id, prompt=prompt, params=params, arrival=self.now, salt=salt, **fields)  # type: ignore[arg-type]
        )

    def step(self) -> None:
        self.now += 1
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            result = self.executor.submit(plan).result()
            result.padding = self.padding
            self._in_flight.append((plan, result))
        if self._in_flight and (plan is None or len(self._in_flight) >= self.scheduler.capacity.depth):
            self.now += 1
            self.scheduler.commit(*self._in_flight.pop(0), self.now)  # type: ignore[arg-type]
        self.scheduler.check()

    def run(self) -> None:
        while self.scheduler.busy or self._in_flight:
            self.step()

    @property
    def waste(self) -> dict[str, int]:
        return {cause: count for cause, count in self.scheduler.stats.waste.items() if count}


def test_times_add_up_and_chunks_are_told() -> None:
    engine = Engine(batch=10)
    engine.submit("a", list(range(24)), tokens=3)
    engine.run()
    (log,) = engine.scheduler.timelines("a")
    assert log.arrival == 100.0 and log.admitted == 101.0
    assert [tokens for _, tokens in log.chunks] == [10, 10, 4]
    assert log.arrival < log.admitted < log.first_token < log.ended == engine.now
    assert (log.finish, log.outputs, log.preemptions) == ("length", 3, [])
    stats = engine.scheduler.stats
    assert sum(stats.queue_time.counts) == sum(stats.prefill_time.counts) == sum(stats.decode_time.counts) == 1
    assert stats.decode_time.total == log.ended - log.first_token
    assert stats.inference_time.total == log.ended - log.admitted
    assert stats.request_preemptions.total == 0 and sum(stats.request_preemptions.counts) == 1
    assert stats.rows == 24 + 2 and not engine.waste


def test_why_prefixes_hit_or_missed() -> None:
    engine = Engine(pages=16)
    prompt = list(range(1, 14))  # three full pages and one token

    def outcome(id: str, tokens: list[int], **fields: object) -> tuple[PrefixOutcome | None, int]:
        engine.submit(id, tokens, tokens=1, **fields)  # type: ignore[arg-type]
        engine.run()
        (log,) = engine.scheduler.timelines(id)
        return log.prefix, log.cached

    assert outcome("first", prompt) == (PrefixOutcome.NEW, 0)
    assert outcome("again", prompt) == (PrefixOutcome.FULL, 12)
    assert outcome("forked", [*prompt[:6], *range(50, 60)]) == (PrefixOutcome.NEW, 6)
    assert outcome("salted", prompt, salt="s") == (PrefixOutcome.SALT, 0)
    assert outcome("salted again", prompt, salt="s") == (PrefixOutcome.FULL, 12)
    assert outcome("short", [7, 8]) == (PrefixOutcome.SHORT, 0)
    assert outcome("scored", prompt, params={"prompt_logprobs": 0}) == (PrefixOutcome.SCORED, 0)
    outcome("large", list(range(100, 161)))  # takes every page there is
    assert outcome("evicted", prompt) == (PrefixOutcome.EVICTED, 0)
    (large,), (log,) = engine.scheduler.timelines("large"), engine.scheduler.timelines("evicted")
    assert log.gone_for == "large" and large.arrival < log.gone_at <= large.ended <= log.arrival
    entry = Entry("evicted", "", "", "", len(prompt), 1, 0.0, 0.0, RequestMeter(Metrics("m"), 0.0), "m")
    for reader in (True, False):  # who took it is for those to know who may see all requests
        prefix = explain(entry, [log], engine.now, others=reader).prefix
        assert prefix is not None and prefix.evicted_before_s == log.arrival - log.gone_at > 0
        assert prefix.evicted_for == ("large" if reader else None)
    off = Engine(prefix_cache=False)
    off.submit("x", prompt, tokens=1)
    off.run()
    assert off.scheduler.timelines("x")[0].prefix is PrefixOutcome.OFF


def test_waiting_for_somebody_elses_pages_is_told_apart() -> None:
    engine = Engine(chunk=8)
    prompt = list(range(1, 30))
    engine.submit("first", prompt, tokens=2)
    engine.submit("second", prompt, tokens=2)
    engine.run()
    (log,) = engine.scheduler.timelines("second")
    assert log.prefix is PrefixOutcome.FULL and log.cached == 28
    assert 0 < log.pending <= log.admitted - log.arrival


def test_preemption_is_timed_and_recomputed_rows_counted() -> None:
    engine = Engine(pages=10, prefix_cache=False)
    engine.submit("a", list(range(1, 9)), tokens=24)
    engine.submit("b", list(range(20, 28)), tokens=24)
    engine.run()
    assert engine.scheduler.stats.preemptions > 0
    logs = [log for id in "ab" for log in engine.scheduler.timelines(id) if log.preemptions]
    assert logs and all(mark.at < mark.resumed for log in logs for mark in log.preemptions)
    again = sum(mark.recomputed for log in logs for mark in log.preemptions)
    assert engine.waste == {"recompute": again} and again > 0
    assert engine.scheduler.stats.rows == 2 * (8 + 23) + again  # nothing else was computed twice


def test_pages_found_again_after_preemption_are_no_waste() -> None:
    bare, shared = Engine(pages=10, prefix_cache=False), Engine(pages=10)
    for engine in (bare, shared):
        engine.submit("a", list(range(1, 9)), tokens=24)
        engine.submit("b", list(range(20, 28)), tokens=24)
        engine.run()
        assert engine.scheduler.stats.rows - sum(engine.waste.values()) == 2 * (8 + 23)
    assert shared.waste.get("recompute", 0) < bare.waste["recompute"]


def test_cancelled_late_and_failed_rows() -> None:
    engine = Engine()
    engine.submit("gone", list(range(1, 9)), tokens=50)
    engine.step()
    engine.step()
    engine.scheduler.abort("gone")
    engine.run()
    assert engine.waste == {"cancelled": 9}  # the prompt and one token
    assert engine.scheduler.timelines("gone")[0].finish == "abort"
    engine.submit("late", list(range(30, 38)), tokens=50, deadline=engine.now + 2)
    engine.step()
    engine.scheduler.expire(engine.now + 5)
    engine.run()
    assert engine.waste == {"cancelled": 9, "late": 8}
    engine.submit("unlucky", list(range(40, 48)), tokens=50)
    engine.step()
    engine.scheduler.fail("it broke")
    assert engine.waste == {"cancelled": 9, "late": 8, "failed": 8}


def test_rows_past_a_stop_and_padding() -> None:
    engine = Engine(depth=2, padding=3)
    engine.submit("a", list(range(1, 9)), tokens=50)
    for _ in range(4):
        engine.step()
    drawn = engine.scheduler.sequences.requests["a"].sequences[0].outputs
    engine.scheduler.finish_at("a", 0, drawn - 1)
    engine.run()
    steps = engine.scheduler.stats.steps
    assert engine.waste == {"overrun": 2, "padding": 3 * steps}  # one token cut, one row in flight
    assert engine.scheduler.timelines("a")[0].outputs == drawn - 1


def test_bounded() -> None:
    engine = Engine(batch=2)
    engine.submit("long", list(range(200)), tokens=1)
    engine.run()
    (log,) = engine.scheduler.timelines("long")
    assert len(log.chunks) == MAX_CHUNKS and sum(tokens for _, tokens in log.chunks) == 200
    for i in range(1100):
        engine.submit(f"r{i}", [i + 1], tokens=1)
        engine.run()
    assert engine.scheduler.timelines("long") == [] and engine.scheduler.timelines("r1099")
    assert len(engine.scheduler.features.timeline._past) == 1024


def test_the_picture_agrees_with_the_books() -> None:
    engine = Engine(pages=32)
    engine.submit("a", list(range(1, 14)), tokens=20, params={"n": 2})
    engine.submit("b", list(range(1, 14)), tokens=20)
    for _ in range(3):
        engine.step()
    view, pool = engine.scheduler.view(), engine.scheduler.memory.pool
    tier = view.tiers[0]
    assert (tier.used, tier.cached, tier.total, len(tier.cells)) == (pool.used, pool.cached, 32, 32)
    assert sum(cell >= 2 for cell in tier.cells) == pool.used
    assert any(cell == 2 for cell in tier.cells)  # the prompt's pages, shared
    assert sorted(view.owners) == sorted(s.key for s in engine.scheduler.sequences.running)
    assert sum(node.pages for node in view.prefixes) == len(engine.scheduler.memory.index)
    assert {s.request for s in view.sequences} == {"a", "b"}
    engine.run()
    assert all(cell < 2 for cell in engine.scheduler.view().tiers[0].cells)
