"""What the interpreter runs need not compile: every kernel is compiled too, for an H100-type GPU."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext, suppress
from inspect import signature
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import pytest
import torch
import triton

import quire.kernels.triton as room
from quire.kernels.triton import launch

KERNELS = Path(room.__file__).parent


@pytest.mark.timeout(1200)  # a minute and a half of computing with Triton 3.9, and machines are busy
@pytest.mark.skipif(
    not all((Path(triton.__file__).parent / "backends/nvidia/bin" / tool).exists() for tool in ("ptxas", "cuobjdump")),
    reason="this Triton has no assembler",
)
@pytest.mark.slow
def test_every_kernel_compiles(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = str(KERNELS.parents[2])
    script = Path(__file__).parent / "compile_kernels.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    sources = [file.read_text() for file in KERNELS.glob("*.py")]
    defined = {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.M)}
    assert set(done.stdout.split()) == defined


def test_kernels_are_loaded_one_after_the_other(monkeypatch):
    """Python keeps one module for all launchers that it has met before: of two threads one got the other's."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    together, met = Barrier(2), []

    class Kernel:
        def _init_handles(self):
            with suppress(BrokenBarrierError):
                together.wait(0.1)
                met.append(self)

    compilers = launch._Compilers(2)
    compilers.device = torch.device("cpu")
    loaded = [compilers.submit(Kernel) for _ in range(2)]
    assert all(isinstance(one.result(), Kernel) for one in loaded) and not met


def test_a_kernel_that_many_ask_for_is_compiled_once(monkeypatch):
    asked, slow, made, found = Barrier(4), Barrier(2), [], []
    callbacks = len(signature(triton.AsyncCompileMode.submit).parameters) - 3  # Triton 3.9 has two, 3.6 had one

    class Compilers(launch._Compilers):
        def submit(self, compiled, /, *args, **kwargs):
            made.append(compiled)
            with suppress(BrokenBarrierError):
                slow.wait(0.1)  # time for another to ask
            return super().submit(compiled, *args, **kwargs)

    monkeypatch.setattr(launch, "_Compilers", Compilers)

    def ask():
        asked.wait(10)
        mode = triton.runtime._async_compile.active_mode.get()
        found.append(mode.submit("key", lambda: "kernel", *[lambda kernel: None] * callbacks).result())

    launch.compile_together([ask] * asked.parties, None)
    assert len(made) == 1 and found == ["kernel"] * asked.parties


def test_what_finds_no_memory_beside_the_others_runs_again_alone():
    """With weights of 4 bits, whose steps unpack matrices, an engine that had to compile its kernels did not start."""
    together, modes = Barrier(2), []

    def greedy():
        modes.append(triton.runtime._async_compile.active_mode.get())
        if len(modes) == 1:
            together.wait(10)
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    launch.compile_together([greedy, lambda: together.wait(10)], None)
    assert len(modes) == 2 and modes[0] is not None and modes[1] is None

    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        launch.compile_together([broken], None)


def test_a_kernel_that_finds_no_memory_is_loaded_again(monkeypatch):
    """Once, when torch has given back what it kept for later."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    kept, tried = [True], []
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)

    class Kernel:
        def _init_handles(self):
            tried.append(self)
            if kept:
                raise RuntimeError("Triton Error [CUDA]: out of memory")

    compilers = launch._Compilers(1)
    compilers.device = torch.device("cpu")
    assert tried == [] and compilers.submit(Kernel).result() is tried[0] and len(tried) == 2
