"""Sleeping on a CPU: memory is given back, and whoever asks next gets the answer they would have got."""

import gc
import shutil
import weakref

import pytest
import torch

from quire import LLM, SamplingParams
from quire.assets import resolve
from quire.runtime import worker
from quire.runtime.executors import local_executor
from quire.runtime.executors.local_executor import LocalExecutor
from quire.types.errors import ConfigError, InputError

PROMPT = "The capital of France is"
LONG = list(range(1, 51))
PARAMS = SamplingParams(temperature=0, max_tokens=8)
FORMS = {
    "compiled": {},
    "torch": {"dtype": "float32", "max_model_len": 64},
    "scaled keys": {"kv_dtype": "int8-kivi"},
    "draft model": {"speculation": "draft:smollm2-135m"},
    "tier": {"kv_host": "16M"},
    "overlap": {"depth": 2},
}
SMALL = {"torch", "tier", "overlap"}  # of which the model matters less than what is around it


@pytest.mark.parametrize("form", FORMS)
def test_answers_after_each_level_are_those_before(default_model, dense_model, form):
    model = dense_model if form in SMALL else "smollm2-135m"
    with LLM(model, **{"kv_memory": "32M", "max_model_len": 256} | FORMS[form]) as llm:
        first = llm.generate(PROMPT, PARAMS)[0].outputs[0]
        executor = llm._link.core.executor
        for level in (1, 2, 1):
            pages, model = weakref.ref(executor._worker.pages), weakref.ref(executor.model)
            gc.disable()
            try:
                llm.sleep(level)
                assert pages() is None and (model() is None) == (level == 2), "nothing waits for the garbage collector"
            finally:
                gc.enable()
            assert llm.stats().sleep_level == level and llm.stats().pages_cached == 0
            again = llm.generate(PROMPT, PARAMS)[0].outputs[0]
            assert again.token_ids == first.token_ids and llm.stats().sleep_level == 0
        llm.sleep()
        llm.wake()
        assert llm.stats().sleep_level == 0
        with pytest.raises(InputError, match="levels 1 and 2"):
            llm.sleep(3)


@pytest.mark.parametrize("form", [pytest.param("compiled", marks=pytest.mark.slow), "torch", "draft model"])
def test_a_wake_that_loads_weights_shows_how_it_gets_on(default_model, dense_model, form):
    """Or one that takes longer than the watchdog waits would be taken for a hang."""
    model = dense_model if form == "torch" else "smollm2-135m"
    with LLM(model, **{"kv_memory": "32M", "max_model_len": 64} | FORMS[form]) as llm:
        core, beats = llm._link.core, []
        core.on_progress = lambda: beats.append(1)
        llm.sleep(1)
        llm.wake()
        assert len(beats) == 1, "nothing is loaded"
        llm.sleep(2)
        llm.wake()
        tensors = len(resolve(model).open().tensors())
        assert len(beats) - 2 == (2 if form == "draft model" else 1) * tensors
        core.on_progress = lambda: None


@pytest.mark.slow
def test_memory_goes_back_to_the_system(default_model):
    """Pages at level 1, weights at level 2: half a gigabyte in float32."""
    with LLM("smollm2-135m", kv_memory="128M", max_model_len=2048, dtype="float32", process=True) as llm:
        llm.generate([list(range(100 + n, 600 + n)) for n in range(3)], PARAMS)
        awake = llm.stats().memory
        llm.sleep(1)
        first = llm.stats().memory
        llm.sleep(2)
        second = llm.stats().memory
        assert awake - first > 40 << 20 and first - second > 300 << 20, (awake, first, second)


def test_level_2_gives_up_what_level_1_had_kept(dense_model, monkeypatch):
    """On a GPU, level 1 keeps weights in host memory for the next time; the second level has no next time."""
    monkeypatch.setattr(LocalExecutor, "offloads", True)
    with LLM(dense_model, kv_memory="32M", **FORMS["torch"]) as llm:
        executor = llm._link.core.executor
        weights = [weakref.ref(tensor) for tensor in executor.model.weights()]
        assert weights
        llm.sleep()
        llm.sleep(level=2)
        assert not any(ref() is not None for ref in weights)


def test_a_model_that_changed_meanwhile_is_not_woken(dense_model, tmp_path):
    """Its files are opened again: pages and answers of the one before would be taken for its own."""
    model = shutil.copytree(dense_model, tmp_path / "model")
    weights = model / "model.safetensors"
    before = weights.read_bytes()
    with LLM(str(model), kv_memory="32M", **FORMS["torch"]) as llm:
        first = llm.generate(PROMPT, PARAMS)[0].outputs[0]
        llm.sleep(2)
        weights.write_bytes(before[:-64] + bytes(64))
        with pytest.raises(ConfigError, match="its files were changed"):
            llm.wake()
        weights.write_bytes(before)
        assert llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids == first.token_ids


def test_a_wake_does_not_run_the_largest_step_again(dense_model, monkeypatch):
    """That it fits was seen at the start. A CPU runs none: what comes before it is all that a wake may do."""
    with LLM(dense_model, kv_memory="32M", **FORMS["torch"]) as llm:
        executor = llm._link.core.executor
        first = llm.generate(PROMPT, PARAMS)[0].outputs[0]
        monkeypatch.setattr(executor, "_warmed_up", lambda: pytest.fail("the largest step ran"))
        llm.sleep()
        assert llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids == first.token_ids


def test_a_wake_that_finds_no_memory_says_so_and_may_be_tried_again(dense_model, monkeypatch):
    with LLM(dense_model, kv_memory="32M", **FORMS["torch"]) as llm:
        executor = llm._link.core.executor
        first = llm.generate(PROMPT, PARAMS)[0].outputs[0]
        llm.sleep()

        def short():
            raise RuntimeError("CUDA out of memory")

        monkeypatch.setattr(executor, "_new_worker", short)
        with pytest.raises(ConfigError, match=r"no memory left for weights, [\d,]+ KV pages and a step"):
            llm.wake()
        assert llm.stats().sleep_level == 1
        monkeypatch.undo()
        assert llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids == first.token_ids


def test_a_wake_asks_whether_the_largest_step_would_still_fit(monkeypatch):
    """Another engine that sleeps takes a little of the device, which was free at the start."""
    executor = object.__new__(LocalExecutor)
    executor._device, executor._peak_bytes = torch.device("cuda"), 100
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 60)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40, 1000))
    executor._check_peak()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (39, 1000))
    with pytest.raises(RuntimeError, match="out of memory"):  # which a wake tells as it tells torch's own
        executor._check_peak()


def test_cached_pages_wait_in_half_of_the_memory_that_weights_leave(dense_model, monkeypatch):
    """As on a GPU; they are moved some at a time, for gathered pages take memory beside the others."""
    monkeypatch.setattr(LocalExecutor, "offloads", True)
    with LLM(dense_model, kv_memory="32M", **FORMS["torch"]) as llm:
        executor = llm._link.core.executor
        first = llm.generate([LONG], PARAMS)[0].outputs[0]
        cached, size = llm.stats().pages_cached, executor.layout.page_bytes
        assert cached > 2
        weights = sum(tensor.nbytes for tensor in executor.model.weights())
        monkeypatch.setattr(local_executor, "available_bytes", lambda: weights + 2 * 2 * size)
        monkeypatch.setattr(worker, "GATHERED_BYTES", size)
        assert executor.room_asleep() == 2
        llm.sleep()
        assert llm.stats().pages_cached == 2
        again = llm.generate([LONG], PARAMS)[0].outputs[0]
        assert again.token_ids == first.token_ids
        monkeypatch.setattr(local_executor, "available_bytes", lambda: 2 * cached * size)
        assert executor.room_asleep() == cached, "host memory that weights had is kept for them"
        llm.sleep()
        assert llm.stats().pages_cached == cached
        again = llm.generate([LONG], PARAMS)[0]
        assert again.outputs[0].token_ids == first.token_ids and llm.stats().cached_tokens > 0
        monkeypatch.setattr(local_executor, "available_bytes", lambda: 0)
        llm.sleep()
        assert llm.stats().pages_cached == 0
