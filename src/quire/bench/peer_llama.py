"""llama.cpp at work: `python -m quire.bench.peer_llama`, one JSON job a line in, one JSON answer a line out.

Token-level work through the low-level interface of llama-cpp-python, as its author would run it for speed: prompts
are computed together, then one token of every stream in each `llama_batch`; a prefix common to all is computed once
and copied. A process of its own, so that its threads and ours never meet, and its crash is a message.

Refuses to know: Quire's engine, and how the two are compared.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.bench.offline import Trace

BATCH = 2048  # tokens handed over at once; the library cuts them into pieces of 512
GRAIN = 256  # cells are given to a stream in multiples of this


class Quantise(msgspec.Struct, tag=True):
    source: str
    target: str
    kind: str  # q4_0, q8_0, ...


class Load(msgspec.Struct, tag=True):
    """A model with room for `streams` of `length` tokens; `unified`: one buffer of cells for all streams; `flash`:
    attention in one fused operation."""

    model: str
    threads: int
    streams: int
    length: int
    unified: bool
    flash: bool


class Work(msgspec.Struct, tag=True):
    jobs: list[tuple[list[int], int]]
    prefix: int = 0  # tokens all prompts begin with, to be computed once


class Answer(msgspec.Struct):
    seconds: float = 0.0
    traces: list[Trace] = []
    about: str = ""
    error: str = ""


class Stream:
    def __init__(self, trace: Trace, prompt: list[int], wanted: int, position: int):
        self.trace, self.wanted, self.position = trace, wanted, position
        self.left = prompt[position:]  # what is to be computed next: of the prompt, then the last token drawn

    def take(self, token: int, now: float) -> bool:
        """Whether that was the last one."""
        self.trace.tokens.append(token)
        self.trace.times.append(now)
        self.left, self.trace.end = [token], now
        return len(self.trace.tokens) >= self.wanted


class Llama:
    """One loaded model and context at a time."""

    def __init__(self) -> None:
        self.lib: Any = importlib.import_module("llama_cpp")
        self._quiet = self.lib.llama_log_callback(lambda level, text, data: None)  # kept alive: it is called later
        self.lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self.lib.llama_backend_init()
        self._batch = self.lib.llama_batch_init(BATCH, 0, 1)
        self._path, self._model, self._context = "", None, None
        self._streams = self._vocab = 0

    def about(self) -> str:
        return f"llama-cpp-python {self.lib.__version__}; {self.lib.llama_print_system_info().decode()}"

    def quantise(self, ask: Quantise) -> None:
        params = self.lib.llama_model_quantize_default_params()
        params.ftype = getattr(self.lib, f"LLAMA_FTYPE_MOSTLY_{ask.kind.upper()}")
        params.allow_requantize = True
        scratch = f"{ask.target}.{os.getpid()}"
        try:
            if self.lib.llama_model_quantize(ask.source.encode(), scratch.encode(), ctypes.byref(params)):
                raise RuntimeError(f"llama.cpp could not requantise {ask.source} to {ask.kind}")
            os.replace(scratch, ask.target)
        finally:
            Path(scratch).unlink(missing_ok=True)

    def load(self, ask: Load) -> None:
        if self._context is not None:
            self.lib.llama_free(self._context)
        if ask.model != self._path:
            if self._model is not None:
                self.lib.llama_model_free(self._model)
            params = self.lib.llama_model_default_params()
            params.n_gpu_layers = 0
            self._model = self.lib.llama_model_load_from_file(ask.model.encode(), params)
            if not self._model:
                raise RuntimeError(f"llama.cpp could not load {ask.model}")
            self._path = ask.model
        room = self.lib.llama_context_default_params()
        room.n_ctx = ask.streams * -(-ask.length // GRAIN) * GRAIN
        room.n_batch, room.n_seq_max, room.kv_unified = BATCH, ask.streams, ask.unified
        room.flash_attn_type = int(ask.flash)
        room.n_threads = room.n_threads_batch = ask.threads
        self._context = self.lib.llama_init_from_model(self._model, room)
        if not self._context:
            raise RuntimeError(f"llama.cpp could not make room for {ask.streams} streams of {ask.length} tokens")
        self._streams = ask.streams
        self._vocab = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self._model))

    def run(self, work: Work) -> Answer:
        memory = self.lib.llama_get_memory(self._context)
        self.lib.llama_memory_clear(memory, True)
        traces = [Trace(prompt=len(prompt), tokens=[], times=[]) for prompt, _ in work.jobs]
        waiting = deque(zip(traces, work.jobs, strict=True))
        free, active = list(range(self._streams)), dict[int, Stream]()
        began = time.perf_counter()
        if work.prefix:
            head = Stream(Trace(prompt=0), work.jobs[0][0][: work.prefix], 1, 0)
            while head.left:
                self._step({0: head})
            for slot in free[1:]:
                self.lib.llama_memory_seq_cp(memory, 0, slot, -1, -1)
        while waiting or active:
            while waiting and free:
                trace, (prompt, wanted) = waiting.popleft()
                active[free.pop(0)] = Stream(trace, prompt, wanted, work.prefix)
            drawn = self._step(active)
            now = time.perf_counter() - began
            for slot, token in drawn.items():
                if active[slot].take(token, now):
                    del active[slot]
                    free.append(slot)
                    if waiting:
                        self.lib.llama_memory_seq_rm(memory, slot, work.prefix, -1)
        return Answer(seconds=time.perf_counter() - began, traces=traces)

    def _step(self, active: dict[int, Stream]) -> dict[int, int]:
        """Prompts while there are any, then a token of every stream; greedy draws by stream."""
        prompts = {slot: s for slot, s in active.items() if not s.trace.tokens}
        batch, count, drawing = self._batch, 0, []
        for slot, stream in (prompts or active).items():
            piece = stream.left[: BATCH - count]
            stream.left = stream.left[len(piece) :]
            for token in piece:
                batch.token[count], batch.pos[count], batch.logits[count] = token, stream.position, 0
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, slot
                stream.position += 1
                count += 1
            if piece and not stream.left:
                batch.logits[count - 1] = 1
                drawing.append(slot)
        batch.n_tokens = count
        if code := self.lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode gave {code}")
        if not drawing:
            return {}
        logits = np.ctypeslib.as_array(self.lib.llama_get_logits(self._context), shape=(len(drawing), self._vocab))
        return dict(zip(drawing, logits.argmax(-1).tolist(), strict=True))


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the library prints is no answer
    try:
        llama = Llama()
    except ImportError as error:
        answers.write(msgspec.json.encode(Answer(error=f"cannot import llama_cpp: {error}")) + b"\n")
        return
    answers.write(msgspec.json.encode(Answer(about=llama.about())) + b"\n")
    answers.flush()
    decoder = msgspec.json.Decoder(Quantise | Load | Work)
    for line in sys.stdin.buffer:
        ask, answer = decoder.decode(line), Answer()
        try:
            if isinstance(ask, Quantise):
                llama.quantise(ask)
            elif isinstance(ask, Load):
                llama.load(ask)
            else:
                answer = llama.run(ask)
        except RuntimeError as error:
            answer = Answer(error=str(error))
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
