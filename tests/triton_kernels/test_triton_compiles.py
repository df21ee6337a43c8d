"""What the interpreter runs need not compile: every kernel is compiled too, for an H100-type GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

import quire.kernels.triton as room

KERNELS = Path(room.__file__).parent


@pytest.mark.skipif(
    not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists(), reason="this Triton has no assembler"
)
def test_every_kernel_compiles(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = str(KERNELS.parents[2])
    script = Path(__file__).parent / "compile_kernels.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    sources = [file.read_text() for file in KERNELS.glob("*.py")]
    defined = {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.M)}
    assert set(done.stdout.split()) == defined
