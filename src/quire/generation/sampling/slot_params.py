"""Sampling parameters by slot: what the device needs as tensors, what the host needs to choose passes.

The host's books are the truth; slots admitted since the last step travel to the device in one copy (and one more
for each kind of list they bring). Lists (logit bias, bad words, stop ids) are padded to the longest seen so far.

Refuses to know: logits, token histories (they live with the worker), how a pass uses what it reads here.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.generation.sampling.noise import streams
from quire.types.plan import Admit
from quire.types.sampling_params import SamplingParams

Ints = npt.NDArray[np.int64]

MAX_NARROW_TOP_K = 1024  # top-k up to this is one narrow selection; larger ones go separately, not to widen other rows'
MIN_TEMPERATURE = 1e-6  # colder than this differs from it by less than rounding does
PAD = -1  # no token has this id
MIN_WIDTH = 16  # of lists, once there are any: whatever knows where they are must be made again when they grow


class Need(enum.IntFlag):
    """What a slot asks of a step: exactly one way of drawing, and any of the extras."""

    GREEDY = enum.auto()
    PLAIN = enum.auto()  # any token may be drawn
    TOP_K = enum.auto()  # top-k up to MAX_NARROW_TOP_K
    WIDE_TOP_K = enum.auto()  # top-k beyond it
    TOP_P = enum.auto()  # top-p without top-k
    MIN_P = enum.auto()
    ALLOWED = enum.auto()  # only some tokens may be drawn
    BIAS = enum.auto()
    BAD_WORDS = enum.auto()
    MIN_TOKENS = enum.auto()
    PENALTIES = enum.auto()
    COUNTS = enum.auto()  # penalties that count occurrences (presence, frequency)
    LOGPROBS = enum.auto()
    GRAMMAR = enum.auto()


DRAWS = Need.GREEDY | Need.PLAIN | Need.TOP_K | Need.WIDE_TOP_K | Need.TOP_P
# What kernels sample by themselves, on a GPU and on a CPU.
SAMPLED = int(DRAWS | Need.MIN_P | Need.BIAS | Need.MIN_TOKENS | Need.PENALTIES | Need.COUNTS | Need.LOGPROBS)
_MIN_TOKENS = int(Need.MIN_TOKENS)  # plain numbers where every step looks: flags are slow
PROCESSORS = Need.ALLOWED | Need.BIAS | Need.BAD_WORDS | Need.MIN_TOKENS | Need.PENALTIES | Need.GRAMMAR


@dataclass(frozen=True)
class Params:
    """Numbers of m rows, each [m, 1], ready to broadcast over tokens."""

    stream: torch.Tensor  # int64
    top_k: torch.Tensor  # int64; the vocabulary where off
    prompt_len: torch.Tensor  # int64
    top_p: torch.Tensor  # float64; infinite where off
    temperature: torch.Tensor  # float32, from here on
    log_min_p: torch.Tensor  # -inf where off
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor

    def select(self, rows: torch.Tensor) -> Params:
        return Params(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


_INTS = 5  # stream (seed until it is sent), branch, top_k, prompt_len, slot
_FLOATS = 6  # top_p, temperature, log_min_p, repetition, presence, frequency


class SlotTable:
    def __init__(self, *, slots: int, vocab_size: int, device: torch.device):
        self.device = device
        self._vocab = vocab_size
        self.top_k: Ints = np.zeros(slots, np.int64)
        self.logprobs: Ints = np.zeros(slots, np.int64)  # how many of the top are wanted; -1: nothing at all
        self._needs: Ints = np.zeros(slots, np.int64)
        self._min_length: Ints = np.zeros(slots, np.int64)  # position from which stop ids may be drawn
        self._ints: Ints = np.zeros((slots, _INTS), np.int64)
        self._floats = np.zeros((slots, _FLOATS), np.float64)
        self._dirty: set[int] = set()
        self._allowed: dict[int, npt.NDArray[np.uint8]] = {}  # by slot: a bit for each token, lowest first
        # Floats travel and rest as their bits, so that a slot is one row of one tensor. Behind the slots one more row,
        # which is greedy, for what pads a captured step.
        self._rows = torch.zeros(slots + 1, _INTS + _FLOATS, dtype=torch.int64, device=device)
        self.bias_ids = PaddedLists(slots, torch.int64, 0, device)  # [slots, b]
        self.bias_values = PaddedLists(slots, torch.float32, 0.0, device)
        self.stop_ids = PaddedLists(slots, torch.int64, PAD, device)  # [slots, s]
        self.word_ends = PaddedLists(slots, torch.int64, PAD, device)  # [slots, w]: the token that would complete it
        self.word_starts = PaddedLists(slots, torch.int32, PAD, device, dims=2)  # [slots, w, l]: those before

    def admit(self, admit: Admit) -> None:
        params, slot = admit.params, admit.slot
        top_k = params.top_k if 0 < params.top_k < self._vocab else self._vocab
        self.top_k[slot] = top_k
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._needs[slot] = _needs(params, top_k < self._vocab)
        self._min_length[slot] = admit.prompt_len + params.min_tokens
        self._ints[slot] = (_to_int64(admit.seed), admit.branch, top_k, admit.prompt_len, slot)
        self._floats[slot] = (
            params.top_p if params.top_p < 1.0 else math.inf,
            0.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE),
            math.log(params.min_p) if params.min_p else -math.inf,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self._dirty.add(slot)
        self._allowed.pop(slot, None)
        if params.allowed_token_ids:
            bits = np.zeros(self._vocab, np.uint8)
            bits[params.allowed_token_ids] = 1
            self._allowed[slot] = np.packbits(bits, bitorder="little")
        if params.logit_bias:
            self.bias_ids.put(slot, np.array(list(params.logit_bias)))
            self.bias_values.put(slot, np.array(list(params.logit_bias.values())))
        if params.min_tokens:
            self.stop_ids.put(slot, np.array(admit.stop_ids, np.int64))
        if words := params.bad_token_ids:
            longest = max(len(word) for word in words) - 1
            self.word_ends.put(slot, np.array([word[-1] for word in words]))
            self.word_starts.put(slot, np.array([[PAD] * (longest + 1 - len(word)) + word[:-1] for word in words]))

    def flush(self) -> None:
        """Send what was admitted since the last call."""
        for lists in (self.bias_ids, self.bias_values, self.stop_ids, self.word_ends, self.word_starts):
            lists.flush()
        if self._dirty:
            slots = list(self._dirty)
            self._dirty.clear()
            rows = np.concatenate([self._ints[slots], self._floats[slots].view(np.int64)], 1)
            rows[:, 0] = streams(torch.from_numpy(rows[:, 0]), torch.from_numpy(rows[:, 1]))
            sent = to_device(rows, self.device)
            self._rows.index_copy_(0, sent[:, _INTS - 1], sent)

    @property
    def numbers(self) -> torch.Tensor:
        """All slots' numbers on the device: int64 [slots + 1, words], floats as their bits."""
        return self._rows

    def allowed(self, slots: Ints) -> npt.NDArray[np.uint8]:
        """Masks of these slots, all of which have one: uint8 [m, bytes]."""
        return np.stack([self._allowed[slot] for slot in slots.tolist()])

    def needs(self, slots: Ints, positions: Ints) -> Ints:
        """What each row asks for when it draws this position: a minimum length once reached is no more asked for."""
        needs: Ints = self._needs[slots]
        if not (needs & _MIN_TOKENS).any():
            return needs
        return np.where(positions < self._min_length[slots], needs, needs & ~_MIN_TOKENS)

    def params(self, slots: torch.Tensor) -> Params:
        """int64 [m] → the numbers of these slots"""
        rows = self._rows.index_select(0, slots)
        floats = rows[:, _INTS:].view(torch.float64)
        stream, _, top_k, prompt_len, _ = rows[:, :_INTS].split(1, -1)
        return Params(stream, top_k, prompt_len, floats[:, :1], *floats[:, 1:].to(torch.float32).split(1, -1))


class PaddedLists:
    """One list (or list of equally long lists) per slot, on the device, padded in front to the longest so far.

    A slot whose occupant brought no list still holds an earlier one's: read only slots that have one."""

    def __init__(self, slots: int, dtype: torch.dtype, fill: float, device: torch.device, *, dims: int = 1):
        self._fill = fill
        self._data = torch.full((slots, *[0] * dims), fill, dtype=dtype, device=device)
        self._waiting: dict[int, npt.NDArray[Any]] = {}

    @property
    def data(self) -> torch.Tensor:
        """Of all slots: [slots, ...]"""
        return self._data

    def put(self, slot: int, values: npt.NDArray[Any]) -> None:
        self._waiting[slot] = values

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """int64 [m] → [m, ...]"""
        return self._data.index_select(0, slots)

    def flush(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        old = self._data
        longest = (max(sizes) for sizes in zip(*(values.shape for values in waiting.values()), strict=True))
        wider = [max(have, _power_of_two(want)) for have, want in zip(old.shape[1:], longest, strict=True)]
        shape = wider if wider == list(old.shape[1:]) else [max(MIN_WIDTH, width) for width in wider]
        if shape != list(old.shape[1:]):
            self._data = old.new_full((len(old), *shape), self._fill)
            _right_align(self._data, old)
        padded = np.full((len(waiting), *shape), self._fill)
        for row, values in zip(padded, waiting.values(), strict=True):
            _right_align(row, values)
        slots = to_device(np.array(list(waiting)), old.device)
        self._data.index_copy_(0, slots, to_device(padded, old.device).to(old.dtype))


def _right_align(target: Any, source: Any) -> None:
    """Write into the last corner: on every axis padding comes first."""
    target[tuple(slice(have - want, None) for have, want in zip(target.shape, source.shape, strict=True))] = source


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Host to device without waiting: through pinned memory where there is a device to wait for."""
    tensor = pinned(array, device)
    return tensor.to(device, non_blocking=True) if device.type == "cuda" else tensor


def pinned(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """In memory that this device reads by itself."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _needs(params: SamplingParams, top_k: bool) -> Need:
    if params.greedy:
        needs = Need.GREEDY
    elif top_k:
        needs = Need.TOP_K if params.top_k <= MAX_NARROW_TOP_K else Need.WIDE_TOP_K
    else:
        needs = Need.TOP_P if params.top_p < 1.0 else Need.PLAIN
    for need, wanted in (
        (Need.MIN_P, params.min_p > 0.0 and not params.greedy),
        (Need.ALLOWED, params.allowed_token_ids),
        (Need.BIAS, params.logit_bias),
        (Need.BAD_WORDS, any(params.bad_token_ids)),
        (Need.MIN_TOKENS, params.min_tokens),
        (Need.PENALTIES, params.penalised),
        (Need.COUNTS, params.presence_penalty or params.frequency_penalty),
        (Need.LOGPROBS, params.logprobs is not None),
        (Need.GRAMMAR, params.grammar is not None),
    ):
        if wanted:
            needs |= need
    return needs


def _to_int64(seed: int) -> int:
    """Any integer to the 64 bits that noise is keyed by."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 1 else size
