"""Triton kernels run here in interpreter mode: on a CPU, as numpy. The mode is fixed when triton is first imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

interpreter = pytest.importorskip("triton.runtime.interpreter")
_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor, scope):
    """The interpreter turns one-element arrays into range bounds with int(), which numpy 2.4 no longer allows."""
    _patch_tensor(tensor, scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_and_index


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
