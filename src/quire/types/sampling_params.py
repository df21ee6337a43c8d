"""Sampling parameters: what a caller may ask of the sampler, validated once, on arrival."""

from __future__ import annotations

import math

import msgspec

from quire.types.errors import InputError
from quire.types.grammar import GrammarSpec

MAX_N = 128
MAX_LOGPROBS = 64
MAX_STOPS = 64
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD = 64
LEAST_PAGES = 4  # of a KV budget: one at the beginning, one to write to, and something to choose from
SPARSE_LOCAL = 32  # tokens before a query that sparse attention always reads
EVICTION = ("sinks", "snapkv", "h2o")  # see scheduling/features/kv_eviction.py


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How to turn logits into tokens, and when to stop.

    `max_tokens=None` means "to the end of the context". `bad_words` are strings; the input processor turns
    them into `bad_token_ids` (each a sequence that must not be completed). With `allowed_token_ids` only those are
    drawn. `top_k=0` switches top-k off. Before `min_tokens` neither stop tokens nor stop strings end an answer.
    `best_of` branches are drawn, and the `n` with the best log-probability per token returned. With `kv_budget` no more
    than so many tokens keep their KV, and `kv_eviction` says which go when it is full; without, all do. With
    `sparse_pages` a query reads no more than so many pages of each KV head, all of which stay (0: all pages; None: as
    the engine was told).
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    bad_words: list[str] = []
    bad_token_ids: list[list[int]] = []
    allowed_token_ids: list[int] = []
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: GrammarSpec | None = None
    kv_budget: int | None = None
    kv_eviction: str = "sinks"
    sparse_pages: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        _within("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            _within("best_of", self.best_of, self.n, MAX_N)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _within("top_k", self.top_k, 0, 1 << 30)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("min_tokens", self.min_tokens, 0, 1 << 30)
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 1, 1 << 30)
            if self.min_tokens > self.max_tokens:
                raise InputError(
                    f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens})",
                    param="min_tokens",
                )
        if self.seed is not None:
            _within("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _within(name, value, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOPS or any(not s or len(s) > 1024 for s in self.stop):
            raise InputError(f"stop takes up to {MAX_STOPS} non-empty strings of at most 1024 characters", param="stop")
        if len(self.stop_token_ids) > MAX_STOPS:
            raise InputError(f"stop_token_ids takes at most {MAX_STOPS} ids", param="stop_token_ids")
        if max(len(self.bad_words), len(self.bad_token_ids)) > MAX_BAD_WORDS or any(not w for w in self.bad_words):
            raise InputError(f"bad_words takes at most {MAX_BAD_WORDS} non-empty words", param="bad_words")
        if any(not 0 < len(word) <= MAX_BAD_WORD for word in self.bad_token_ids):
            raise InputError(f"a bad word must have 1 to {MAX_BAD_WORD} tokens", param="bad_words")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InputError(f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens", param="logit_bias")
        for value in self.logit_bias.values():
            _within("logit_bias", value, -100.0, 100.0)
        if self.kv_budget is not None:
            _within("kv_budget", self.kv_budget, 1, 1 << 30)
        if self.kv_eviction not in EVICTION:
            raise InputError(
                f"kv_eviction must be one of {', '.join(EVICTION)}, got {self.kv_eviction!r}", param="kv_eviction"
            )
        if self.sparse_pages is not None:
            _within("sparse_pages", self.sparse_pages, 0, 1 << 30)
            if self.sparse_pages and self.kv_budget is not None:
                raise InputError(
                    "sparse_pages chooses among pages that all stay; leave kv_budget out", param="sparse_pages"
                )
        for name in ("ignore_eos", "min_tokens"):
            if self.grammar is not None and self.grammar.kind != "free" and getattr(self, name):
                raise InputError(f"{name} contradicts a grammar, which says where the answer ends", param=name)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def reads_history(self) -> bool:
        """Whether a draw looks at the tokens before it."""
        return self.penalised or bool(self.bad_words or self.bad_token_ids)

    def check_budget(self, page_size: int, longest: int) -> None:
        """Refuse a KV budget that is too small to choose from, or more than a sequence may attend to anyway."""
        least = LEAST_PAGES * page_size
        if self.kv_budget is not None and not least <= self.kv_budget <= longest:
            raise InputError(
                f"kv_budget must be from {least} ({LEAST_PAGES} pages) to {longest} tokens (what a sequence may attend "
                f"to here), got {self.kv_budget}",
                param="kv_budget",
            )

    def check_sparse(self, page_size: int, available: bool) -> None:
        """Refuse sparse attention where there is none, or with too few pages to choose from."""
        if self.sparse_pages and not available:
            raise InputError(
                "sparse_pages is not available on this engine: attention reads all pages", param="sparse_pages"
            )
        least = least_sparse_pages(page_size)
        if self.sparse_pages and self.sparse_pages < least:
            raise InputError(
                f"sparse_pages must be 0 or at least {least} here, got {self.sparse_pages}", param="sparse_pages"
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids the model does not have."""
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("bad_token_ids", (t for word in self.bad_token_ids for t in word)),
            ("allowed_token_ids", self.allowed_token_ids),
        ):
            for token in ids:
                if not 0 <= token < vocab_size:
                    message = f"token id {token} in {name} is outside the vocabulary of {vocab_size}"
                    raise InputError(message, param=name)


def least_sparse_pages(page_size: int) -> int:
    """Those that sparse attention always reads, and something to choose."""
    return SPARSE_LOCAL // page_size + LEAST_PAGES


def _within(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or math.isnan(value) or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InputError(f"{name} must be in {bracket}{low}, {high}], got {value!r}", param=name)
