"""Random life: submit, abort, fork, preempt, finish, in any order and at any depth. After each operation the
invariants hold; each finished request has exactly the tokens it would have had alone; at the end all is free."""

import random
from collections import Counter

import msgspec
import pytest

from quire.scheduling import Scheduler, step_times
from quire.scheduling import prefill_budget as prefill_limiter
from quire.scheduling.beam_group import BeamGroup
from quire.types.beam import BeamParams
from quire.types.config import SchedulerOptions
from quire.types.fakes import FakeExecutor, fake_options, fake_token
from quire.types.grammar import GrammarSpec
from quire.types.kv import KVGroup, KVLayout, StateGroup, StateShape
from quire.types.plan import Capacity, StepResult, TokenLogprobs
from quire.types.request import FinishReason, Request
from quire.types.sampling_params import SamplingParams

FULL = KVGroup(layers=(0,), tokens_per_page=4, kv_heads=1, head_dim=1)
WINDOW = KVGroup(layers=(1,), tokens_per_page=8, kv_heads=1, head_dim=1, window=11)
STATE = StateGroup(layers=(2,), shape=StateShape((3, 10)))  # a cell is of several pages
VOCAB = 97


@pytest.fixture(autouse=True)
def short_steps(monkeypatch):
    """Prompts here are too short to be cut."""
    monkeypatch.setattr(prefill_limiter, "MIN_PREFILL_TOKENS", 4)
    monkeypatch.setattr(step_times, "WORK_DOUBLING_CONTEXT", 16)


def layout(*groups: KVGroup | StateGroup) -> KVLayout:
    states = tuple(group for group in groups if isinstance(group, StateGroup))
    return KVLayout(groups=tuple(g for g in groups if isinstance(g, KVGroup)), dtype="float32", states=states)


class World:
    def __init__(
        self,
        groups,
        *,
        policy,
        depth,
        seed,
        pages=60,
        slots=7,
        prefix_cache=True,
        drafts=0,
        late_draws=False,
        tiers=None,
        naming=b"",
        **options,
    ):
        self.rng = random.Random(seed)
        self.depth = depth
        capacity = Capacity(pages=pages, slots=slots, max_model_len=90, max_batch_tokens=24, depth=depth, drafts=drafts)
        target = 0.11 if seed % 2 else 0.0  # a step takes 0.1
        capacity = msgspec.structs.replace(
            capacity,
            late_draws=late_draws,
            tiers=tiers.specs if tiers else (),
            rope_shifts=True,
            step_target=target,
            states=1 + 3 * slots,
            snapshot_tokens=12,
            naming=naming,
        )
        chosen = SchedulerOptions(scheduler=policy, prefill_chunk=self.rng.choice([None, 7]))
        self.scheduler = Scheduler(chosen, layout(*groups), capacity, prefix_cache=prefix_cache, **options)
        self.executor = FakeExecutor(layout(*groups), capacity, vocab=VOCAB, tiers=tiers)
        self.tickets = []
        self.requests = {}
        self.outputs = {}
        self.ended = {}
        self.embeddings = {}
        self.late = []
        self.overlapped = 0  # samples under a grammar with another in flight before them
        self.beams = policy != "static"  # which cannot fork
        self.now = 0.0

    def submit(self):
        stem = [[1] * 40, list(range(2, 50)), [3, 5] * 20][self.rng.randrange(3)]
        prompt = stem[: self.rng.randint(0, 40)] + [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 12))]
        grammar = self.rng.choice([None, None, GrammarSpec("json_object")])
        params = SamplingParams(
            n=self.rng.choice([1, 1, 1, 2, 4]),
            seed=self.rng.randrange(5),
            max_tokens=self.rng.randint(1, 30),
            stop_token_ids=[self.rng.randrange(VOCAB)],
            min_tokens=0 if grammar else self.rng.choice([0, 0, 1]),
            grammar=grammar,
            prompt_logprobs=self.rng.choice([None, None, 0]),
        )
        request = Request(
            id=f"r{len(self.requests)}", prompt=prompt, params=params, arrival=self.now,
            priority=self.rng.randrange(3) * self.scheduler.policy.uses_priority,
            salt=self.rng.choice(["", "", "tenant"]),
            pooling=self.rng.choice(["", "", "", "mean", "last"]) if params.n == 1 else "",
        )  # fmt: skip
        if self.beams and self.rng.random() < 0.15:
            request = searched(request, self.rng)
            if not self.scheduler.memory.prefix_cache:  # beams that share nothing must still fit the pool
                request = msgspec.structs.replace(request, prompt=prompt[:40])
        self.requests[request.id] = request
        self.scheduler.submit(request)

    def take(self, events):
        for event in events:
            key = (event.request, event.branch)
            assert key not in self.ended, "an event after the end"
            out = self.outputs.setdefault(key, [])
            assert event.index == len(out)
            out += event.tokens
            if event.finish:
                self.ended[key] = event.finish
            if event.embedding is not None:
                self.embeddings[event.request] = event.embedding
            if event.prompt_logprobs is not None:
                assert len(event.prompt_logprobs) == len(self.requests[event.request].prompt) - 1

    def step(self):
        self.now += 0.1
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            assert sum(r.count for r in plan.rows if r.count > 1) <= 24 and all(r.count > 0 for r in plan.rows)
            running = self.scheduler.sequences.running
            self.overlapped += sum(s.pending > 1 and s.request.params.grammar is not None for s in running)
            self.tickets.append((plan, self.executor.submit(plan)))
        if self.tickets and (plan is None or len(self.tickets) >= self.depth):
            plan, ticket = self.tickets.pop(0)
            self.take(self.scheduler.commit(plan, self.deferring(plan, ticket.result()), self.now + 0.05))

    def deferring(self, plan, result):
        """Some grammars take longer than the step: what they say comes with a later one."""
        first = {id(slot): late for slot, late in reversed(self.late)}  # what is behind it is drawn once it is told of
        due = [late for late in first.values() if self.rng.random() < 0.4]
        self.late = [(slot, late) for slot, late in self.late if not any(late is one for one in due)]
        slots = {i: self.executor._slots.get(sample.slot) for i, sample in enumerate(plan.samples)}
        constrained = {i: slot for i, slot in slots.items() if slot and slot.admit.params.grammar}
        slow = [i for i, slot in constrained.items() if id(slot) in first or self.rng.random() < 0.3]
        for i in slow:
            parts = {
                name: {i: getattr(result, name).pop(i)} for name in ("drafts", "logprobs") if i in getattr(result, name)
            }
            rest = [j for j in range(len(plan.samples)) if j != i]
            tokens = [own if i == j else [] for j, own in enumerate(result.tokens)]
            late = StepResult(step=plan.step, tokens=tokens, deferred=rest, **parts)
            self.late.append((slots[i], late))
        return msgspec.structs.replace(result, deferred=slow, late=due)

    def any_live(self):
        live = [r for r in self.requests if any((r, b) not in self.ended for b in range(self.requests[r].params.n))]
        return self.rng.choice(live) if live else None

    def abort(self):
        if request := self.any_live():
            self.take(self.scheduler.abort(request))

    def stop_string(self):
        if request := self.any_live():
            branch = self.rng.randrange(self.requests[request].params.n)
            out = self.outputs.get((request, branch), [])
            if out and (request, branch) not in self.ended:
                keep = self.rng.randint(1, len(out))
                del out[keep:]
                self.take(self.scheduler.finish_at(request, branch, keep))

    def preempt(self):
        running = list(self.scheduler.sequences.running)
        if running:
            self.scheduler.sequences.preempt(self.rng.choice(running))

    def drain(self):
        for _ in range(20_000):
            if not self.scheduler.busy and not self.tickets:
                return
            self.step()
        raise AssertionError("work never ends")


def alone(request: Request, branch: int) -> tuple[list[int], FinishReason]:
    """The same request computed by itself, token by token."""
    tokens, out = list(request.prompt), []
    while True:
        token = fake_token(tokens, request.params.seed, branch, VOCAB)
        tokens.append(token)
        out.append(token)
        if token in request.params.stop_token_ids and len(out) >= request.params.min_tokens:
            return out, FinishReason.STOP
        if len(out) >= request.params.max_tokens or len(tokens) >= 90:
            return out, FinishReason.LENGTH


def searched(request: Request, rng: random.Random) -> Request:
    """The same prompt, answered by beam search."""
    beam = BeamParams(
        beams=4, n=rng.randint(1, 3), max_tokens=rng.randint(1, 9), length_penalty=rng.choice([0.0, 1.0, -1.0]),
        early_stopping=rng.choice([True, False, "never"]), groups=rng.choice([1, 1, 2]),
    )  # fmt: skip
    params = SamplingParams(
        n=beam.n, temperature=0.0, max_tokens=beam.max_tokens, logprobs=beam.candidates(1),
        stop_token_ids=request.params.stop_token_ids,
    )  # fmt: skip
    return msgspec.structs.replace(request, params=params, beam=beam, pooling="")


def found_alone(request: Request) -> list[tuple[list[int], FinishReason]]:
    """The same search over the fake's world, without an engine."""
    beam, prompt = request.beam, request.prompt
    limit, ends = min(90 - len(prompt), beam.max_tokens), request.params.stop_token_ids
    groups = [BeamGroup(beam, beam.beams // beam.groups, limit, ends) for _ in range(beam.groups)]
    answers = [[[]] for _ in groups]
    while not all(group.done for group in groups):
        taken = Counter()
        for i, group in enumerate(groups):
            if group.done:
                continue
            options = [fake_options([*prompt, *a], request.params.logprobs, VOCAB) for a in answers[i]]
            chosen = group.advance(answers[i], [TokenLogprobs(0, 0.0, 1, *o) for o in options], taken)
            answers[i] = [[*answers[i][c.parent], c.token] for c in chosen]
            taken.update(c.token for c in chosen)
    best = sorted((h for group in groups for h in group.finished), key=lambda h: -h.score)[: beam.n]
    return [(h.tokens, FinishReason.STOP if h.ended else FinishReason.LENGTH) for h in best]


def pooled(request: Request) -> list[float]:
    """What the fake's hidden states, the tokens and their positions, come to."""
    positions = range(len(request.prompt))
    if request.pooling == "last":
        return [request.prompt[-1], positions[-1]]
    return [sum(request.prompt) / len(positions), sum(positions) / len(positions)]


WORLDS = [
    pytest.param((FULL, WINDOW), "priority", 2, True, id="two-groups-priority"),
    pytest.param((FULL,), "fcfs", 1, True, id="full-depth1"),
    pytest.param((FULL,), "fcfs", 2, True, id="full-depth2"),
    pytest.param((FULL,), "fcfs", 2, False, id="full-no-prefix-cache"),
    pytest.param((WINDOW,), "fcfs", 2, True, id="window-only"),
    pytest.param((FULL, STATE), "fcfs", 1, True, id="hybrid-depth1"),
    pytest.param((FULL, STATE), "fcfs", 2, True, id="hybrid-depth2"),
    pytest.param((FULL, WINDOW, STATE), "priority", 2, True, id="hybrid-windows"),
    pytest.param((FULL, STATE), "fcfs", 2, False, id="hybrid-no-prefix-cache"),
    pytest.param((FULL, STATE), "static", 2, True, id="hybrid-static"),
    pytest.param((FULL,), "static", 1, True, id="static"),
    pytest.param((FULL,), "static", 2, True, id="static-depth2"),
    pytest.param((FULL,), "own_policies:LongestPromptFirst", 2, True, id="own-displacing"),
]
SHORT_OR_LONG = pytest.mark.parametrize(  # a life of so many operations
    "operations", [pytest.param(2_500, id="short"), pytest.param(20_000, marks=pytest.mark.slow, id="long")]
)


def drafting(number, world):
    """Each world without drafts or with them, in turn; where a step is in flight, with both; the rest is slow."""
    quick = {0, 4} if world.id in ("full-depth2", "hybrid-depth2") else {4 * (number % 2)}
    for drafts in (0, 4):
        marks = [] if drafts in quick else [pytest.mark.slow]
        yield pytest.param(*world.values, drafts, id=f"{world.id}-{drafts}", marks=marks)


@SHORT_OR_LONG
@pytest.mark.parametrize(
    ("groups", "policy", "depth", "cache", "drafts"),
    [life for number, world in enumerate(WORLDS) for life in drafting(number, world)],
)
def test_random_life(groups, policy, depth, cache, drafts, operations):
    world = World(groups, policy=policy, depth=depth, seed=7, prefix_cache=cache, drafts=drafts)
    live(world, policy, cache, operations, drafts)


def live(world, policy, cache, operations, drafts=0):
    actions = [world.submit] * 4 + [world.step] * 30 + [world.abort, world.stop_string, world.preempt]
    if policy == "static":
        actions.remove(world.preempt)
    for _ in range(operations):
        world.rng.choice(actions)()
        world.scheduler.check()
    world.drain()
    world.scheduler.check()
    assert world.scheduler.memory.pool.used == 0
    if (states := world.scheduler.memory.states) is not None:
        assert states.used == 0 and (states.cached > 0) == (cache and policy != "static")
        world.scheduler.memory.drop_cached()
        assert states.cached == 0 and states.available == states.total
    whole = searches = 0
    for (name, branch), reason in world.ended.items():
        request = world.requests[name]
        if request.beam:
            if reason is not FinishReason.ABORT:
                assert (world.outputs[name, branch], reason) == found_alone(request)[branch]
                searches += 1
            continue
        if request.pooling:
            assert reason is FinishReason.ABORT or world.embeddings[name] == pytest.approx(pooled(request))
            continue
        expected, why = alone(request, branch)
        out = world.outputs[name, branch]
        assert out == expected[: len(out)]
        if reason is not FinishReason.ABORT and (out == expected or reason is not FinishReason.STOP):
            assert (out, reason) == (expected, why)
            whole += 1
    assert whole > 100 and len(world.embeddings) > operations / 120
    assert all((r, b) in world.ended for r, q in world.requests.items() for b in range(q.params.n))
    assert world.scheduler.stats.forced_tokens > 50
    assert searches > operations / 120 or not world.beams
    assert (world.scheduler.stats.accepted_tokens > 100) == (world.scheduler.stats.waste["draft"] > 100) == bool(drafts)
    if policy != "static":
        assert world.scheduler.stats.preemptions > 20
    if cache and policy != "static":
        assert world.scheduler.stats.cached_tokens > (500 if states is None else 300)  # hits need a snapshot too


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("groups", [(FULL, WINDOW), (FULL, STATE)], ids=["two-groups", "hybrid"])
def test_random_life_with_late_draws(groups, drafts):
    """Under a grammar too the next step is planned before the last one is read."""
    world = World(groups, policy="priority", depth=2, seed=8, drafts=drafts, late_draws=True)
    live(world, "priority", True, 4_000, drafts)
    assert world.overlapped > 50
