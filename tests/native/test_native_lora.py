"""LoRA adapters in the compiled decoder: as its plain twin has them, each token its own, whatever is beside it."""

import pytest
import torch
from native_harness import batch_of, kv_for, own_pages, random_decoder

from quire.kernels.cpu import NativeProgram
from quire.kernels.cpu.packed_adapter import PackedAdapter
from quire.kernels.cpu.plain_twin import TwinProgram
from quire.types.errors import QuireError

NAMES = ("q", "k", "v", "o", "gate", "up", "down")
LENGTHS = [1, 33, 48, 1, 1, 7, 2, 1]
SLOTS = [2, 1, 0, 3, 1, 2, 3, 0]


def updates(weights, rank, names=NAMES, seed=0, size=0.05):
    generator = torch.Generator().manual_seed(seed)

    def update(layer, name):
        matrix = getattr(layer.attention if name in "qkvo" else layer.mlp, name).w
        return tuple(
            torch.randn(shape, generator=generator) * size for shape in ((rank, matrix.columns), (matrix.rows, rank))
        )

    return [{name: update(layer, name) for name in names} for layer in weights.layer]


def run(program, weights, lengths, slots, seed=0):
    kv = kv_for(weights, 80, "float32", 5)
    if isinstance(program, TwinProgram):
        kv.pool.zero_()
    batch = batch_of([(0, n) for n in lengths], own_pages(lengths, kv), kv)
    batch.adapters = torch.tensor([slot for slot, n in zip(slots, lengths, strict=True) for _ in range(n)])
    tokens = torch.randint(0, 50, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return program.forward(tokens, batch, kv)


@pytest.mark.parametrize("hidden", [64, 256], ids=["narrow", "wide"])
@pytest.mark.parametrize("names", [NAMES, ("q", "v"), ("gate", "down")], ids=" ".join)
def test_program_equals_its_twin(isa, names, hidden):
    weights = random_decoder(hidden=hidden)
    program = NativeProgram(weights, threads=2, isa=isa)
    program.reserve_adapters(3, 20)
    made = [updates(weights, rank, names, seed) for seed, rank in enumerate((4, 20, 16))]
    for slot, layers in enumerate(made, 1):
        program.set_adapter(slot, layers)
    twin = TwinProgram(weights, [None, *(PackedAdapter(layers, 32) for layers in made)])
    got, wanted = run(program, weights, LENGTHS, SLOTS), run(twin, weights, LENGTHS, SLOTS)
    assert ((got - wanted).square().mean() / wanted.square().mean()).sqrt() < 1e-2
    plain = run(TwinProgram(weights), weights, LENGTHS, SLOTS)
    changed = ((plain - wanted).square().sum(1) / wanted.square().sum(1)).sqrt()
    slot_of = torch.tensor([slot for slot, n in zip(SLOTS, LENGTHS, strict=True) for _ in range(n)])
    assert changed[slot_of == 0].max() == 0
    assert changed[slot_of > 0].median() > 0.05  # the adapters matter, so that being close to the twin means something


def test_a_request_has_the_same_bits_alone(isa):
    weights = random_decoder(hidden=256)
    program = NativeProgram(weights, threads=2, isa=isa)
    program.reserve_adapters(3, 16)
    for slot in (1, 2, 3):
        program.set_adapter(slot, updates(weights, 16, seed=slot))
    together = run(program, weights, [9] * 8, SLOTS, seed=1)
    tokens = torch.randint(0, 50, (72,), generator=torch.Generator().manual_seed(1))
    for row, slot in enumerate(SLOTS):
        kv = kv_for(weights, 80, "float32", 5)
        batch = batch_of([(0, 9)], own_pages([9], kv), kv)
        batch.adapters = torch.full((9,), slot) if slot else None
        alone = program.forward(tokens[9 * row : 9 * row + 9], batch, kv)
        assert torch.equal(alone, together[9 * row : 9 * row + 9])


def test_tiny_updates_keep_their_digits(isa):
    """Scales of blocks are fp16: matrices of very small numbers must not lose what they say."""
    weights = random_decoder()
    program = NativeProgram(weights, threads=1, isa=isa)
    program.reserve_adapters(2, 8)
    layers = updates(weights, 8)
    program.set_adapter(1, layers)
    program.set_adapter(2, [{name: (a * 1e-7, b * 1e7) for name, (a, b) in layer.items()} for layer in layers])
    torch.testing.assert_close(run(program, weights, [5], [1]), run(program, weights, [5], [2]), atol=1e-2, rtol=1e-2)


def test_unknown_adapters_are_refused():
    weights = random_decoder()
    program = NativeProgram(weights, threads=1)
    program.reserve_adapters(2, 8)
    for slot in (1, 3, -1):
        with pytest.raises(QuireError, match="adapter that is not loaded"):
            run(program, weights, [5], [slot])
