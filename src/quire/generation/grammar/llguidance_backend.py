"""Grammars by llguidance: JSON schemas, regular expressions, choices and Lark grammars against a model's own tokens.

Masks are computed lazily from an Earley parser over a derivative-based lexer, so compiling is quick, and what a grammar
may cost is bounded by what `cost_limits` counts and the limits below; grammars of clients were compiled before, by a
process that can be killed (`sandbox_client`). Compiling walks the grammar recursively, so it happens on a stack deep
enough for any grammar of the permitted size.

Knows: llguidance (imported when first used). Refuses to know: torch, slots, requests.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from quire.generation.grammar.cost_limits import cost_excess
from quire.generation.grammar.gbnf import GbnfError, lark_of
from quire.generation.grammar.plain_reasons import plain_reason
from quire.generation.grammar.schema_sources import (
    ESCAPES,
    JSON_STYLE,
    SchemaRefusal,
    as_is,
    in_plain_keywords,
    with_spellable_classes,
)
from quire.generation.grammar.trial import openings, strings
from quire.types.errors import InputError, NotInstalledError, OverloadedError
from quire.types.grammar import GrammarSpec, TokenMasks, Vocabulary
from quire.types.installed import too_old
from quire.types.memory_use import usable_cores
from quire.types.seams import Grammar

T = TypeVar("T")

MAX_COMPILE_CPU_S = 10.0  # what takes longer is refused
MAX_WAIT_RATIO = 1.7  # of wall-clock to CPU seconds, on a machine that is busy otherwise
POLL_INTERVAL_S = 0.02
MAX_COMPILERS = 4  # threads at once; an abandoned one counts until it ends
STACK_BYTES = 512 << 20  # bytes of address space, touched only as far as a grammar is nested
JSON_EXACTLY: Any = {"json_allowed_escapes": ESCAPES, "lenient": False, "coerce_one_of": False}
LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}
MAX_TRIAL_S = 0.2  # for the strings of a grammar, one by one
MAX_THREADS = 16
MAX_LOCKED_S = 0.003  # a matcher whose masks take longer is moved without the interpreter's lock


class LLGuidanceBackend:
    """The GrammarBackend of llguidance."""

    def __init__(self) -> None:
        self._tokenizers: WeakKeyDictionary[Vocabulary, Any] = WeakKeyDictionary()
        self.threads = max(2, min(MAX_THREADS, usable_cores() * 3 // 4))

    def tokenizer(self, vocabulary: Vocabulary) -> Any:
        tokenizer = self._tokenizers.get(vocabulary)
        if tokenizer is None:
            tokenizer = self._tokenizers[vocabulary] = make_tokenizer(vocabulary)
        return tokenizer

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> LLGuidanceGrammar:
        tokenizer = self.tokenizer(vocabulary)
        return _run_on_deep_stack(lambda: compile_grammar(spec, tokenizer), MAX_COMPILE_CPU_S)

    def accept_each(self, grammars: Sequence[Grammar], tokens: Sequence[int]) -> None:
        together = []
        for grammar, token in zip(grammars, tokens, strict=True):
            if isinstance(grammar, LLGuidanceGrammar):
                together.append((grammar.matcher, token))
            else:
                grammar.accept([token])
        if len(together) == 1:
            together.append((_no_matcher(), 0))
        if together:
            self._executor.consume_token_par(together)

    def fill_each(self, grammars: Sequence[Grammar], size: int) -> TokenMasks:
        matched = [(at, grammar) for at, grammar in enumerate(grammars) if isinstance(grammar, LLGuidanceGrammar)]
        words = np.empty((len(grammars), matched[0][1].words if matched else -(-size // 4)), np.int32)
        if matched:
            places = [(grammar.matcher, at) for at, grammar in matched]
            self._executor.unsafe_compute_mask_ptr(places, words.ctypes.data, words[0].nbytes, len(words))
        rows = words.view(np.uint8)[:, :size]
        for grammar, row in zip(grammars, rows, strict=True):
            if not isinstance(grammar, LLGuidanceGrammar):
                grammar.fill(row)
        return rows

    @cached_property
    def _executor(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor(num_threads=self.threads)


def compile_unchecked(spec: GrammarSpec, tokenizer: Any) -> tuple[LLGuidanceGrammar, GrammarSpec]:
    """The grammar, and the form in which it was taken."""
    reason = ""
    for source in sources(spec):
        matcher = _matcher(_behind(spec.lead, _grammar(source)), tokenizer)
        if not matcher.is_error():
            return LLGuidanceGrammar(matcher, -(-tokenizer.vocab_size // 32)), source
        reason = matcher.get_error()
    raise _refusal(spec, reason)


def _behind(lead: str, grammar: str) -> str:
    """A grammar in llguidance's notation behind an expression in Lark's."""
    if not lead:
        return grammar
    parts = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    named = [{**part, "name": "answer"} if at == 0 else part for at, part in enumerate(parts)]
    return json.dumps({"grammars": [{"lark_grammar": f"start: {lead} @answer"}, *named]})


def _matcher(grammar: str, tokenizer: Any) -> Any:
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))


def sources(spec: GrammarSpec) -> Iterator[GrammarSpec]:
    """The grammar in forms that the compiler may take, the simplest first."""
    if spec.kind == "gbnf":
        try:
            spec = GrammarSpec("lark", lark_of(spec.source))
        except GbnfError as error:
            raise _refusal(spec, str(error)) from None
    if reason := cost_excess(spec):
        raise _refusal(spec, reason)
    if spec.kind not in ("json_schema", "lark"):
        yield spec
        return
    tried = None
    for write in (as_is, in_plain_keywords):
        try:
            source = write(spec)
        except SchemaRefusal as error:
            raise _refusal(spec, str(error)) from None
        if source is not None and source != tried:
            if reason := cost_excess(source):
                raise _refusal(spec, reason)
            yield source
        tried = source


def compile_grammar(spec: GrammarSpec, tokenizer: Any) -> LLGuidanceGrammar:
    """After a trial: too many ways to begin, or to go on from the beginning of a string, show only when tried."""
    grammar, source = compile_unchecked(replace(spec, lead=""), tokenizer)
    ends = time.thread_time() + MAX_TRIAL_S
    for opening in openings(source):
        if error := _first_mask_error(grammar.fork(), tokenizer.tokenize_str(opening)):
            raise _refusal(spec, error)
    for schema in strings(source):
        if time.thread_time() > ends:
            break
        alone = LLGuidanceGrammar(_matcher(_grammar(GrammarSpec("json_schema", schema)), tokenizer), grammar.words)
        if error := _first_mask_error(alone, tokenizer.tokenize_str('"')):
            raise _refusal(spec, error)
    return compile_unchecked(spec, tokenizer)[0] if spec.lead else grammar


def _first_mask_error(grammar: LLGuidanceGrammar, opening: list[int]) -> str:
    """What goes wrong in the first masks after an opening, if it is allowed at all."""
    row = np.empty(grammar.words * 4, np.uint8)
    grammar.fill(row)
    for token in opening:
        if not row[token // 8] >> token % 8 & 1:
            return ""
        grammar.accept([token])
    if forced := grammar.forced():
        grammar.accept(forced)
    if not grammar.done:
        grammar.fill(row)
    return grammar.error


class LLGuidanceGrammar:
    def __init__(self, matcher: Any, words: int):
        self.matcher = matcher
        self._slow = False
        self.words = words  # of 32 bits in a mask

    @property
    def error(self) -> str:
        return plain_reason(self.matcher.get_error()) if self.matcher.is_error() else ""

    @property
    def done(self) -> bool:
        return bool(self.matcher.is_stopped())

    def fill(self, row: npt.NDArray[np.uint8]) -> None:
        words = np.empty(self.words, np.int32)
        began = time.perf_counter()
        self.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._slow = time.perf_counter() - began > MAX_LOCKED_S
        row[:] = words.view(np.uint8)[: len(row)]

    def accept(self, tokens: Sequence[int]) -> None:
        if not self._slow:
            self.matcher.consume_tokens(list(tokens))
            return
        for token in tokens:
            _unlocked().consume_token_par([(self.matcher, token), (_no_matcher(), token)])

    def forced(self) -> list[int]:
        return [] if self.done else self.matcher.compute_ff_tokens()

    def rollback(self, count: int) -> None:
        self.matcher.rollback(count)

    def fork(self) -> LLGuidanceGrammar:
        return LLGuidanceGrammar(self.matcher.deep_copy(), self.words)


@cache
def _unlocked() -> Any:
    from llguidance import LLExecutor

    return LLExecutor(num_threads=2)


_company = threading.local()


def _no_matcher() -> Any:
    """One that fails at once, for company: a single matcher is moved under the interpreter's lock. No two threads may
    use the same."""
    from llguidance import LLMatcher, LLTokenizer

    if not hasattr(_company, "matcher"):
        _company.matcher = LLMatcher(LLTokenizer("byte"), "", log_level=0)
    return _company.matcher


class _Tokens:
    """A vocabulary in the form llguidance asks for."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary):
        self._encode = vocabulary.encode
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = sorted(vocabulary.special)
        self.ends = list(vocabulary.ends)
        if not self.ends:  # the library needs one: an id that the model does not have
            self.ends = [len(self.tokens)]
            self.special_token_ids += self.ends
            self.tokens.append(b"<end>")
        self.eos_token_id = self.ends[0]

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "replace"))


def make_tokenizer(vocabulary: Vocabulary) -> Any:
    if reason := too_old().get("llguidance"):
        raise NotInstalledError(f"grammars cannot be used: {reason}")
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        raise NotInstalledError(f"grammars need the llguidance package: pip install llguidance ({error})") from error
    tokens = _Tokens(vocabulary)
    return LLTokenizer(TokenizerWrapper(tokens), eos_token=tokens.ends)


def _grammar(spec: GrammarSpec) -> str:
    """The specification in llguidance's notation."""
    from llguidance import LLMatcher

    if spec.kind in ("json_schema", "lark"):
        spec = with_spellable_classes(spec)
    if spec.kind in ("json_object", "json_schema"):
        source = spec.source if spec.kind == "json_schema" else '{"type": "object"}'
        return LLMatcher.grammar_from_json_schema(source, defaults=JSON_STYLE, overrides=JSON_EXACTLY)
    if spec.kind in ("choice", "each"):
        # One lexeme, not one rule each: the lexer takes many thousands at once, the parser does not.
        words = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in _choices(spec))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {words}")
    return (LLMatcher.grammar_from_regex if spec.kind == "regex" else LLMatcher.grammar_from_lark)(spec.source)


def _choices(spec: GrammarSpec) -> list[str]:
    try:
        choices = json.loads(spec.source)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise _refusal(spec, "it must be a list of one or more strings, none of them empty")
    return choices


def _refusal(spec: GrammarSpec, reason: str) -> InputError:
    reason = plain_reason(reason)
    return InputError(f"the {spec.kind} grammar cannot be used: {reason}", param="grammar", code="invalid_grammar")


_spawning = threading.Lock()  # the stack size of new threads is one setting for the whole process
_compiling = threading.Semaphore(MAX_COMPILERS)


def _run_on_deep_stack(work: Callable[[], T], seconds: float) -> T:
    done: Future[T] = Future()
    slots = _compiling

    def body() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
        finally:
            slots.release()

    began = time.monotonic()
    if not slots.acquire(timeout=seconds):
        raise OverloadedError("too many large grammars are being compiled; retry shortly")
    thread = threading.Thread(target=body, name="quire-grammar", daemon=True)  # nothing waits for an abandoned one
    with _spawning:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    while True:
        try:
            return done.result(POLL_INTERVAL_S)
        except TimeoutError:
            waited = time.monotonic() - began
        if done.done():  # and may have ended with an error of that very kind
            return done.result()
        if _cpu_seconds(thread, waited) > seconds:
            raise InputError(
                f"the grammar takes longer than {seconds:g} s to compile; make it smaller",
                param="grammar",
                code="invalid_grammar",
            )
        if waited > MAX_WAIT_RATIO * seconds:
            raise OverloadedError(f"no grammar was compiled within {waited:.1f} s, the machine is busy; retry shortly")


def _cpu_seconds(thread: threading.Thread, waited: float) -> float:
    """CPU seconds of a thread, where the system tells: on a busy machine, less than wall-clock time."""
    try:
        fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return waited
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
