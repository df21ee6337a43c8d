"""Fixtures shared by the whole suite. The default model is fetched once, loaded and served once per process."""

import os

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

# What takes long to load and much memory is loaded in one process only: fixture → the group of its files.
LARGE = {"llm": "fp32", "oracle": "fp32", "theirs": "tokenizers"}


def pytest_collection_modifyitems(items):
    """What runs in one process (`--dist loadgroup`): the tests of a file, and files that share something large."""
    groups = {item.path: LARGE[name] for item in items for name in getattr(item, "fixturenames", ()) if name in LARGE}
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups.get(item.path, item.path.stem)))


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
def oracle(default_model):
    """transformers over the same GGUF, fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    path = default_model.path
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
