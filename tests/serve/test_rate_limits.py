"""Who is let in, at what price, and what the others are told: on a clock that only the test moves."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest
from fake_frontend import FakeClient, FakeFrontend

from quire.serve.core.api_keys import Key
from quire.serve.core.generation import price
from quire.serve.core.rate_limits import Permit, RequestAdmission
from quire.serve.http.app import QUEUE, create_serving
from quire.types.errors import OverloadedError, RateLimitError
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams
from quire.types.serving import ServeOptions

ALICE, BOB = Key("alice"), Key("bob")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def admission(clock: Clock | None = None, **limits: Any) -> RequestAdmission:
    wide = {"max_queue": 1000, "max_queue_tokens": 1_000_000}
    return RequestAdmission(**(wide | limits), clock=clock or Clock())


def queue(door: RequestAdmission, tokens: int, key: Key = ALICE) -> Permit:
    permit = door.enter(key)
    door.charge(permit, tokens)
    return permit


def test_a_burst_of_as_many_as_run_at_once_is_let_in() -> None:
    frontend: Any = FakeFrontend()
    frontend.client.info = msgspec.structs.replace(frontend.client.info, slots=1024)
    door = create_serving(frontend).admission
    for _ in range(1024 + QUEUE):
        door.enter(ALICE)
    with pytest.raises(OverloadedError, match="1536 requests are waiting"):
        door.enter(ALICE)
    assert create_serving(frontend, ServeOptions(max_queue=3)).admission.max_queue == 3


def test_the_queue_is_bounded_in_requests() -> None:
    door = admission(max_queue=2)
    first, _ = door.enter(ALICE), door.enter(BOB)
    with pytest.raises(OverloadedError) as refused:
        door.enter(ALICE)
    assert (refused.value.status, refused.value.retry_after) == (503, 1.0)
    door.start(first)  # it has a token: it waits no more
    door.enter(ALICE)


def test_the_queue_is_bounded_in_tokens_but_takes_anything_when_empty() -> None:
    door = admission(max_queue_tokens=100)
    huge = queue(door, 5000)
    permit = door.enter(BOB)
    with pytest.raises(OverloadedError, match="no room for 1 more"):
        door.charge(permit, 1)
    door.start(huge)
    door.charge(permit, 100)
    assert door.queued == 100


def test_retry_after_is_how_long_others_waited_lately() -> None:
    clock = Clock()
    door = admission(clock, max_queue=1)
    for _ in range(60):
        permit = queue(door, 100)
        clock.now += 4
        door.start(permit)
        door.leave(permit)
    assert door.wait() == 0, "nobody waits now"
    queue(door, 100)
    with pytest.raises(OverloadedError) as refused:
        door.enter(BOB)
    assert refused.value.retry_after == pytest.approx(4.0, rel=0.02)
    assert door.refused_later(OverloadedError("of the engine")).retry_after == pytest.approx(4.0, rel=0.02)
    assert door.refused == {"queue_full": 1, "engine": 1}


def test_one_key_cannot_take_all_places() -> None:
    door = admission(key_concurrency=2)
    held = [door.enter(ALICE), door.enter(ALICE)]
    with pytest.raises(RateLimitError) as refused:
        door.enter(ALICE)
    assert refused.value.status == 429
    door.enter(BOB)
    door.leave(held[0])
    door.enter(ALICE)
    generous = Key("carol", concurrency=0)
    assert all(door.enter(generous) for _ in range(50))


def test_token_rate_and_refund() -> None:
    clock = Clock()
    door = admission(clock, key_tokens_per_minute=600)
    permit = queue(door, 500)
    second = door.enter(ALICE)
    with pytest.raises(RateLimitError) as refused:
        door.charge(second, 400)
    assert refused.value.retry_after == pytest.approx(30.0)  # 300 more at 10 a second
    door.charge(door.enter(BOB), 400)
    permit.used = 100
    door.leave(permit)  # 400 were not used
    door.charge(second, 400)
    with pytest.raises(RateLimitError):
        door.charge(second, 200)
    clock.now += 15
    door.charge(second, 200)


def test_a_request_above_the_rate_is_possible_but_pays_later() -> None:
    clock = Clock()
    door = admission(clock, key_tokens_per_minute=600)
    permit = door.enter(ALICE)
    door.charge(permit, 1200)
    with pytest.raises(RateLimitError) as refused:
        door.charge(permit, 10)
    assert refused.value.retry_after == pytest.approx(61.0)


def test_draining_lets_nobody_in() -> None:
    door = admission()
    door.draining = True
    with pytest.raises(OverloadedError, match="shutting down"):
        door.enter(ALICE)
    assert door.refused["draining"] == 1


def test_whatever_happens_the_books_balance() -> None:
    rng, clock = random.Random(5), Clock()
    door = admission(clock, max_queue=20, max_queue_tokens=2000, key_concurrency=15)
    permits: list[Permit] = []
    refusals = 0
    for _ in range(5000):
        clock.now += rng.random() / 10
        try:
            match rng.randrange(5):
                case 0 | 1:
                    permits.append(door.enter(rng.choice((ALICE, BOB))))
                case 2 if permits:
                    door.charge(rng.choice(permits), rng.randrange(1, 300))
                case 3 if permits:
                    door.start(rng.choice(permits))
                case 4 if permits:
                    door.leave(permits.pop(rng.randrange(len(permits))))
        except OverloadedError as error:
            refusals += 1
            assert error.retry_after >= 1
        assert 0 <= door.waiting <= 20 and door.queued >= 0 and door.inflight == len(permits)
    assert refusals > 100
    for permit in permits:
        door.leave(permit)
        door.leave(permit)
    assert (door.waiting, door.queued, door.inflight) == (0, 0, 0)
    assert not any(door.counts.requests_of(key.name) for key in (ALICE, BOB))


def test_price_counts_the_prompt_once_and_every_branch() -> None:
    info = FakeClient.info

    def of(prompt: int, **params: Any) -> int:
        return price(Request(id="r", prompt=[1] * prompt, params=SamplingParams(**params)), info)

    assert of(10, max_tokens=6) == 16
    assert of(10, max_tokens=7) == 32  # whole pages
    assert of(100, max_tokens=10, n=5) == 160
    assert of(12, max_tokens=None) == info.max_model_len
    assert of(12, max_tokens=10**6, n=2) == math.ceil((12 + 2 * (info.max_model_len - 12)) / 16) * 16
