"""Text or token ids and parameters in, a checked Request out. Everything wrong is refused here."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from quire.generation.grammar.sandbox_client import GrammarSandbox
from quire.text import TextModel, alphabet_of, encode_chunks
from quire.types.beam import BeamParams
from quire.types.blend import Blend, BlendLike, BlendParams, check_chunks
from quire.types.errors import ContextLengthError, InputError
from quire.types.grammar import GrammarSpec
from quire.types.messages import EngineInfo
from quire.types.pooling import ENCODER
from quire.types.request import HOLD, MAX_HOLD, Request
from quire.types.sampling_params import SamplingParams

Prompt = str | Sequence[int]
POOLINGS = ("mean", "last", "cls")
_sandbox = GrammarSandbox()


def prepare(
    prompt: Prompt,
    params: SamplingParams,
    *,
    text: TextModel,
    info: EngineInfo,
    request_id: str | None = None,
    priority: int = 0,
    salt: str = "",
    tenant: str = "",
    blend: Blend | None = None,
    prediction: Sequence[int] = (),
    session: str = "",
    hold: float = HOLD,
    lora: str = "",
    pooling: str = "",
    slo_ttft: float = 0.0,
    slo_tpot: float = 0.0,
) -> Request:
    """Tokenise, validate against the model, and settle what was left open (seed, length, stop ids)."""
    if info.pooling.encoder and not pooling:
        raise InputError(ENCODER)
    if priority and not info.priorities:
        raise InputError("priority needs an engine with scheduler priority", param="priority")
    tokens = text.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    check_tokens(tokens, info, info.room(params))
    room = info.room(params) - len(tokens)
    params.check_vocabulary(info.vocab_size)
    params.check_budget(info.page_size, info.max_model_len)
    params.check_sparse(info.page_size, info.sparse)
    if params.grammar is not None:
        check_grammar(params.grammar, text)
    if params.max_tokens is not None and params.max_tokens > room and params.min_tokens > room:
        raise ContextLengthError(f"min_tokens {params.min_tokens} do not fit beside a prompt of {len(tokens)} tokens")
    params, keep = branches_of(params)
    if params.grammar is not None and params.grammar.kind == "each" and params.n != len(params.grammar.parts):
        raise InputError(f"{len(params.grammar.parts)} answers are to be spelled; let n be as many", param="n")
    params = replace(
        params,
        seed=secrets.randbits(62) if params.seed is None else params.seed,
        bad_token_ids=[*params.bad_token_ids, *_bad_words(params.bad_words, text)],
    )
    return Request(
        id=request_id or secrets.token_hex(12),
        prompt=tokens,
        params=params,
        arrival=time.time(),
        priority=priority,
        tenant=tenant,
        salt=salt,
        eos_token_ids=sorted(text.tokenizer.eos_ids),
        keep=keep,
        blend=blend,
        prediction=list(prediction),
        session=session,
        hold=_held(hold) if session else 0.0,
        lora=lora,
        pooling=pooling,
        slo_ttft=_target(slo_ttft, "slo_ttft"),
        slo_tpot=_target(slo_tpot, "slo_tpot"),
    )


def _held(seconds: float) -> float:
    if not 0 < seconds <= MAX_HOLD:
        raise InputError(f"session_ttl must be above 0 and at most {MAX_HOLD:.0f} seconds", param="session_ttl")
    return seconds


def _target(seconds: float, name: str) -> float:
    if not 0 <= seconds < math.inf:
        raise InputError(f"{name} must be a number of seconds, or 0 for none", param=name)
    return seconds


def chunked(prompt: Prompt, how: BlendLike | Blend | None, text: TextModel) -> tuple[Prompt, Blend | None]:
    """A prompt and where its chunks are: said of token ids, or found by a separator in a text, which then is token ids
    without it."""
    if how is None or isinstance(how, Blend):
        return prompt, how
    how = BlendParams.read(how)
    if not isinstance(prompt, str):
        if how.separator:
            raise InputError("blend finds chunks by a separator in a text; token ids have none", param="blend")
        check_chunks(how.chunks or [], len(prompt))
        return prompt, how.of(how.chunks or [])
    return encode_chunks(text.tokenizer, prompt, how, add_special=True)


def branches_of(params: SamplingParams) -> tuple[SamplingParams, int]:
    """`best_of` as so many branches, of which n are kept: the best can be told by their log-probabilities."""
    if not params.best_of:
        return params, 0
    return replace(params, n=params.best_of, best_of=None, logprobs=params.logprobs or 0), params.n


def prepare_embedding(prompt: Prompt, pooling: str | None, *, info: EngineInfo, **where: Any) -> Request:
    """A request for the pooled hidden state of a prompt, pooled as the model's files say unless told otherwise; `where`
    as for `prepare`."""
    pooling = pooling or info.pooling.pooling
    if pooling not in POOLINGS:
        raise InputError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}", param="pooling")
    if pooling == "cls" and not info.pooling.encoder:
        raise InputError("the first token of a decoder has seen no other; pooling cls is for encoders", param="pooling")
    return prepare(prompt, SamplingParams(max_tokens=1), info=info, pooling=pooling, **where)


def prepare_classes(
    prompt: Prompt,
    other: str | None = None,
    *,
    text: TextModel,
    info: EngineInfo,
    most: int | None = None,
    **where: Any,
) -> Request:
    """A request for the scores of classes of a prompt, or of two texts as a pair. `most`: tokens to keep; -1: as many
    as the model takes."""
    if not info.pooling.labels:
        raise InputError("this model has no classification head: it classifies nothing")
    tokens, segments = pooled_tokens(prompt, other, text=text, info=info, most=most)
    request = prepare(tokens, SamplingParams(max_tokens=1), text=text, info=info, pooling="classify", **where)
    if info.pooling.token_types > 1:  # ids of a further segment lie behind those of the vocabulary
        tokens = [token + segment * info.vocab_size for token, segment in zip(tokens, segments, strict=True)]
    return replace(request, prompt=tokens)


def pooled_tokens(
    prompt: Prompt, other: str | None, *, text: TextModel, info: EngineInfo, most: int | None
) -> tuple[list[int], list[int]]:
    """Token ids of what is to be pooled, and their segments."""
    most = info.most_pooled if most is not None and most < 0 else most
    if isinstance(prompt, str):
        return text.tokenizer.encode_pair(prompt, other, most)
    return list(prompt)[:most], [0] * len(prompt[:most])


def prepare_beam(prompt: Prompt, beam: BeamParams, *, text: TextModel, **where: Any) -> Request:
    """A request for the answers that beam search finds; `where` as for `prepare`."""
    ends = {*beam.stop_token_ids, *(() if beam.ignore_eos else text.tokenizer.eos_ids)}
    params = SamplingParams(
        n=beam.n,
        temperature=0.0,
        max_tokens=beam.max_tokens,
        stop_token_ids=beam.stop_token_ids,
        ignore_eos=beam.ignore_eos,
        logprobs=beam.candidates(len(ends)),
    )
    return replace(prepare(prompt, params, text=text, **where), beam=beam)


def check_grammar(spec: GrammarSpec, text: TextModel) -> None:
    """Compile a grammar on trial; InputError with the reason if it makes no sense, is too large or takes too long.
    Needs no torch. Waits for the compiler: not for an event loop to call."""
    if spec.kind != "free":
        _sandbox.check(spec.answer, _alphabet(text.tokenizer))


_alphabet = lru_cache(maxsize=8)(alphabet_of)  # the compiler keeps what it makes of a vocabulary as long as that lives


def check_tokens(tokens: list[int], info: EngineInfo, room: int) -> None:
    if not tokens:
        raise InputError("the prompt is empty; send at least one token", param="prompt")
    if info.pooling.encoder and len(tokens) > info.most_pooled:
        most = info.most_pooled
        raise ContextLengthError(
            f"the input has {len(tokens)} tokens but the model takes {most}; shorten it, or send truncate_prompt_tokens"
        )
    if len(tokens) >= room and not info.pooling.encoder:
        raised = "raise max_model_len, with kv_budget beyond what the model was trained for"
        longer = "send kv_budget" if len(tokens) < info.stream_len else raised
        raise ContextLengthError(
            f"the prompt has {len(tokens)} tokens but the context holds {room}, one of them for the answer; "
            f"shorten the prompt or {longer}"
        )
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < info.vocab_size:
            raise InputError(f"token id {token!r} is outside the vocabulary of {info.vocab_size}", param="prompt")


def _bad_words(words: list[str], text: TextModel) -> list[list[int]]:
    """Each word as it may appear: at the start of text and after a space."""
    spellings = []
    for word in words:
        for form in dict.fromkeys((word, " " + word.lstrip())):
            ids = text.tokenizer.encode(form, add_special=False)
            if ids and ids not in spellings:
                spellings.append(ids)
    return spellings
