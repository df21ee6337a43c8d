"""The sampler against a textbook twin that treats one row at a time, and its promises about batches and seeds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from quire.generation.sampling import sampler as sampler_module
from quire.generation.sampling.noise import gumbel, row_keys, streams
from quire.generation.sampling.sampler import Sampler
from quire.types.plan import Admit
from quire.types.sampling_params import SamplingParams

VOCAB = 1500
LENGTH = 40
CPU = torch.device("cpu")

# One of everything, and the combinations that share code paths.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 1},
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"temperature": 1e-30},
    {"top_k": 2},
    {"top_k": 50, "temperature": 0.8},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 50, "top_p": 0.7, "min_p": 0.05},
    {"top_k": 1024, "top_p": 0.99},
    {"top_k": 1100},
    {"top_k": 1400, "top_p": 0.8, "min_p": 0.001, "temperature": 3.0},
    {"top_k": 100_000},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.95, "temperature": 4.0},
    {"top_p": 0.9, "min_p": 0.1},
    {"top_p": 0.999, "min_p": 1e-4, "temperature": 2.0},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"repetition_penalty": 0.7, "top_k": 20},
    {"temperature": 0.0, "presence_penalty": 2.0},
    {"frequency_penalty": 1.5, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": -2.0, "presence_penalty": -1.0, "repetition_penalty": 3.0},
    {"temperature": 0.0, "logit_bias": {3: 9.0, 0: -100.0, 1499: 8.5}},
    {"logit_bias": dict.fromkeys(range(100), 6.0), "top_k": 10},
    {"temperature": 0.0, "allowed_token_ids": [3, 77, 1499]},
    {"allowed_token_ids": list(range(0, 1500, 7)), "top_p": 0.8, "logit_bias": {0: -100.0, 1: 50.0}},
    {"temperature": 0.0, "bad": True},
    {"bad": True, "min_p": 0.3},
    {"temperature": 0.0, "min_tokens": 30},
    {"min_tokens": 5, "top_p": 0.9},
    {"bad": True, "min_tokens": 30, "logit_bias": {5: 5.0}, "repetition_penalty": 1.2, "presence_penalty": 0.5,
     "frequency_penalty": 0.5, "temperature": 1.3, "top_k": 64, "top_p": 0.95, "min_p": 0.01},
]  # fmt: skip


def twin_edit(logits: np.ndarray, known: list[int], prompt_len: int, stops: list[int], params: SamplingParams) -> None:
    if params.allowed_token_ids:
        logits[[token for token in range(len(logits)) if token not in params.allowed_token_ids]] = -np.inf
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for word in params.bad_token_ids:
        if known[len(known) - len(word) + 1 :] == word[:-1] and len(known) >= len(word) - 1:
            logits[word[-1]] = -np.inf
    if len(known) - prompt_len < params.min_tokens:
        logits[stops] = -np.inf
    for token in set(known):
        penalty = np.float32(params.repetition_penalty)
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(known[prompt_len:]):
        count = known[prompt_len:].count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty


def twin_kept(logits: np.ndarray, params: SamplingParams) -> list[int]:
    """The tokens that may be drawn: min-p, then top-k, then the smallest likely set that reaches top-p."""
    wide = (logits.astype(np.float64) - logits.max()) / max(params.temperature, 1e-6)
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    kept = [t for t in order if math.exp(wide[t]) >= params.min_p]
    kept = kept[: params.top_k] if params.top_k else kept
    total = sum(math.exp(wide[t]) for t in kept)
    reached = 0.0
    for count, token in enumerate(kept, start=1):
        reached += math.exp(wide[token])
        if reached >= params.top_p * total:
            return kept[:count] if params.top_p < 1.0 else kept
    return kept


def twin_draw(logits: np.ndarray, params: SamplingParams, seed: int, branch: int, position: int) -> int:
    if params.greedy:
        return int(logits.argmax())
    kept = twin_kept(logits, params)
    key = row_keys(streams(torch.tensor([seed]), torch.tensor([branch])), torch.tensor([position]))
    noise = gumbel(key, torch.tensor(kept))[0].double().numpy()
    return kept[int((logits[kept].astype(np.float64) / max(params.temperature, 1e-6) + noise).argmax())]


class World:
    """Slots with random histories; every other kind repeats with another seed until there are `rows` rows."""

    def __init__(self, rows: int, device: torch.device, spread: float = 3.0):
        rng = np.random.default_rng(rows)
        self.rows = rows
        self.logits = torch.from_numpy(rng.normal(0, spread, (rows, VOCAB)).astype(np.float32)).to(device)
        self.tokens = torch.from_numpy(rng.integers(0, VOCAB, (rows + 3, LENGTH)).astype(np.int32)).to(device)
        self.tokens[:, 1::3] = self.tokens[:, :1]  # repeats, for counts
        self.slots = rng.permutation(rows + 3)[:rows].tolist()
        self.positions = rng.integers(12, LENGTH, rows).tolist()
        self.prompts = [int(p) - int(n) for p, n in zip(self.positions, rng.integers(0, 12, rows), strict=True)]
        self.seeds = rng.integers(-(1 << 62), 1 << 62, rows).tolist()
        self.stops = [[int(self.logits[i].argmax()), 3] for i in range(rows)]
        self.params = [self._params(i) for i in range(rows)]

    def known(self, row: int) -> list[int]:
        return self.tokens[self.slots[row], : self.positions[row]].tolist()

    def _params(self, row: int) -> SamplingParams:
        kind = dict(KINDS[row % len(KINDS)])
        if kind.pop("bad", False):
            known, top = self.known(row), self.logits[row].argsort(descending=True).tolist()
            kind["bad_token_ids"] = [
                [top[0]], [*known[-3:], top[1]], [*known[-2:], top[2]], [known[-1] + 1, top[3]], [9] * 60 + [top[3]]
            ]  # fmt: skip
        return SamplingParams(max_tokens=None, **kind)

    def sampler(self, device: torch.device) -> Sampler:
        sampler = Sampler(slots=self.rows + 3, vocab_size=VOCAB, device=device)
        self.admit(sampler)
        return sampler

    def admit(self, sampler: Sampler) -> None:
        for row in range(self.rows):
            sampler.admit(
                Admit(
                    slot=self.slots[row],
                    key=str(row),
                    tokens=[],
                    prompt_len=self.prompts[row],
                    params=self.params[row],
                    seed=self.seeds[row],
                    branch=row % 3,
                    stop_ids=self.stops[row],
                )
            )

    def draw(self, sampler: Sampler, rows: list[int]) -> list[int]:
        slots, positions = [self.slots[r] for r in rows], [self.positions[r] for r in rows]
        return sampler.sample(self.logits[rows], slots, positions, self.tokens).token_ids.tolist()

    def expected(self, row: int) -> int:
        logits = self.logits[row].cpu().numpy().copy()
        twin_edit(logits, self.known(row), self.prompts[row], self.stops[row], self.params[row])
        return twin_draw(logits, self.params[row], self.seeds[row], row % 3, self.positions[row])


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_mixed_batch_equals_twin(device: torch.device, spread: float) -> None:
    world = World(99, device, spread)
    sampler = world.sampler(device)
    expected = [world.expected(row) for row in range(99)]
    assert [world.draw(sampler, list(range(99))) for _ in range(2)] == [expected, expected]
    if sampler._rooms:  # where occurrences were counted
        assert not sampler._rooms["counts"].any()


def test_kernels_equal_twin(kernels: None) -> None:
    """In the interpreter: one row of each kind, twice; what programs count in is left as it was."""
    world = World(len(KINDS), CPU)
    sampler = world.sampler(CPU)
    for _ in range(2):
        assert world.draw(sampler, list(range(len(KINDS)))) == [world.expected(row) for row in range(len(KINDS))]
    assert sampler._kernels is not None and not sampler._kernels._counting.any()


def test_what_is_captured_is_sampled_alike(replays: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory that every replay writes over: of more rows than are captured, no slice sees another's."""
    monkeypatch.setattr(sampler_module, "SLICE_ROWS", 5)
    world = World(len(KINDS), CPU)
    sampler = world.sampler(CPU)
    assert sampler._kernels is not None
    sampler._kernels._graphs = True
    adjusted = [r for r in range(len(KINDS)) if world.params[r].penalised or world.params[r].logit_bias]
    rows = [r for r in adjusted if not world.params[r].bad_token_ids and not world.params[r].allowed_token_ids]
    assert len(rows) > 6
    for some in (rows[:3], rows[:5], rows[1:4], rows):
        assert world.draw(sampler, some) == [world.expected(row) for row in some]
    assert [kind.rows for kind in replays] == [4, 8, 4]


def test_each_kind_alone_equals_the_mixed_batch(device: torch.device) -> None:
    world = World(64, device)
    sampler = world.sampler(device)
    together = world.draw(sampler, list(range(64)))
    assert [world.draw(sampler, [row])[0] for row in range(64)] == together
    shuffled = np.random.default_rng(0).permutation(64).tolist()
    assert world.draw(sampler, shuffled) == [together[row] for row in shuffled]
    assert world.draw(sampler, shuffled[:9]) == [together[row] for row in shuffled[:9]]


def test_a_reused_slot_forgets_its_past(device: torch.device) -> None:
    """Every slot is first admitted as its neighbour, sampled, then admitted as itself."""
    world = World(64, device)
    sampler = world.sampler(device)
    expected = world.draw(sampler, list(range(64)))
    params, prompts, seeds = list(world.params), list(world.prompts), list(world.seeds)
    world.params, world.prompts, world.seeds = params[1:] + params[:1], prompts[::-1], seeds[::-1]
    world.admit(sampler)
    assert world.draw(sampler, list(range(64))) != expected
    world.params, world.prompts, world.seeds = params, prompts, seeds
    world.admit(sampler)
    assert world.draw(sampler, list(range(64))) == expected


def test_one_slot_may_be_drawn_at_several_positions(device: torch.device) -> None:
    """What speculation needs: rows of one slot, each with its own history length."""
    world = World(len(KINDS), device)
    sampler = world.sampler(device)
    row = len(KINDS) - 1
    positions = [20, 21, 22, 23]
    logits, slot = world.logits[[row] * 4], world.slots[row]
    together = sampler.sample(logits, [slot] * 4, positions, world.tokens).token_ids.tolist()
    for position, token in zip(positions, together, strict=True):
        world.positions[row] = position
        assert world.draw(sampler, [row]) == [token] == [world.expected(row)]


def test_greedy_takes_the_lowest_id_of_equals(device: torch.device, admit: Any) -> None:
    sampler = Sampler(slots=2, vocab_size=300, device=device)
    admit(sampler, 0, temperature=0.0)
    admit(sampler, 1, temperature=2.0, top_k=1)
    logits = torch.zeros(2, 300, device=device)
    logits[:, [280, 17, 200]] = 1.0
    tokens = torch.zeros(2, 4, dtype=torch.int32, device=device)
    assert sampler.sample(logits, [0, 1], [1, 1], tokens).token_ids.tolist() == [17, 17]


def test_no_rows_and_no_choice(device: torch.device, admit: Any) -> None:
    sampler = Sampler(slots=5, vocab_size=300, device=device)
    tokens = torch.zeros(5, 4, dtype=torch.int32, device=device)
    assert sampler.sample(torch.zeros(0, 300, device=device), [], [], tokens).token_ids.tolist() == []
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}]
    for slot, params in enumerate(kinds):
        admit(sampler, slot, **params)
    nothing = torch.full((5, 300), float("-inf"), device=device)
    drawn = sampler.sample(nothing, [0, 1, 2, 3, 4], [1] * 5, tokens).token_ids.tolist()
    assert all(0 <= token < 300 for token in drawn)


def test_seeds_branches_and_positions_change_the_draw(admit: Any) -> None:
    sampler = Sampler(slots=64, vocab_size=5000, device=CPU)
    for slot in range(64):
        admit(sampler, slot, seed=slot // 2, branch=slot % 2)
    logits, tokens = torch.zeros(64, 5000), torch.zeros(64, 8, dtype=torch.int32)
    here, next_ = (sampler.sample(logits, list(range(64)), [p] * 64, tokens).token_ids.tolist() for p in (3, 4))
    assert len(set(here + next_)) > 115  # 128 draws from 5000 tokens: two or so collide
    again = sampler.sample(logits, list(range(64)), [3] * 64, tokens).token_ids.tolist()
    assert again == here


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_never_waits_for_the_device() -> None:
    device = torch.device("cuda")
    world = World(99, device)
    sampler = world.sampler(device)
    rows, slots = world.logits.clone(), list(world.slots)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.sample(rows, slots, world.positions, world.tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_devices_agree() -> None:
    drawn = [World(99, d).draw(World(99, d).sampler(d), list(range(99))) for d in (CPU, torch.device("cuda"))]
    assert drawn[0] == drawn[1]
