"""Rows that ask for their attention by page and by token, in one step."""

from types import SimpleNamespace

import torch

from quire.runtime.attention_measures import measure_attention, measured_attention
from quire.types.plan import Row


def batch_of(kv_lens):
    group = SimpleNamespace(tokens_per_page=4)
    return SimpleNamespace(
        rows=len(kv_lens), kv_lens=kv_lens, groups=[group], positions=torch.zeros(1), asks=[], mass=None, mass_tokens=0
    )


def test_pages_and_tokens_together():
    rows = [Row(0, 4, 2, mass=True), Row(1, 0, 3), Row(2, 0, 5, token_mass=True)]
    batch = batch_of([6, 3, 5])
    measure_attention(batch, rows)
    assert batch.asks == [0, 2] and batch.mass.shape == (3, 6) and batch.mass_tokens == 1
    batch.mass += torch.arange(1.0, 7.0)
    found = measured_attention(batch, rows)
    assert {row: paid.tolist() for row, paid in found.items()} == {0: [10.0, 11.0], 2: [1.0, 2.0, 3.0, 4.0, 5.0]}


def test_pages_alone():
    rows = [Row(0, 4, 2, mass=True), Row(1, 0, 3)]
    batch = batch_of([6, 3])
    measure_attention(batch, rows)
    assert batch.mass.shape == (2, 2) and batch.mass_tokens == 4
    assert list(measured_attention(batch, rows)) == [0]
    nobody = batch_of([6])
    measure_attention(nobody, [Row(0, 4, 2)])
    assert nobody.mass is None and measured_attention(nobody, [Row(0, 4, 2)]) == {}
