"""How many pages there are: what memory has room for beside weights and work."""

import json
import weakref
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from quire import LLM
from quire.bench.suite import DATA
from quire.model.families.llama import LlamaFamily
from quire.runtime.capacity import GIB, kv_capacity, state_room, working_memory
from quire.runtime.executors.local_executor import LocalExecutor
from quire.runtime.hardware import Hardware, resolve
from quire.runtime.slot_state import SlotState
from quire.runtime.staging import Staging
from quire.runtime.worker import ForwardWorker
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError
from quire.types.kv import StateGroup, StateShape
from quire.types.plan import Capacity

CONFIG = json.loads((DATA / "llama-3.1-8b" / "config.json").read_text())
LLAMA = LlamaFamily().spec(CONFIG)
LAYOUT = LLAMA.kv_layout(page_size=16, dtype="bfloat16")


def room(memory, spec=LLAMA, layout=LAYOUT, **asked):
    options = EngineOptions.of(**asked)
    gpu = Hardware("cuda:0", "a GPU", memory, 16)
    resolved = resolve(options, gpu)
    working = working_memory(options, resolved, spec, LAYOUT, memory)
    return working, kv_capacity(options, gpu, layout, slots=resolved.max_seqs, working=working)


def test_steps_end_in_time_unless_asked_otherwise():
    gpu, cpu = Hardware("cuda:0", "a GPU", GIB, 16), Hardware("cpu", "a CPU", GIB, 2)
    assert [resolve(EngineOptions.of(), where).step_target for where in (gpu, cpu)] == [0.3, 0.3]
    for asked in (0.0, 0.05):
        assert {resolve(EngineOptions.of(step_target=asked), where).step_target for where in (gpu, cpu)} == {asked}
    with pytest.raises(ConfigError, match="step_target"):
        resolve(EngineOptions.of(step_target=-1.0), gpu)


@pytest.mark.parametrize("memory", [12 * GIB, 24 * GIB, 124 * GIB])
def test_steps_have_what_they_need_on_small_cards_and_large(memory):
    """On an H200 a step of 8,192 tokens allocated 0.9 GiB, and another 3 were held in pieces or by libraries."""
    working, (pages, why) = room(memory)
    assert 5 * GIB < working < 9 * GIB
    assert memory - working - LAYOUT.page_bytes < pages * LAYOUT.page_bytes <= memory - working
    assert f"but for {working / GIB:.1f} GiB to work in" in why


def test_a_first_start_of_a_small_model_has_room_to_compile():
    """On an H200 it found none in 1.9 GiB, and cuDNN none in 3."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16}
    small = LlamaFamily().spec(CONFIG | sizes | {"head_dim": 64, "vocab_size": 8192, "max_position_embeddings": 4096})
    layout = small.kv_layout(page_size=16, dtype="bfloat16")
    assert room(138 * GIB, small, layout)[0] == 4 * GIB and room(8 * GIB, small, layout)[0] <= 2 * GIB


def test_smaller_steps_leave_more_room():
    whole, (pages, _) = room(24 * GIB)
    less, (more, _) = room(24 * GIB, max_batch_tokens=2048, max_seqs=64, max_model_len=8192)
    assert less < whole / 2 and more > pages


def test_a_context_that_memory_cannot_hold_takes_no_room():
    """A million positions need not be provided for where pages for some ten thousand are."""
    wide = replace(LLAMA, max_position=1 << 20)
    working, (pages, _) = room(9 * GIB, wide)
    assert working < 7 * GIB and pages * 16 > 16_000


def test_draft_tokens_have_logits_too():
    alone, drafting = room(60 * GIB)[0], room(60 * GIB, speculation="ngram", draft_tokens=7)[0]
    assert drafting - alone == 2 * 2 * (8192 - 1024) * LLAMA.vocab_size


def test_what_is_asked_for_is_given():
    assert room(24 * GIB, kv_memory="3G")[1] == (3 * GIB // LAYOUT.page_bytes, "KV memory 3.00 GiB: as asked")
    assert room(24 * GIB, kv_pages=70)[1][0] == 71
    assert room(2 * GIB)[1][0] == 0


def test_more_kv_memory_than_is_free_is_refused(default_model):
    with pytest.raises(ConfigError, match=r"kv_memory 900T is more than the [\d.]+ GiB of memory that are free"):
        LLM("smollm2-135m", kv_memory="900T")


def test_states_have_half_of_the_room_unless_asked_otherwise():
    """Cells for every sequence twice, and for snapshots; fewer sequences where their states would leave no room."""
    shapes = StateShape((3, 1 << 16), (1 << 16,)), StateShape((1, 1 << 18))
    layout = structs.replace(LAYOUT, states=(StateGroup((4, 5), shapes[0]), StateGroup((6,), shapes[1])))
    assert (LAYOUT.state_bytes, layout.state_bytes) == (0, 3 << 20)
    assert (LAYOUT.state_pages, layout.state_pages) == (0, 2), "of 2 MiB"
    assert layout.alignment == LAYOUT.alignment == 16
    options = EngineOptions.of(kv_memory="2G")
    assert state_room(options, LAYOUT, 64, 2 * GIB) == (64, 0, 0)
    assert state_room(options, layout, 64, 2 * GIB) == (64, 257, GIB)
    assert state_room(options, layout, 1024, 2 * GIB) == (85, 257, GIB)
    assert state_room(EngineOptions.of(max_seqs=200), layout, 200, 2 * GIB) == (200, 601, 600 * (4 << 20))
    assert state_room(EngineOptions.of(kv_snapshots=7), layout, 64, 2 * GIB) == (64, 136, 135 * (4 << 20))
    drafting = EngineOptions.of(speculation="ngram", draft_tokens=4)
    assert state_room(drafting, layout, 1024, 2 * GIB) == (36, 113, GIB), "a state for each draft token"
    plain, recurrent = (room(24 * GIB, layout=which, max_seqs=64, kv_memory="2G")[1][0] for which in (LAYOUT, layout))
    assert plain == 2 * GIB // LAYOUT.page_bytes and recurrent == GIB // LAYOUT.page_bytes
    assert room(24 * GIB, layout=layout, max_seqs=64, kv_memory="200M")[1][0] == 0, "not even the states fit"


class Watched:
    """A model that only says what it was asked."""

    def __init__(self):
        self.seen = []
        self.spec = LLAMA

    def forward(self, input_ids, batch, kv, *, last):
        assert (input_ids == 0).all()
        self.seen.append((len(input_ids), batch.counts, batch.kv_lens, last))
        return torch.zeros(batch.rows, 4)

    def logits(self, hidden):
        self.seen.append(len(hidden))


@pytest.mark.parametrize(
    ("context", "largest"), [(64, [40, 1, 1]), (30, [30, 10, 1]), (16, [16, 16, 8]), (8, [8, 8, 8])]
)
def test_the_largest_step_is_warmed_up(context, largest):
    """All of the budget in as few rows as may be, and a token for every other slot. Then prompts."""
    worker, cpu = object.__new__(ForwardWorker), torch.device("cpu")
    capacity = Capacity(pages=9, slots=3, max_model_len=64, context=context, max_batch_tokens=40, depth=1, drafts=1)
    worker.capacity, worker.slots = capacity, SlotState(LAYOUT, capacity, cpu, Staging(cpu, 1))
    worker.slots.tokens[:3] = -1
    worker.device, worker._kv, worker.model, worker._states = cpu, None, Watched(), None
    worker.warm_up()
    padded = [largest[0] - 1]
    steps = [largest, largest[:1], largest[:1] * min(40 // largest[0], 3), padded, [1] * 6]
    assert worker.model.seen == [x for step in steps for x in ((sum(step), step, step, True), len(step))]


@pytest.mark.parametrize(
    ("error", "message"),
    [(torch.OutOfMemoryError, "CUDA out of memory"), (RuntimeError, "Triton Error [CUDA]: out of memory")],
)
def test_an_engine_that_finds_no_memory_says_what_to_lower_and_gives_back_what_it_took(monkeypatch, error, message):
    executor, made = object.__new__(LocalExecutor), []

    class Worker:
        """Referred to by what it refers to, as workers and their captured steps are."""

        def __init__(self):
            self.itself = self

    def too_large():
        worker = Worker()
        made.append(weakref.ref(worker))
        raise error(message)

    monkeypatch.setattr(executor, "_warmed_up", too_large, raising=False)
    executor._capacity = Capacity(pages=900, slots=30, max_model_len=64, max_batch_tokens=4000, depth=1)
    with pytest.raises(ConfigError, match=r"900 KV pages .* 4,000 tokens .* 30 answers .* lower kv_memory") as failed:
        executor.start()
    assert made[0]() is None and failed.value.__context__ is None
