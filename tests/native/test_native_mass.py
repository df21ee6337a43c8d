"""What the compiled decoder's rows pay to each page: equal to the twin's probabilities, and asking changes no bit."""

import pytest
import torch
from native_harness import batch_of, kv_for, own_pages, random_decoder

from quire.kernels.cpu import NativeProgram
from quire.kernels.cpu.plain_twin import TwinProgram
from quire.types.errors import QuireError

# a chunk without context, a chunk over several tiles of queries, single tokens, one of which shares its pages
ROWS = [(0, 33), (40, 50), (70, 1), (45, 1), (45, 1)]


def ids(count, seed=0):
    return torch.randint(0, 50, (count,), generator=torch.Generator().manual_seed(seed))


def asking(batch, rows, tokens=0):
    (group,) = batch.groups
    batch.asks, batch.mass_tokens = rows, tokens
    runs = group.page_table.shape[1] * group.tokens_per_page // (tokens or group.tokens_per_page)
    batch.mass = torch.zeros(batch.rows, runs)
    return batch


def run(program, weights, page_size, dtype, asks, *, blank=False, tokens=0):
    """Hidden states of a step over filled contexts, and the mass of the rows that ask."""
    kv = kv_for(weights, 60, dtype, page_size)
    if blank:
        kv.pool.zero_()
    tables = own_pages([start + count for start, count in ROWS], kv)
    shared = 45 // page_size
    tables[0][4] = [*tables[0][3][:shared], *tables[0][4][shared:]]
    contexts = [(0, start) for start, _ in ROWS[:4]] + [(shared * page_size, 45 - shared * page_size)]
    context = batch_of(contexts, tables, kv)
    program.forward(ids(context.tokens), context, kv)
    batch = batch_of(ROWS, tables, kv)
    if asks:
        asking(batch, asks, tokens)
    return program.forward(ids(batch.tokens, 1), batch, kv), batch.mass


@pytest.mark.parametrize(("dtype", "page_size"), [("float16", 16), ("float32", 5), ("float32", 48)])
@pytest.mark.parametrize("threads", [1, 3])
def test_mass_is_what_probabilities_add_up_to(isa, dtype, page_size, threads):
    weights = random_decoder(heads=6, kv_heads=2)
    program, twin = NativeProgram(weights, threads=threads, isa=isa), TwinProgram(weights)
    asks = [0, 1, 2, 4]
    plain, _ = run(program, weights, page_size, dtype, [])
    hidden, mass = run(program, weights, page_size, dtype, asks)
    assert torch.equal(hidden, plain), "asking changes no bit, of nobody"
    _, again = run(program, weights, page_size, dtype, asks)
    assert torch.equal(mass, again), "nor does who computed what"
    _, expected = run(twin, weights, page_size, dtype, asks, blank=True)
    torch.testing.assert_close(mass, expected, atol=0.05, rtol=0.02)  # int8 ties fall either way
    assert mass[3].sum() == 0
    paid = torch.tensor([count * 6 * weights.layers for _, count in ROWS], dtype=torch.float32)
    torch.testing.assert_close(mass.sum(1)[asks], paid[asks])


def test_mass_of_tokens_adds_up_to_that_of_pages(isa):
    weights = random_decoder(heads=6, kv_heads=2)
    program, twin = NativeProgram(weights, threads=2, isa=isa), TwinProgram(weights)
    asks = [0, 1, 4]
    hidden, pages = run(program, weights, 16, "float16", asks)
    same, tokens = run(program, weights, 16, "float16", asks, tokens=1)
    assert torch.equal(hidden, same)
    torch.testing.assert_close(tokens.unflatten(1, (-1, 16)).sum(2), pages)
    _, expected = run(twin, weights, 16, "float16", asks, blank=True, tokens=1)
    torch.testing.assert_close(tokens, expected, atol=0.05, rtol=0.02)


def test_too_little_room_is_refused(isa):
    weights = random_decoder()
    kv = kv_for(weights, 20, "float16", 16)
    batch = asking(batch_of([(0, 40)], own_pages([40], kv), kv), [0])
    batch.mass = torch.zeros(1, 2)
    with pytest.raises(QuireError, match="shapes"):
        NativeProgram(weights, threads=1, isa=isa).forward(ids(40), batch, kv)
    batch.mass, batch.mass_tokens = torch.zeros(1, 39), 1
    with pytest.raises(QuireError, match="shapes"):
        NativeProgram(weights, threads=1, isa=isa).forward(ids(40), batch, kv)
