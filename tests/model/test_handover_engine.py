"""KV pages handed over from one engine to another: answers are those of one engine, whatever becomes of the pages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest
import zmq
from tiny_engine import Engine
from tiny_models import prompts, tiny

from quire.runtime import layerwise_send
from quire.runtime.connectors.page_connector import PageConnector
from quire.runtime.layerwise_send import LayerwiseSend
from quire.types.errors import OverloadedError
from quire.types.handover import Handover
from quire.types.hashing import PageHasher
from quire.types.membership import CurveKeys, PeerLink
from quire.types.request import FinishReason, Request
from quire.types.sampling_params import SamplingParams

NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed: pip install 'quire[nixl]'")
WAYS = [  # each connector, and a step in flight with one: what is sent is the same
    ("in-process", 1), ("in-process", 2), ("tcp", 2), ("shared-memory", 1),
    *(pytest.param(*way, marks=pytest.mark.slow) for way in (("tcp", 1), ("shared-memory", 2))),
    *(pytest.param("nixl", depth, marks=NIXL) for depth in (1, 2)),
]  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=7, max_tokens=12, ignore_eos=True, frequency_penalty=0.3)
ALONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
(PROMPT,) = prompts(46)
CHUNK = 8
PATIENCE_S = 300.0
_names = count()


@pytest.fixture(scope="module", params=["llama3", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    tiny(request.param).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny("llama3").save_pretrained(path)
    return path


class Pair:
    """Two engines that can hand pages over, stepped in turn."""

    def __init__(self, path: Path, kind: str = "in-process", **options: object):
        public, secret = zmq.curve_keypair()
        link = PeerLink(kind, "127.0.0.1", CurveKeys("", public.decode(), secret.decode()), "ab" * 32)
        self.cores = []
        for _ in range(2):
            core = Engine(path, prefill_chunk=CHUNK, kv_pages=200, **options).core
            core.scheduler.memory.name_pages_by(lambda size: PageHasher(b"k" * 32, size))
            assert core.connect(link)
            self.cores.append(core)
        self.source, self.target = self.cores
        self.said: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}

    def handover(self, **more: object) -> Handover:
        assert self.source.connector is not None
        return Handover(f"handover-{next(_names)}", self.source.connector.address, **{"timeout": 600.0, **more})  # type: ignore[arg-type]

    def ask(self, core, name: str, handover: Handover | None = None, params: SamplingParams = GREEDY, **more) -> None:
        request = Request(id=name, prompt=more.pop("prompt", PROMPT), params=params, handover=handover, **more)
        core.submit(request)
        self.said[name] = []

    def prefill(self, handover: Handover, name: str = "prefill") -> None:
        self.ask(self.source, name, Handover(handover.id), ALONE)

    def step(self) -> None:
        for core in self.cores:
            for event in core.step() if core.busy else ():
                assert not event.message, event.message
                self.said[event.request] += event.tokens
                if event.finish is not None:
                    self.finish[event.request] = event.finish
            core.scheduler.check()

    def until(self, *names: str) -> list[int]:
        """All of these are over; what the last said."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.finish.keys() >= set(names):
            assert time.monotonic() < deadline, "a request hangs"
            self.step()
        return self.said[names[-1]]

    def settle(self) -> None:
        while any(core.busy for core in self.cores):
            self.step()
        for core in self.cores:
            core.settle()
            core.scheduler.check()

    def received(self) -> int:
        """Tokens that came by hand-over."""
        return next(tier.hit_tokens for tier in self.target.stats().tiers if tier.name == "peer")


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.settle()
        for core in pair.cores:
            core.close()


def alone(path: Path, params: SamplingParams = GREEDY, prompt: list[int] = PROMPT) -> list[list[int]]:
    return Engine(path, prefill_chunk=CHUNK, kv_pages=200).answers([prompt], params=params)


@pytest.mark.parametrize(("kind", "depth"), WAYS)
def test_a_prompt_computed_elsewhere_is_answered_as_by_one_engine(model, kind, depth, pairs) -> None:
    pair = Pair(model, kind, depth=depth)
    pairs.append(pair)
    for name, params in (("greedy", GREEDY), ("seeded", SEEDED)):
        handover = pair.handover()
        pair.ask(pair.target, name, handover, params)
        pair.prefill(handover, f"prefill-{name}")
        assert pair.until(f"prefill-{name}", name) == alone(model, params)[0]
        assert pair.received() == (44 if "llama" in model.name else 8), "all full pages that a window reaches, once"
        stats = pair.target.stats().handovers
        assert (stats.started, stats.completed, stats.dropped) == (1, 1, 0)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages go by layers, however few there are; the numbers of the parts that were sent."""
    monkeypatch.setattr(layerwise_send, "MIN_LAYERWISE_BYTES", 0)
    sent: list[int] = []
    submit = PageConnector.submit

    def spy(self, job) -> None:
        sent.extend([job.part] * (job.kind == "put"))
        submit(self, job)

    monkeypatch.setattr(PageConnector, "submit", spy)
    return sent


@pytest.mark.parametrize(("kind", "depth"), WAYS)
def test_pages_that_come_layer_by_layer_give_the_same_answers(model, kind, depth, parts, pairs) -> None:
    pair = Pair(model, kind, depth=depth)
    pairs.append(pair)
    for name, params in (("greedy", GREEDY), ("seeded", SEEDED)):
        parts.clear()
        handover = pair.handover()
        pair.ask(pair.target, name, handover, params)
        while not pair.source.connector.has_requests:
            pair.step()
        pair.prefill(handover, f"prefill-{name}")
        assert pair.until(f"prefill-{name}", name) == alone(model, params)[0]
        assert pair.received() == (44 if "llama" in model.name else 8)
        assert max(parts) > 0 and (-1 in parts) == ("gemma" in model.name), "whole are those of a single layer"
        assert pair.target.stats().handovers.dropped == 0
        for core in pair.cores:
            core.scheduler.reset()


def test_layers_come_while_later_ones_are_computed(llama, parts, pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that fills pages does not go on before its peer has their first layers."""
    pair = Pair(llama)
    pairs.append(pair)
    handover, written, early = pair.handover(), LayerwiseSend.layer_written, []

    def wait_for_peer(self, layer: float) -> None:
        if self.layers and layer == max(self.layers):
            deadline = time.monotonic() + PATIENCE_S
            while not pair.target.connector.stats.bytes_received and time.monotonic() < deadline:
                time.sleep(0.001)
            early.append(pair.target.connector.stats.bytes_received)
        written(self, layer)

    monkeypatch.setattr(LayerwiseSend, "layer_written", wait_for_peer)
    pair.ask(pair.target, "answer", handover)
    while not pair.source.connector.has_requests:
        pair.step()
    pair.prefill(handover)
    assert pair.until("prefill", "answer") == alone(llama)[0] and early[0] > 0
    assert pair.target.connector.stats.pages_received == 11


def test_a_step_that_fails_between_layers_leaves_no_page(llama, parts, pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peer has some layers of its pages: it computes them itself."""
    pair = Pair(llama)
    pairs.append(pair)
    handover, written = pair.handover(), LayerwiseSend.layer_written

    def fail_at_the_last(self, layer: float) -> None:
        if self.layers and layer == max(self.layers):
            raise RuntimeError("the device is gone")
        written(self, layer)

    monkeypatch.setattr(LayerwiseSend, "layer_written", fail_at_the_last)
    pair.ask(pair.target, "answer", handover)
    while not pair.source.connector.has_requests:
        pair.step()
    pair.prefill(handover)
    while not pair.finish:
        pair.finish |= {event.request: event.finish for event in pair.source.step() if event.finish}
    assert pair.finish == {"prefill": FinishReason.ERROR}
    deadline = time.monotonic() + PATIENCE_S
    while 0 not in parts and time.monotonic() < deadline:  # the sender's thread
        time.sleep(0.001)
    assert 0 in parts
    monkeypatch.setattr(LayerwiseSend, "layer_written", written)
    assert pair.until("answer") == alone(llama)[0] and pair.received() == 0


def test_a_part_that_cannot_be_sent_holds_nobody_up(llama, parts, pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(llama)
    pairs.append(pair)
    submit = PageConnector.submit

    def fail(self, job) -> None:
        if job.part == 1:
            raise RuntimeError("no thread, no memory")
        submit(self, job)

    monkeypatch.setattr(PageConnector, "submit", fail)
    handover = pair.handover(timeout=0.2)
    pair.ask(pair.target, "answer", handover)
    while not pair.source.connector.has_requests:
        pair.step()
    pair.prefill(handover)
    assert pair.until("prefill", "answer") == alone(llama)[0]
    pair.settle()
    assert next(tier.failed for tier in pair.source.stats().tiers if tier.name == "peer") > 0


def test_pages_come_while_the_rest_is_computed(llama, pairs) -> None:
    pair = Pair(llama)
    pairs.append(pair)
    handover = pair.handover()
    pair.ask(pair.target, "answer", handover)
    pair.prefill(handover)
    early = 0
    while "prefill" not in pair.finish:
        pair.step()
        early = max(early, pair.target.connector.stats.pages_received)
    assert early >= 6, "of 11 pages, those of the chunks before the last two"
    assert pair.target.stats().rows <= 3, "the target computes nothing meanwhile"
    assert pair.until("answer") == alone(llama)[0]


def test_a_target_that_asks_late_gets_what_is_cached(llama, pairs) -> None:
    pair = Pair(llama)
    pairs.append(pair)
    handover = pair.handover()
    pair.prefill(handover)
    pair.until("prefill")
    pair.ask(pair.target, "answer", handover)
    assert pair.until("answer") == alone(llama)[0] and pair.received() == 44


def test_only_what_the_target_lacks_is_sent(llama, pairs) -> None:
    pair = Pair(llama)
    pairs.append(pair)
    pair.ask(pair.target, "before", prompt=PROMPT[:22])
    pair.until("before")
    handover = pair.handover()
    pair.ask(pair.target, "answer", handover)
    pair.prefill(handover)
    assert pair.until("prefill", "answer") == alone(llama)[0]
    assert pair.source.connector.stats.pages_sent == 11 - 22 // 4


def test_others_go_on_while_a_request_waits_for_its_pages(llama, pairs) -> None:
    pair = Pair(llama)
    pairs.append(pair)
    (other,) = prompts(20, seed=5)
    pair.ask(pair.target, "other", prompt=other)
    pair.ask(pair.target, "answer", pair.handover())
    assert pair.until("other") == alone(llama, prompt=other)[0]
    assert not pair.said["answer"], "its source has not been asked to compute anything"
    pair.target.abort("answer")
    pair.source.connector.close()


def test_a_source_that_is_silent_is_not_waited_for_longer_than_said(llama, pairs) -> None:
    pair = Pair(llama)
    pairs.append(pair)
    pair.ask(pair.target, "answer", pair.handover(timeout=0.05))
    assert pair.until("answer") == alone(llama)[0]
    assert pair.target.stats().handovers.timed_out == 1 and pair.received() == 0


def test_a_source_that_dies_half_way_leaves_what_came(llama, pairs) -> None:
    pair = Pair(llama, "tcp")
    pairs.append(pair)
    handover = pair.handover()
    pair.ask(pair.target, "answer", handover)
    pair.prefill(handover)
    while pair.target.connector.stats.pages_received < 4:
        pair.step()
    pair.cores.remove(pair.source)
    pair.source.connector.close()
    assert pair.until("answer") == alone(llama)[0]
    assert pair.target.stats().handovers.peers_lost == 1


def test_a_prefill_that_is_aborted_is_told(llama, pairs) -> None:
    pair = Pair(llama)
    pairs.append(pair)
    handover = pair.handover()
    pair.ask(pair.target, "answer", handover)
    pair.prefill(handover)
    while pair.target.connector.stats.pages_received < 2:
        pair.step()
    pair.source.abort("prefill")
    assert pair.until("answer") == alone(llama)[0]


def test_a_prefill_that_is_refused_is_told(llama, pairs) -> None:
    pair = Pair(llama, max_waiting=1)
    pairs.append(pair)
    handover = pair.handover()
    pair.ask(pair.target, "answer", handover)
    pair.ask(pair.source, "other", prompt=prompts(20, seed=5)[0])
    with pytest.raises(OverloadedError):
        pair.prefill(handover)
    assert pair.until("answer") == alone(llama)[0] and pair.received() == 0


def test_a_failed_step_at_the_source_hands_over_nothing_of_it(llama, pairs) -> None:
    pair = Pair(llama)
    pairs.append(pair)
    handover = pair.handover()
    pair.ask(pair.target, "answer", handover)
    pair.prefill(handover)
    while pair.target.connector.stats.pages_received < 2:
        pair.step()
    submit, pair.source.executor.submit = pair.source.executor.submit, None  # the next step fails
    pair.finish |= {event.request: event.finish for event in pair.source.step() if event.finish}
    assert pair.finish == {"prefill": FinishReason.ERROR}
    pair.source.executor.submit = submit
    assert pair.until("answer") == alone(llama)[0]


def test_a_running_request_goes_on_elsewhere_from_its_pages(llama, pairs) -> None:
    """Live migration: what the source has of prompt and answer goes over while it draws on; then tokens follow."""
    pair = Pair(llama)
    pairs.append(pair)
    pair.ask(pair.source, "r", params=SEEDED)
    while len(pair.said["r"]) < 6:
        pair.step()
    copied = pair.said["r"][:6]
    pair.ask(pair.target, "copy", pair.handover(waits=False), ALONE, prompt=PROMPT + copied)
    pair.until("copy")
    assert pair.received() == 48
    pair.source.abort("r")
    drawn = list(pair.said["r"])
    if len(drawn) < 12:
        before = pair.target.stats().rows
        pair.ask(pair.target, "rest", params=SEEDED, outputs=drawn)
        assert drawn + pair.until("rest") == alone(llama, SEEDED)[0]
        assert pair.target.stats().rows - before < 12 + 4, "nothing that was handed over is computed again"


def test_what_a_source_does_not_have_is_not_waited_for_in_a_migration(llama, pairs) -> None:
    pair = Pair(llama)
    pairs.append(pair)
    pair.ask(pair.target, "answer", pair.handover(waits=False))
    assert pair.until("answer") == alone(llama)[0]
    assert pair.target.stats().handovers.timed_out == 0


def test_branches_of_a_request_share_what_is_handed_over(llama, pairs) -> None:
    pair = Pair(llama)
    pairs.append(pair)
    params = SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=8, ignore_eos=True)
    handover = pair.handover()
    pair.target.submit(Request(id="two", prompt=PROMPT, params=params, handover=handover))
    pair.prefill(handover)
    found: dict[int, list[int]] = {0: [], 1: []}
    while any(len(tokens) < 8 for tokens in found.values()):
        for core in pair.cores:
            for event in core.step() if core.busy else ():
                if event.request == "two":
                    found[event.branch] += event.tokens
    assert list(found.values()) == alone(llama, params) and pair.received() >= 44
