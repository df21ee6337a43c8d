"""Weights that wait in host memory: the same tensors with the same values, and memory that is used again."""

import torch

from quire.runtime.host_weights import HostWeights


def test_tensors_come_back_as_they_were_and_the_memory_is_used_again():
    torch.manual_seed(0)
    plain, turned = torch.randn(4, 6), torch.randn(6, 4).t()
    tied = plain
    values = plain.clone(), turned.clone()
    held = HostWeights()
    addresses = []
    for round_ in range(2):
        held.take([plain, turned, tied])
        addresses.append((plain.data_ptr(), turned.data_ptr()))
        held.give_back(torch.device("cpu"))
        assert torch.equal(plain, values[0] + round_) and torch.equal(turned, values[1]) and turned.stride() == (1, 4)
        assert tied is plain
        plain.data = plain.data + 1  # what changes in between is kept, too
    assert addresses[0] == addresses[1]
