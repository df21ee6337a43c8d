"""The kernels built otherwise: with sanitizers, and for the other architecture under an emulator. `make test-all`."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from quire.kernels.cpu import features

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src/quire/kernels/cpu/csrc"
KERNELS = [*sorted(SOURCES.glob("isa_*.cpp")), SOURCES / "pack.cpp", SOURCES / "pool.cpp"]
FLAGS = ["-std=c++17", "-fno-math-errno", "-ffp-contract=off", "-Wno-psabi", "-pthread", f"-I{SOURCES}"]
SANITIZE = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def build(compiler: str, output: Path, *flags: str | Path) -> Path:
    assert shutil.which(compiler), f"{compiler} is needed for this test; on Debian, apt-get install it"
    subprocess.run([compiler, *FLAGS, *map(str, flags), "-o", str(output)], check=True)
    return output


def test_self_test_under_sanitizers(tmp_path):
    program = build("g++", tmp_path / "selftest", *SANITIZE, HERE / "selftest.cpp", *KERNELS)
    subprocess.run([program], check=True)


def test_amx_with_emulated_tiles(tmp_path):
    """As AVX-512 gives them, to the bit of a row alone; where the host has AVX-512."""
    if "avx512" not in features():
        pytest.skip("this host has no AVX-512")
    others = [file for file in KERNELS if file.name != "isa_avx512.cpp"]
    wide = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c")
    unit = tmp_path / "amx.o"
    build("g++", unit, "-O2", *wide, "-c", HERE / "amx_emulation.cpp")
    program = build("g++", tmp_path / "selftest", "-O2", HERE / "selftest.cpp", unit, *others)
    assert "amx ok" in subprocess.run([program], check=True, capture_output=True, text=True).stdout


def test_python_tests_under_sanitizers(tmp_path):
    include = f"-I{sysconfig.get_paths()['include']}"
    library = build("g++", tmp_path / "native.so", *SANITIZE, "-shared", "-fPIC", include, *SOURCES.glob("*.cpp"))
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
    environment = os.environ | {
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
    }
    tests = [HERE / f"test_native_{name}.py" for name in ("linear", "program", "lora", "sampling")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--native-library={library}", *tests]
    subprocess.run(command, check=True, env=environment)


def test_neon_under_an_emulator(tmp_path):
    program = build("aarch64-linux-gnu-g++", tmp_path / "selftest", "-O2", "-static", HERE / "selftest.cpp", *KERNELS)
    assert shutil.which("qemu-aarch64"), "qemu-aarch64 is needed for this test; on Debian, apt-get install qemu-user"
    done = subprocess.run(["qemu-aarch64", "-cpu", "max", program], check=True, capture_output=True, text=True)
    assert "neon ok" in done.stdout
    assert "i8mm ok" in done.stdout


def test_x86_kernels_compile_anywhere(tmp_path):
    """And elsewhere than on x86, AVX2 runs under an emulator, which has no AVX-512."""
    here = os.uname().machine == "x86_64"
    compiler = "g++" if here else "x86_64-linux-gnu-g++"
    program = build(compiler, tmp_path / "selftest", "-O2", HERE / "selftest.cpp", *KERNELS)
    if here:
        return
    assert shutil.which("qemu-x86_64"), "qemu-x86_64 is needed for this test; on Debian, apt-get install qemu-user"
    command = ["qemu-x86_64", "-L", "/usr/x86_64-linux-gnu", "-cpu", "max", program]
    assert "avx2 ok" in subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_all_compiles_for_a_mac(tmp_path):
    """By the clang that the ziglang package brings, with headers of macOS; nothing is linked or run."""
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-macos", "-mcpu=apple_m1", "-O1", "-c"]
    include = f"-I{sysconfig.get_paths()['include']}"
    subprocess.run([*zig, *FLAGS, include, *map(str, SOURCES.glob("*.cpp"))], check=True, cwd=tmp_path)


def test_clang_builds_kernels_that_work(tmp_path):
    """Macs have clang, which reads some things otherwise than gcc, such as targets within targets."""
    program = tmp_path / "selftest"
    command = [sys.executable, "-m", "ziglang", "c++", *FLAGS, "-O1", HERE / "selftest.cpp", *KERNELS, "-o", program]
    if shutil.which("g++"):  # zig's own runtime does not know what asks which x86 this is
        named = subprocess.run(["g++", "-print-libgcc-file-name"], check=True, capture_output=True, text=True)
        command.append(named.stdout.strip())
    subprocess.run([*map(str, command)], check=True)
    subprocess.run([program], check=True)
