"""Every GGUF block type against the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from quire.kernels.reference.dequant import FLOATS, FORMATS, dequantize
from quire.types.errors import ModelFileError

KINDS = ["F32", "F16", "BF16", *FORMATS]
QUANTISABLE = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


def theirs(raw: np.ndarray, kind: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", QUANTISABLE)
def test_quantised_values(kind):
    values = np.random.default_rng(0).normal(size=(6, 512)).astype(np.float32)
    raw = gguf.quants.quantize(values, GGMLQuantizationType[kind]).view(np.uint8)
    ours = dequantize(torch.from_numpy(raw), kind).float().numpy()
    assert ours.shape == values.shape
    np.testing.assert_array_equal(ours, theirs(raw, kind))
    np.testing.assert_allclose(ours, values, atol=0.35)


@pytest.mark.parametrize("kind", FORMATS)
def test_any_bytes(kind):
    """Blocks as no quantiser would make them, NaN and infinite scales included."""
    block = FORMATS[kind]
    expected = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    assert (block.elements, block.nbytes) == expected
    raw = np.random.default_rng(1).integers(0, 256, size=(64, 5 * block.nbytes), dtype=np.uint8)
    ours = dequantize(torch.from_numpy(raw), kind).numpy()
    assert np.isfinite(ours).mean() > 0.8
    np.testing.assert_array_equal(ours, theirs(raw, kind))


def test_all_promised_kinds_are_there():
    promised = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
    promised |= {"IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "MXFP4"}
    assert promised <= {*FLOATS, *FORMATS}


def test_refusals():
    with pytest.raises(ModelFileError, match=r"TQ1_0.*known"):
        dequantize(torch.zeros(1, 54, dtype=torch.uint8), "TQ1_0")
    with pytest.raises(ModelFileError, match="whole number"):
        dequantize(torch.zeros(1, 33, dtype=torch.uint8), "Q8_0")
