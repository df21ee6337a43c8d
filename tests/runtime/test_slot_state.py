"""What slots hold on the device is what plans said, by copies or by a scatter."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from quire.runtime.slot_state import MAX_COPIES, SlotState
from quire.runtime.staging import Staging
from quire.types.kv import KVGroup, KVLayout
from quire.types.plan import Admit, Capacity, PageDelta, StepPlan, Write
from quire.types.sampling_params import SamplingParams

SLOTS, LENGTH, SIZE = 24, 64, 4
LAYOUT = KVLayout(
    tuple(KVGroup(layers=(i,), tokens_per_page=SIZE, kv_heads=1, head_dim=1) for i in range(2)), "float32"
)


@pytest.mark.parametrize("most", [1, MAX_COPIES, MAX_COPIES + 1, SLOTS])
def test_tokens_and_tables_follow_the_plans(most: int) -> None:
    rng, cpu = Random(most), torch.device("cpu")
    capacity = Capacity(pages=999, slots=SLOTS, max_model_len=LENGTH, max_batch_tokens=64, depth=1)
    state = SlotState(LAYOUT, capacity, cpu, Staging(cpu, 1))
    tokens = np.zeros((SLOTS, LENGTH), int)
    tables = np.zeros((2, SLOTS, LENGTH // SIZE), int)
    for step in range(30):
        plan = StepPlan(step=step)
        slots = rng.sample(range(SLOTS), rng.randint(1, most))
        for slot in slots:
            ids = [rng.randrange(1 << 30) for _ in range(rng.randint(1, LENGTH))]
            unread = rng.choice([0, rng.randint(0, len(ids))])
            if rng.random() < 0.5:
                plan.admits.append(
                    Admit(slot, "a", ids, len(ids), SamplingParams(), seed=0, branch=0, stop_ids=[], unread=unread)
                )
                tokens[slot, unread : len(ids)] = ids[unread:]
            else:
                plan.writes.append(Write(slot, unread, ids[unread:]))
                tokens[slot, unread : len(ids)] = ids[unread:]
            for group in range(2):
                at = rng.randrange(LENGTH // SIZE)
                pages = [rng.randrange(1, 999) for _ in range(rng.randint(1, LENGTH // SIZE - at))]
                plan.deltas.append(PageDelta(slot, group, at, pages))
                tables[group, slot, at : at + len(pages)] = pages
        state.apply(plan)
        assert state.tokens[:SLOTS].tolist() == tokens.tolist()
        assert [table[:SLOTS].tolist() for table in state._tables] == tables.tolist()
