"""Runs a case of the combination fuzzer: all its requests together on its engine, each alone on a plain one, and says
where they differ.

    python tests/engine/fuzz_runner.py 17            the case of one seed, in full
    python tests/engine/fuzz_runner.py 1000 3000     those of many; ends at the first that fails
"""

from __future__ import annotations

import dataclasses
import logging
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from fuzz_cases import Asked, Case, make_case
from fuzz_models import FuzzModel, fuzz_models
from launching_ahead import LaunchingAhead
from msgspec.structs import replace

from quire.assets import resolve
from quire.engine.collector import Collector
from quire.engine.core import EngineCore
from quire.engine.text_input import prepare, prepare_beam, prepare_embedding
from quire.engine.text_output import RequestText, pooled_in
from quire.runtime.executors.local_executor import LocalExecutor
from quire.text import TextModel, vocabulary_of
from quire.types.config import EngineOptions
from quire.types.errors import ContextLengthError, InputError
from quire.types.messages import EngineInfo
from quire.types.outputs import CompletionOutput, RequestOutput
from quire.types.pooling import unit
from quire.types.request import FinishReason, Request

MAX_STEPS = 6000  # of a case; the longest take some hundred
NEAR = 2e-3  # of log-probabilities and scores
TIE = 1e-4  # of logits: a token that so little a bias turns into another is a near-tie
HOLD = 60.0  # of sessions, in seconds of the fake clock


class Answer:
    """What came of one request."""

    def __init__(self, request: Request, text: TextModel):
        self.request = request  # tokens drawn elsewhere among it
        self.view = RequestText(request, text)
        self.collected = Collector(request, None)
        self.embedding: list[float] | None = None
        self.aborted = False
        self.done = False

    @property
    def output(self) -> RequestOutput:
        """As it is so far, where it was aborted."""
        return self.collected.output if self.aborted else self.collected.result()


class Engine:
    """An engine whose clock is its own, and one request after another or many at once in it."""

    def __init__(self, options: dict[str, Any], seed: int = 0, check: bool = True):
        """`check`: look at all invariants after every step."""
        self._check = check
        self.options = EngineOptions.of(**options)
        self.text = _text(options["model"])
        self._rng, self._now = random.Random(seed), 0.0
        executor = (LaunchingAhead if seed % 2 else LocalExecutor)(
            self.options,
            resolve(options["model"]).open(),
            vocabulary=lambda size: vocabulary_of(self.text.tokenizer, size),
        )
        self.core = EngineCore(self.options, executor, clock=self._clock)
        capacity = self.core.capacity
        self.info = EngineInfo(
            model="fuzz", max_model_len=capacity.longest, stream_len=capacity.max_model_len,
            vocab_size=executor.model.spec.vocab_size, pages=capacity.pages - 1,
            page_size=self.options.cache.page_size, max_batch_tokens=capacity.max_batch_tokens, depth=capacity.depth,
            device="cpu", dtype="", reasons=[], slots=capacity.slots,
            priorities=self.core.scheduler.policy.uses_priority,
        )  # fmt: skip
        self.answers: dict[str, Answer] = {}

    def _clock(self) -> float:
        self._now += self._rng.choice([1e-4, 1e-3, 1e-2, 5e-2])
        return self._now

    def request(self, asked: Asked, outputs: list[int]) -> Request:
        """As callers' requests are made, but that no grammar is tried in a process of its own."""
        where: dict[str, Any] = {
            "text": self.text, "info": self.info, "request_id": asked.id, "salt": asked.salt,
            "priority": asked.priority if self.info.priorities else 0, "lora": asked.lora,
        }  # fmt: skip
        if asked.pooling:
            return prepare_embedding(asked.prompt, asked.pooling, **where)
        if asked.beam is not None:
            return prepare_beam(asked.prompt, asked.beam, **where)
        session = {"session": asked.session, "hold": HOLD} if asked.session else {}
        made = prepare(asked.prompt, replace(asked.params, grammar=None), **where, **session)
        return replace(made, params=replace(made.params, grammar=asked.params.grammar), outputs=outputs)

    def submit(self, asked: Asked, outputs: list[int]) -> None:
        request = self.request(asked, outputs)
        request.arrival = self._now
        self.core.submit(request)
        self.answers[asked.id] = Answer(request, self.text)

    def step(self) -> None:
        self.take(self.core.step())
        self.core.settle()
        if self._check:
            self.core.scheduler.check()

    def take(self, events: list[Any]) -> None:
        for event in events:
            answer = self.answers[event.request]
            if event.finish is FinishReason.ABORT:
                continue
            assert event.finish is not FinishReason.ERROR, f"{event.request} ended with an error: {event.message}"
            if answer.request.pooling:
                answer.embedding, answer.done = unit(pooled_in(event)), True
                continue
            delta, end = answer.view.take(event)
            if end is not None:
                self.take(self.core.finish_at(event.request, event.branch, end))
            if delta is not None:
                answer.collected.add(delta)
            answer.done = not answer.view.open

    def abort(self, request: str) -> None:
        answer = self.answers[request]
        if not answer.done:
            answer.aborted = answer.done = True
            self.take(self.core.abort(request))

    def run(self, asked: list[Asked], drawn: Mapping[str, list[int]] = MappingProxyType({})) -> dict[str, Exception]:
        """All of them, each at its step; those that were refused, and why. `drawn`: tokens drawn elsewhere."""
        refused: dict[str, Exception] = {}
        waiting, aborts = sorted(asked, key=lambda one: one.at, reverse=True), dict[int, list[str]]()
        for step in range(MAX_STEPS):
            while waiting and waiting[-1].at <= step:
                one = waiting.pop()
                try:
                    self.submit(one, drawn.get(one.id, []))
                except (InputError, ContextLengthError) as error:
                    refused[one.id] = error
                    continue
                if one.abort is not None:
                    aborts.setdefault(step + one.abort, []).append(one.id)
            for request in aborts.pop(step, ()):
                self.abort(request)
            self.step()
            if not (waiting or aborts or self.core.busy) and all(answer.done for answer in self.answers.values()):
                return refused
        left = [name for name, answer in self.answers.items() if not answer.done]
        raise AssertionError(f"after {MAX_STEPS} steps {left or 'transfers'} were not done")

    def check_idle(self) -> None:
        """Nothing is left of what was asked, once sessions are over."""
        self._now += 2 * HOLD
        for _ in range(4 + self.core.capacity.depth):
            self.step()
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0), f"left over: {stats}"

    def close(self) -> None:
        self.core.close()


@cache
def _text(path: str) -> TextModel:
    return TextModel.load(resolve(path))


class Fuzzer:
    """Cases over models in a folder. Plain engines are kept: each serves many cases."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.models: dict[str, FuzzModel] = fuzz_models(folder)
        self._plain: dict[tuple[Any, ...], Engine] = {}
        self.seen: Counter[str] = Counter()  # what the cases came to

    def close(self) -> None:
        for engine in self._plain.values():
            engine.close()

    def plain(self, case: Case) -> Engine:
        """An engine with the same pages and nothing else of what makes the case's one interesting."""
        kept = ("model", "page_size", "max_model_len", "kv_dtype", "threads")
        options = {name: case.options[name] for name in (*kept, "lora") if name in case.options}
        key = tuple(options.values())
        if key not in self._plain:
            plain = {"kv_pages": 2000, "prefix_cache": False, "max_seqs": 16}
            self._plain[key] = Engine(options | plain, check=False)
        return self._plain[key]

    def run(self, seed: int) -> None:
        """Raises AssertionError, with the case and how to run it again, if it is not clean."""
        with tempfile.TemporaryDirectory(dir=self._folder) as disk:
            case = make_case(seed, self.models, disk)
            try:
                self._run(case)
            except Exception as error:
                again = f"PYTHONPATH=src python tests/engine/{Path(__file__).name} {seed}"
                why = "".join(traceback.format_exception(error))
                raise AssertionError(f"{why}\n{case}\nrun it again: {again}") from None

    def _run(self, case: Case) -> None:
        engine = Engine(case.options, case.seed)
        try:
            refused = engine.run(case.asked, self._drawn(case))
            engine.check_idle()
            self._count(engine, refused)
            for one in case.asked:
                if one.id not in refused:
                    self._compare(case, one, engine.answers[one.id])
        finally:
            engine.close()

    def _drawn(self, case: Case) -> dict[str, list[int]]:
        """What other engines are to have drawn of answers: their beginnings, but for the last token."""
        alone = {one.id: self._alone(case, one) for one in case.asked if one.resume}
        answers = {name: answer.output.outputs[0] for name, answer in alone.items() if answer is not None}
        resume = {one.id: one.resume for one in case.asked}
        return {name: answer.token_ids[:-1][: resume[name]] for name, answer in answers.items()}

    def _count(self, engine: Engine, refused: dict[str, Exception]) -> None:
        stats = engine.core.stats()
        self.seen["refused"] += len(refused)
        self.seen["requests"] += len(engine.answers)
        self.seen["aborted"] += sum(answer.aborted for answer in engine.answers.values())
        for name in ("cached_tokens", "output_tokens", "forced_tokens", "accepted_tokens", "evicted_tokens",
                     "preemptions", "swaps", "steps"):  # fmt: skip
            self.seen[name] += getattr(stats, name)
        self.seen["tier_tokens"] += sum(tier.hit_tokens for tier in stats.tiers)

    def alone(self, case: Case, asked: Asked) -> Answer:
        answer = self._alone(case, asked)
        assert answer is not None, f"alone, {asked.id} is refused"
        return answer

    def _alone(self, case: Case, asked: Asked) -> Answer | None:
        """None if it is refused."""
        engine = self.plain(case)
        engine.answers.clear()
        refused = engine.run([dataclasses.replace(asked, at=0, abort=None, session="", salt="")])
        return None if refused else engine.answers.pop(asked.id)

    def _compare(self, case: Case, asked: Asked, found: Answer) -> None:
        expected = self.alone(case, asked)
        if asked.pooling:
            if not found.aborted:
                assert found.embedding == pytest.approx(expected.embedding, abs=NEAR), f"{asked.id}: the embedding"
            return
        if found.aborted:
            self._compare_aborted(case, asked, found, expected)
            return
        if asked.beam is not None:
            _compare_beams(case, asked, found.output, expected.output)
            return
        if found.request.outputs:
            _cut(expected.output.outputs[0], found.output.outputs[0], len(found.request.outputs))
        different = _difference(found.output, expected.output, 1e-5 if case.model.exact else NEAR)
        if different and not case.model.exact and self._near_tie(case, asked, found, expected):
            self.seen["near-ties"] += 1
            return
        assert not different, f"{asked.id}: {different}"

    def _compare_aborted(self, case: Case, asked: Asked, found: Answer, expected: Answer) -> None:
        """What there is of it is how it begins."""
        for one, whole in zip(found.collected.output.outputs, expected.collected.output.outputs, strict=True):
            _cut(whole, one, len(found.request.outputs))
            same = one.token_ids == whole.token_ids[: len(one.token_ids)]
            if not same and not case.model.exact and self._near_tie(case, asked, found, expected):
                return
            assert same, f"{asked.id}: aborted after {one.token_ids}, alone {whole.token_ids}"

    def _near_tie(self, case: Case, asked: Asked, found: Answer, expected: Answer) -> bool:
        """Whether tokens differ because two of them were all but equally good: alone, a bias of next to nothing towards
        the one that was drawn draws it."""
        for mine, other in zip(found.collected.output.outputs, expected.collected.output.outputs, strict=True):
            if mine.token_ids == other.token_ids:
                continue
            pairs = enumerate(zip(mine.token_ids, other.token_ids, strict=False))
            at, tokens = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), (None, ()))
            if at is None:
                return False
            bias = dict(asked.params.logit_bias)
            for token, by in zip(tokens, (TIE, -TIE), strict=True):
                bias[token] = bias.get(token, 0.0) + by
            biased = self.alone(case, dataclasses.replace(asked, params=replace(asked.params, logit_bias=bias)))
            again = biased.collected.output.outputs[mine.index].token_ids[len(found.request.outputs) :]
            if again[: at + 1] != mine.token_ids[: at + 1]:
                return False
        return True


def _cut(whole: CompletionOutput, rest: CompletionOutput, count: int) -> None:
    """Leave of an answer what comes after so many tokens, as far as that can be told; `rest` is what was found."""
    if count:
        whole.token_ids = whole.token_ids[count:]
        whole.logprobs = whole.logprobs[count:] if whole.logprobs is not None else None
        whole.text = rest.text if whole.text.endswith(rest.text) else whole.text
        whole.counts = rest.counts  # whether a token was forced depends on where the other engine stopped


def _difference(found: RequestOutput, expected: RequestOutput, near: float) -> str:
    """What differs first; nothing: nothing does."""
    if len(found.outputs) != len(expected.outputs):
        return f"{len(found.outputs)} answers, alone {len(expected.outputs)}"
    for mine, other in zip(found.outputs, expected.outputs, strict=True):
        for name in ("index", "token_ids", "text", "finish_reason", "stop_reason", "forced_tokens"):
            if getattr(mine, name) != getattr(other, name):
                return f"{name} of answer {mine.index} is {getattr(mine, name)!r}, alone {getattr(other, name)!r}"
        if not _close(mine.logprobs, other.logprobs, near):
            return f"log-probabilities of answer {mine.index} are {mine.logprobs}, alone {other.logprobs}"
        if mine.logprobs is not None and [entry.token for entry in mine.logprobs] != mine.token_ids:
            return f"log-probabilities of answer {mine.index} are of other tokens than its own"
    if not _close(found.prompt_logprobs, expected.prompt_logprobs, near):
        return f"prompt log-probabilities are {found.prompt_logprobs}, alone {expected.prompt_logprobs}"
    return ""


def _close(found: list[Any] | None, expected: list[Any] | None, near: float) -> bool:
    if found is None or expected is None:
        return found is expected
    if [entry.token for entry in found] != [entry.token for entry in expected]:
        return False
    numbers = [[x for entry in some for x in (entry.logprob, *entry.top_logprobs)] for some in (found, expected)]
    return len(numbers[0]) == len(numbers[1]) and numbers[0] == pytest.approx(numbers[1], abs=near)


def _compare_beams(case: Case, asked: Asked, found: RequestOutput, expected: RequestOutput) -> None:
    scores: list[list[float | None]] = [[one.score for one in some.outputs] for some in (found, expected)]
    assert scores[0] == pytest.approx(scores[1], abs=NEAR), f"{asked.id}: scores of beams"

    def told(outputs: list[CompletionOutput]) -> list[Any]:
        return [(one.token_ids, one.finish_reason, one.text) for one in outputs]

    if case.model.exact:  # else two scores may be all but equal
        assert told(found.outputs) == told(expected.outputs), f"{asked.id}: answers of beams"


def main(first: int, end: int | None = None) -> None:
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder))
        if end is None:
            print(make_case(first, fuzzer.models, folder))
        began, failed = time.monotonic(), []
        for seed in range(first, first + 1 if end is None else end):
            try:
                fuzzer.run(seed)
            except AssertionError as error:
                failed.append(seed)
                print(error, flush=True)
            if seed % 100 == 99:
                print(f"up to {seed}: {len(failed)} failed", flush=True)
        print(f"{time.monotonic() - began:.1f} s, {dict(fuzzer.seen)}, failed: {failed}")
        fuzzer.close()
        sys.exit(bool(failed))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
