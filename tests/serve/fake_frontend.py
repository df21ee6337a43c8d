"""A frontend without an engine: bytes are tokens, answers are a fixed text, and the prompt may ask for trouble.

The last word of a prompt commands it: `hang`, `boom`, `late-boom`, `overloaded`, `dead`, `aborted`, `burst`.
"""

from __future__ import annotations

import asyncio
import codecs
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

from quire.engine.text_input import branches_of, chunked
from quire.text.call_formats.hermes_calls import HERMES
from quire.text.reasoning_formats import THINK, ReasoningFormat
from quire.text.text_model import TextModel
from quire.types.beam import BeamParams
from quire.types.blend import Blend, BlendParams
from quire.types.counts import Counts
from quire.types.errors import (
    ContextLengthError,
    EngineDeadError,
    InputError,
    ModelNotFoundError,
    OverloadedError,
    QuireError,
)
from quire.types.events import EngineStats
from quire.types.grammar import GrammarSpec
from quire.types.membership import ReplicaView
from quire.types.messages import AdapterInfo, EngineInfo
from quire.types.outputs import Delta
from quire.types.plan import TokenLogprobs
from quire.types.request import FinishReason, Request
from quire.types.sampling_params import SamplingParams
from quire.types.timeline import Timeline
from quire.types.view import EngineView, LiveSequence, PrefixNode, TierPages

EOS = 256
VOCAB = 257
CONTEXT = 512


class FakeTokenizer:
    vocab_size = VOCAB
    named = {"eos_token": "<eos>"}
    special_ids = eos_ids = frozenset({EOS})

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("latin-1")

    def up_to(self, most: int) -> FakeTokenizer:
        return self

    bos_id = None
    names: dict[str, int] = {}  # ids that tokens of these names would have

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def encode_on(self, text: str, parse_special: bool = True) -> list[int]:
        return self.encode(text)

    def token_id(self, token: str) -> int | None:
        return self.names.get(token)

    def covered(self, ids: list[int], text: str) -> tuple[int, int]:
        """Tokens are bytes here, so characters that survived decoding are covered by theirs."""
        count = min(len(ids), len(text.encode()))
        whole = bytes(i % 256 for i in ids[:count]).decode("utf-8", "ignore")
        return (count, len(text)) if whole == text else (0, 0)

    def token_bytes(self, token: int) -> bytes:
        return b"<eos>" if token == EOS else bytes([token])

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        kept = [t for t in tokens if not (skip_special_tokens and t == EOS)]
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")


class FakeText:
    answer_reader, reasoning_reader = TextModel.answer_reader, TextModel.reasoning_reader
    hidden_marks, _end, thought = TextModel.hidden_marks, TextModel._end, TextModel.thought
    answer_lead = ""

    def __init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        self.threads: set[str] = set()  # where templates were rendered
        self.rendered: list[dict[str, Any]] = []  # what they were given
        self.tool_format = HERMES
        self.reasons = False
        self.template = "{{ messages }}"

    def encode_chat(self, messages: list[dict[str, Any]], /, *, prefix: str = "", **how: Any) -> list[int]:
        return self.tokenizer.encode(self.render_chat(messages, **how) + prefix)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        self.threads.add(threading.current_thread().name)
        self.rendered.append({"messages": messages, "tools": tools, **variables})
        turns = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return turns + ("assistant: " if add_generation_prompt else "")

    @property
    def reasoning(self) -> ReasoningFormat | None:
        return THINK if self.reasons else None

    def special_id(self, token: str) -> int | None:
        return None


class FakeClient:
    info = EngineInfo(
        model="fake", max_model_len=CONTEXT, vocab_size=VOCAB, pages=64, page_size=16, max_batch_tokens=512, depth=1,
        device="cpu", dtype="float32", reasons=[], priorities=True,
    )  # fmt: skip

    def __init__(self) -> None:
        self.alive = True
        self.adapters: list[AdapterInfo] = []
        self.closed = threading.Event()
        self.ended = asyncio.Event()

    async def replicas(self) -> list[ReplicaView]:
        return [
            ReplicaView(
                id="replica-0", pid=1, host="here", role="both", state="ready", running=0, waiting=0, restarts=0
            )
        ]

    async def stats(self) -> EngineStats:
        if not self.alive:
            raise EngineDeadError("the engine stopped")
        return EngineStats(running=3, waiting=2, pages_total=64, pages_used=16, prompt_tokens=100, cached_tokens=25)

    async def load_adapter(self, name: str, path: str) -> None:
        raise InputError("this engine has no room for adapters")

    async def unload_adapter(self, name: str) -> None:
        raise ModelNotFoundError(f"no adapter {name!r} is loaded")

    async def view(self) -> EngineView:
        tier = TierPages("device", total=64, used=16, cached=0, pages_per_cell=1, cells=[3] * 16 + [0] * 48)
        running = LiveSequence("r", 0, "running", 1.0, 100, 100, 3, 200, 0, 16)
        return EngineView(
            now=1.0, stats=await self.stats(), slots=8, max_batch_tokens=512, page_size=16, sequences=[running],
            owners=["r/0"], tiers=[tier], prefixes=[PrefixNode(-1, 2, 1, 0)], steps=[(1, 100), (1, 1)],
        )  # fmt: skip

    async def timelines(self, request_id: str) -> list[Timeline]:
        return []

    def trouble(self) -> str | None:
        return None if self.alive else "the engine stopped"

    async def lost(self) -> QuireError:
        await asyncio.Event().wait()
        raise AssertionError("an event that nobody sets was set")

    async def close(self) -> None:
        self.closed.set()
        self.ended.set()


class FakeFrontend:
    model_name = "org/fake"

    def __init__(self) -> None:
        self.client = FakeClient()
        self.text = FakeText()
        self.requests: list[Request] = []
        self.open = 0
        self.says: str | list[str] | None = None  # the answer, instead of the fixed one; or one after another
        self.aborted = threading.Semaphore(0)
        self.hanging = threading.Semaphore(0)

    def check_grammar(self, grammar: GrammarSpec) -> None:
        pass

    def prepare(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str = "",
        blend: BlendParams | Blend | None = None,
        prediction: Sequence[int] = (),
    ) -> Request:
        prompt, chunks = chunked(prompt, blend, self.text)  # type: ignore[arg-type, assignment]
        tokens = self.text.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not tokens:
            raise InputError("the prompt is empty", param="prompt")
        if bad := [token for token in tokens if not 0 <= token < VOCAB]:
            raise InputError(f"token id {bad[0]} is outside the vocabulary of {VOCAB}", param="prompt")
        if len(tokens) >= CONTEXT:
            raise ContextLengthError(f"the prompt has {len(tokens)} tokens but the context holds {CONTEXT}")
        params.check_vocabulary(VOCAB)
        params, keep = branches_of(params)
        request = Request(id=request_id or "r", prompt=tokens, params=params, priority=priority, salt=salt, keep=keep)
        request.blend, request.prediction = chunks, list(prediction)
        self.requests.append(request)
        return request

    def prepare_beam(self, prompt: str | list[int], beam: BeamParams, **where: Any) -> Request:
        params = SamplingParams(n=beam.n, temperature=0, max_tokens=beam.max_tokens)
        request = self.prepare(prompt, params, **where)
        request.beam = beam
        return request

    async def embed(
        self,
        prompt: str | list[int],
        pooling: str | None = None,
        normalize: bool | None = None,
        *,
        salt: str = "",
        tenant: str = "",
        lora: str = "",
    ) -> tuple[list[float], int]:
        """A vector of the prompt's bytes; what makes a prompt bad makes it bad here too."""
        tokens = [float(token) for token in self.prepare(prompt, SamplingParams(), salt=salt).prompt]
        vector = [tokens[-1] if pooling == "last" else sum(tokens) / len(tokens), float(len(tokens)), 3.0, 4.0]
        length = sum(value * value for value in vector) ** 0.5
        return [value / length for value in vector], len(tokens)

    def prepare_classes(self, prompt: str | list[int], other: str | None = None, *, most: int | None = None) -> Request:
        raise InputError("this model has no classification head: it classifies nothing")

    async def stream(self, request: Request, direct: object = None) -> AsyncIterator[list[Delta]]:
        self.open += 1
        finished = False
        try:
            async for deltas in self._answer(request):
                yield deltas
            finished = True
        finally:
            self.open -= 1
            if not finished:
                self.aborted.release()

    async def _answer(self, request: Request) -> AsyncIterator[list[Delta]]:
        words = self.text.tokenizer.decode(request.prompt).removesuffix("\nassistant: ").split()
        command = words[-1] if words else ""
        if command == "overloaded":
            raise OverloadedError("the queue is full", retry_after=2.5)
        if command == "boom":
            raise RuntimeError("secret detail")
        says = self.says.pop(0) if isinstance(self.says, list) else self.says
        steps = [list(_branch(request, branch, says)) for branch in range(request.params.n)]
        if command == "burst":
            yield [delta for branch in steps for delta in branch]
            return
        for step in range(max(map(len, steps))):
            await asyncio.sleep(0)
            if step == 2 and command == "hang":
                self.hanging.release()
                await self.client.ended.wait()
                raise EngineDeadError("the server is shutting down")
            if step == 2 and command == "late-boom":
                raise RuntimeError("secret detail")
            if step == 2 and command == "dead":
                raise EngineDeadError("the engine stopped")
            if step == 2 and command == "aborted":
                yield [Delta(finish_reason=FinishReason.ABORT)]
            yield [branch[step] for branch in steps if step < len(branch)]


def answer(params: SamplingParams, branch: int) -> str:
    """What the fake says: the same for the same seed and branch, everything the same when greedy."""
    flavour = "greedy" if params.greedy else f"{params.seed}/{branch}"
    return f"€{flavour} für uns: one two three four five six seven eight nine ten"


def _branch(request: Request, branch: int, says: str | None) -> list[Delta]:
    params = request.params
    tokens = [*(answer(params, branch) if says is None else says).encode(), *([] if params.ignore_eos else [EOS])]
    text = bytes(token for token in tokens if token != EOS).decode()
    cut = min((end for stop in params.stop if (end := text.find(stop)) >= 0), default=None)
    decoder = codecs.getincrementaldecoder("utf-8")()
    deltas: list[Delta] = []
    shown = ""
    for index, token in enumerate(tokens[: params.max_tokens or len(tokens)]):
        delta = Delta(branch=branch, token_ids=[token], text="" if token == EOS else decoder.decode(bytes([token])))
        if params.logprobs is not None:
            delta.logprobs = [_scores(token, params.logprobs)]
        cached = 0 if index else len(request.prompt) // 16 * 16
        delta.counts = Counts(cached, drafted=index % 3, accepted=index % 3 and 1)
        if index == 0 and params.prompt_logprobs is not None and branch == 0:
            delta.prompt_logprobs = [_scores(token, params.prompt_logprobs) for token in request.prompt[1:]]
        deltas.append(delta)
        if cut is not None and len(shown) + len(delta.text) > cut:
            delta.text = delta.text[: cut - len(shown)]
            delta.finish_reason = FinishReason.STOP
            delta.stop_reason = next(stop for stop in params.stop if text.startswith(stop, cut))
            return deltas
        shown += delta.text
    deltas[-1].finish_reason = FinishReason.STOP if deltas[-1].token_ids == [EOS] else FinishReason.LENGTH
    return deltas


def _scores(token: int, top: int) -> TokenLogprobs:
    """The token is the likeliest, its successors follow; the last of them is impossible."""
    ids = [(token + step) % 256 for step in range(top)]
    return TokenLogprobs(token, -0.5, 1, ids, [-0.5 - step if step < 4 else float("-inf") for step in range(top)])
