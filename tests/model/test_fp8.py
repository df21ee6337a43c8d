"""8-bit weights: what is stored is close to what was put, row by row (products need a GPU's matrix units)."""

import pytest
import torch

from quire.kernels.reference.fp8_rows import LARGEST
from quire.model.quantization.fp8 import Fp8Scheme
from quire.runtime.hardware import Hardware, resolve
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError


def test_rows_keep_their_values_to_a_part_in_sixteen():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 96, generator=generator) * torch.logspace(-6, 6, 40)[:, None]
    scheme = Fp8Scheme()
    state = scheme.create(50, 96, torch.device("cpu"), torch.bfloat16)
    scheme.put(state, 10, rows)
    back = state["weight"][10:].float() * state["scale"][10:, None]
    assert ((back - rows).abs() / rows.abs().amax(1, True)).max() < 1 / 25
    assert state["weight"][10:].float().abs().amax(1).gt(LARGEST / 2).all()


def test_rows_lose_less_than_by_a_scale_for_their_largest():
    rows = torch.randn(200, 96, generator=torch.Generator().manual_seed(0))
    scheme = Fp8Scheme()
    state = scheme.create(200, 96, torch.device("cpu"), torch.bfloat16)
    scheme.put(state, 0, rows)
    scale = rows.abs().amax(1, True) / LARGEST
    nearest = ((rows / scale).to(torch.float8_e4m3fn).float() * scale - rows).square().sum(1)
    found = (state["weight"].float() * state["scale"][:, None] - rows).square().sum(1)
    assert found.sum() < 0.75 * nearest.sum()


@pytest.mark.parametrize("scales", [torch.full((40, 1), 0.0123), torch.logspace(-5, 1, 40)[:, None]])
def test_what_has_been_8_bit_floats_stays_what_it_is(scales):
    """Published checkpoints, with a scale for a matrix or for each row, come as bf16."""
    eight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)).mul(90).clamp(-448, 448)
    eight = eight.to(torch.float8_e4m3fn).float()
    scheme = Fp8Scheme()
    state = scheme.create(40, 96, torch.device("cpu"), torch.bfloat16)
    scheme.put(state, 0, (eight * scales).bfloat16())
    back = state["weight"].float() * state["scale"][:, None]
    torch.testing.assert_close(back, eight * scales, rtol=1e-2, atol=0)


def test_a_row_of_zeros_stays_zeros():
    scheme = Fp8Scheme()
    state = scheme.create(1, 32, torch.device("cpu"), torch.bfloat16)
    scheme.put(state, 0, torch.zeros(1, 32))
    assert (state["weight"].float() * state["scale"][:, None]).eq(0).all()


def test_a_cpu_refuses():
    with pytest.raises(ConfigError, match="GPU"):
        resolve(EngineOptions.of(dtype="fp8"), Hardware("cpu", "test", 1 << 30, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_product_follows_plain_one():
    scheme, device = Fp8Scheme(), torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(96, 64, generator=generator, device=device)
    state = scheme.create(96, 64, device, torch.bfloat16)
    scheme.put(state, 0, weight)
    for rows in (1, 7, 64):
        x = torch.randn(rows, 64, generator=generator, device=device).bfloat16()
        found, truth = scheme.apply(state, x, None).float(), x.float() @ weight.t()
        assert (found - truth).norm() / truth.norm() < 0.06
