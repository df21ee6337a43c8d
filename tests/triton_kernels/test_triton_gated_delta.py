"""The gated delta rule of one token against plain torch."""

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.state_views import Run, apart
from quire.kernels.triton.gated_delta_kernel import gated_delta_step
from quire.model.blocks.gated_delta import _step, _unit


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(("key_heads", "heads", "key", "value"), [(2, 4, 16, 32), (1, 1, 32, 64)])
def test_one_token_of_each_row(key_heads, heads, key, value, tiled):
    torch.manual_seed(heads)
    rows, numbers = 3, heads * key * value
    cells = torch.randn(7, numbers + 24)
    states = cells[:, 24:].unflatten(1, (heads, key, value))
    qkv = torch.randn(rows, 2 * key_heads * key + heads * value)
    decay, beta = -torch.rand(rows, heads), torch.rand(rows, heads)
    sources, targets = torch.tensor([1, 5, 5]), torch.tensor([1, 2, 6])
    q, k, v = F.silu(qkv).split((key_heads * key, key_heads * key, heads * value), dim=1)
    served = torch.arange(heads) % key_heads if tiled else torch.arange(heads) // (heads // key_heads)
    q, k = (_unit(x.unflatten(1, (key_heads, -1)))[:, served] for x in (q, k))
    rule = q * key**-0.5, k, v.unflatten(1, (heads, -1)), decay, beta
    wanted, behind = _step(rule, states[sources])
    untouched = cells[[0, 3, 4, 5]].clone()
    got = gated_delta_step(qkv, decay, beta, states, sources, targets, key_heads, tiled=tiled)
    torch.testing.assert_close(got, wanted.flatten(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[targets], behind, atol=1e-5, rtol=1e-5)
    assert torch.equal(cells[[0, 3, 4, 5]], untouched)


def test_a_cell_that_changes_hands_within_a_step_keeps_rows_from_one_launch():
    own = [Run(0, 1, 1, 1, 0), Run(1, 1, 2, 3, 0), Run(2, 1, 2, 4, 0)]
    assert apart(own)
    assert not apart([*own, Run(3, 1, 5, 2, 0)])  # reads 5, writes what two others read
