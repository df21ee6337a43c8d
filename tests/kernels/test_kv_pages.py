"""Pages as tensors: what is written to slots is read back, in any layout of groups."""

import torch

from quire.kernels.kv import KVViews, allocate_kv, read_tokens, write_tokens
from quire.types.kv import layout_for


def test_tokens_are_read_back_as_they_were_written():
    layout = layout_for([None, 8, None], kv_heads=2, head_dim=4, page_size=4, dtype="float32")
    kv = KVViews(allocate_kv(layout, 6, "cpu"), layout)
    slots = torch.tensor([21, 4, 7])
    k, v = torch.randn(2, 3, 2, 2, 4)
    write_tokens(kv, 0, slots, k, v)
    got = read_tokens(kv, 0, slots)
    assert torch.equal(got[0], k) and torch.equal(got[1], v)
    assert torch.equal(kv.layers[2].k_pages[5, 1], k[0, 1])
    assert kv.pool.view(torch.float32).count_nonzero() == k.numel() + v.numel()
