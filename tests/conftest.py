"""Fixtures shared by the whole suite. The default model is fetched once, loaded and served once per process."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # one of several processes on the same cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():  # read when triton is first imported, which others may do before our kernels
    os.environ["TRITON_INTERPRET"] = "1"

import pytest


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
