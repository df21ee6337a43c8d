"""Fixtures shared by the whole suite. The default model is fetched once, loaded and served once per process."""

import functools
import gc
import logging
import os
from collections import Counter

if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    # A share of the cores: threads of several processes that wait for each other on the same ones would mostly wait.
    _cores, _worker = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    _mine = _cores[_worker % len(_cores) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]
    os.sched_setaffinity(0, _mine)
    os.environ.setdefault("OMP_NUM_THREADS", str(len(_mine)))

import torch

if not torch.cuda.is_available():  # read when triton is first imported, which others may do before our kernels
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

# Files that ask for the default model in fp32, ours or transformers': both take long to load and much memory, so that
# one process runs all of them; likewise those that ask for its tokenizer as transformers reads it.
FP32 = {
    "test_branching.py", "test_embeddings.py", "test_gguf_models.py", "test_greedy.py", "test_llm.py",
    "test_native_accuracy.py",
}  # fmt: skip
TOKENIZER = {"test_detokenizer.py", "test_template.py", "test_tokenizer.py"}

# What takes longest, and begins first: the last to begin would run alone while other processes have nothing left.
LONGEST = [
    "test_api_workers.py",
    "fp32", "test_faults.py", "test_speculation.py", "test_link_faults.py", "test_context_tensor.py", "test_tiers.py",
    "test_triton_attention.py", "test_tensor_parallel.py", "test_context_parallel.py", "test_combinations.py",
    "test_family_engine.py", "test_attacks.py", "test_page.py", "test_hybrid_engine.py", "test_scheduler_property.py",
    "test_families.py", "tokenizer", "test_process.py", "test_commands.py", "test_triton_stages.py",
    "test_handover_engine.py", "test_structured.py", "test_prompts.py", "test_batch_shares.py", "test_dashboard.py",
    "test_drafts_beside_others.py", "test_lora_api.py", "test_evicting_engine.py", "test_sleep.py", "test_helpers.py",
    "test_native_program.py", "test_house.py", "test_chunk_reuse_engine.py", "test_thinking.py",
    "test_sparse_engine.py", "test_openai_extensions.py", "test_malformed_checkpoints.py", "test_many_models.py",
    "test_quantize_checkpoint.py", "test_blend_api.py", "test_kivi_engine.py", "test_planning.py",
    "test_sampler_oracle.py", "test_failover.py", "test_bench_commands.py", "test_context.py", "test_held_weights.py",
    "test_schemas.py", "test_small_pages.py", "test_structured_requests.py", "test_openai_client.py",
    "test_native_sampling.py", "test_held_model.py", "test_lora_engine.py", "test_native_sparse.py",
]  # fmt: skip


def together(file):
    """The name of what runs in one process: a file, or several."""
    name = os.path.basename(file)
    return "fp32" if name in FP32 else "tokenizer" if name in TOKENIZER else name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """`--dist loadfile`: the tests of a file run in one process, files in the order in which they are collected."""
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return together(super()._split_scope(nodeid))

    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return Together(config, log)


@pytest.hookimpl(trylast=True)  # what is not run does not count
def pytest_collection_modifyitems(items):
    asking = {item.path.name for item in items if {"llm", "oracle"} & set(getattr(item, "fixturenames", ()))}
    if unknown := asking - FP32:
        raise pytest.UsageError(f"{sorted(unknown)} ask for a model in fp32; name them in FP32, in tests/conftest.py")
    if "PYTEST_XDIST_WORKER" in os.environ:
        sizes = Counter(together(item.path.name) for item in items)
        order = sorted(sizes, key=lambda name: (LONGEST.index(name) if name in LONGEST else len(LONGEST), -sizes[name]))
        places = {name: place for place, name in enumerate(order)}
        items.sort(key=lambda item: places[together(item.path.name)])


def pytest_collection_finish():
    """All modules are imported by now, a million objects that stay: looking for garbage among them takes a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # else what is left at the end is called a leak


@pytest.fixture(autouse=True)
def root_logger():
    """As the test found it: a command run in this process sets it up for its own, and the next test would read that."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def certificates():
    """Those that clients trust, read once: one made for a single request would read all of them, a fifth of a second,
    also where it speaks plain HTTP."""
    import ssl

    import certifi

    make, usual = ssl.create_default_context, {"cafile": certifi.where()}
    known = functools.cache(lambda: make(**usual))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ssl, "create_default_context", lambda *a, **k: make(*a, **k) if a or k != usual else known())
        yield


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub on the loopback, and an empty cache of models."""
    from loopback_hub import serving

    with serving(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory):
    """A small sound GGUF file, written by the gguf package."""
    import gguf
    import numpy as np

    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_tensor("w", np.arange(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture(scope="session")
def default_model():
    """The embedded default model on disk."""
    from quire.assets import resolve

    return resolve("smollm2-135m", progress=False)


@pytest.fixture(scope="session")
def llm(default_model):
    """The default model in fp32, in this process."""
    from quire import LLM

    with LLM("smollm2-135m", dtype="float32", kv_memory="1G") as engine:
        yield engine


@pytest.fixture(scope="session")
def fast(default_model):
    """The default model in this process as it runs unless told otherwise: compiled, several times as fast as fp32."""
    from quire import LLM

    with LLM("smollm2-135m", kv_memory="256M") as engine:
        yield engine


@pytest.fixture(scope="session")
def oracle(default_model):
    """transformers over the same GGUF, fp32."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    path = default_model.path
    with pytest.MonkeyPatch.context() as patched:
        for slow in ("GGUFReader", "get_tensor_name_map"):  # asked for the same twice, and once a module
            patched.setattr(gguf, slow, functools.cache(getattr(gguf, slow)))
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def live_server(default_model):
    """Base URL of a server on the default model, its engine in a process of its own."""
    from quire.engine.client import AsyncClient
    from quire.engine.frontend import Frontend
    from quire.serve import background_server
    from quire.text import TextModel
    from quire.types.config import EngineOptions

    async def frontend():
        client = await AsyncClient.open(EngineOptions.of(kv_memory="512M"), process=True)
        return Frontend(client, TextModel.load(default_model), default_model.name)

    with background_server(frontend) as url:
        yield url
