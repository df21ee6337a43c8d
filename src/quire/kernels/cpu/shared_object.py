"""The shared object and its C structs. Refuses to know: what the numbers mean."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

SOURCES = Path(__file__).parent / "csrc"  # in a source tree; an installed package has none
REMEDY = "build them with `pip install -e .` in a source tree, or reinstall quire, with a C++17 compiler at hand"


class Matrix(Structure):
    _fields_: ClassVar = [("data", c_void_p), *((name, c_int32) for name in ("n", "k", "bits", "run"))]


class Layer(Structure):
    _fields_: ClassVar = [
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, c_void_p) for name in ("q_bias", "k_bias", "v_bias", "o_bias")),
        *((name, c_int32) for name in ("kv_group", "place", "window")),
        ("scale", c_float),
    ]


class Decoder(Structure):
    _fields_: ClassVar = [
        *((n, c_int32) for n in ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "rotary", "layers")),
        ("eps", c_float),
        ("rope_scale", c_float),
        ("embed", Matrix),
        ("head", Matrix),
        ("final_norm", c_void_p),
        ("inverse_frequencies", c_void_p),
        ("layer", POINTER(Layer)),
    ]


class LowRank(Structure):
    _fields_: ClassVar = [("a", Matrix), ("b", Matrix), ("scale", c_float)]


class AdapterLayer(Structure):
    _fields_: ClassVar = [(name, LowRank) for name in ("q", "k", "v", "o", "gate", "up", "down")]


class StepGroup(Structure):
    _fields_: ClassVar = [
        ("page_table", c_void_p),
        ("table_stride", c_int64),
        ("kv_slots", c_void_p),
        ("tokens_per_page", c_int32),
        ("layers", c_int32),
        ("bounds", c_void_p),
        ("kind", c_int32),
        ("latest", c_int32),
    ]


LAYER_WRITTEN = CFUNCTYPE(None, c_int32)


class Step(Structure):
    _fields_: ClassVar = [
        ("tokens", c_int32),
        ("rows", c_int32),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("query_start", c_void_p),
        ("group", POINTER(StepGroup)),
        ("groups", c_int32),
        ("residual", c_int32),
        ("pool", c_void_p),
        ("pages", c_int64),
        ("page_bytes", c_int64),
        ("hidden", c_void_p),
        ("layers", c_int32),
        ("taps", c_void_p),
        ("tapped", c_void_p),
        ("tap_count", c_int32),
        ("tree_base", c_void_p),
        ("tree_path", c_void_p),
        ("asks", c_void_p),
        ("mass", c_void_p),
        ("mass_runs", c_int32),
        ("mass_tokens", c_int32),
        ("adapters", c_void_p),
        ("adapter", POINTER(POINTER(AdapterLayer))),
        ("adapter_count", c_int32),
        ("adapter_rank", c_int32),
        ("sparse", c_void_p),
        ("sparse_layers", c_void_p),
        ("sparse_local", c_int32),
        ("observed", c_void_p),
        ("written", LAYER_WRITTEN),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "quire_sources": (c_char_p, []),
    "quire_isa": (c_char_p, [c_int]),
    "quire_kernels": (c_void_p, [c_char_p]),
    "quire_reserve": (c_void_p, [c_size_t]),
    "quire_release": (None, [c_void_p, c_size_t]),
    "quire_matrix_bytes": (c_size_t, [c_int, c_int, c_int, c_int]),
    "quire_pack": (c_int, [c_int, c_void_p, c_int, c_int, POINTER(Matrix)]),
    "quire_scale": (None, [POINTER(Matrix), c_void_p]),
    "quire_unpack": (None, [POINTER(Matrix), c_int, c_void_p]),
    "quire_pool": (c_void_p, [c_int]),
    "quire_pool_free": (None, [c_void_p]),
    "quire_program": (c_void_p, [POINTER(Decoder), c_void_p, c_void_p]),
    "quire_program_free": (None, [c_void_p]),
    "quire_forward": (c_int, [c_void_p, POINTER(Step)]),
    "quire_logits": (None, [c_void_p, c_void_p, c_int, c_void_p, c_size_t]),
    "quire_draw": (
        None,
        [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
    ),
    "quire_linear": (None, [c_void_p, POINTER(Matrix), c_void_p, c_int, c_void_p]),
}


def open_library(path: str) -> ctypes.CDLL:
    """Calls release the GIL; arguments are checked by ctypes."""
    library = ctypes.CDLL(path)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def digest(sources: Path) -> str:
    """What a build from these sources, if there are any, is to call itself (setup.py asks too)."""
    files = sorted([*sources.glob("*.cpp"), *sources.glob("*.h")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16] if files else ""


def open_current(path: str, sources: Path = SOURCES) -> ctypes.CDLL | str:
    """The library, unless it is not what the Python code was written for; then the reason."""
    try:
        library = open_library(path)
    except OSError as error:
        return f"the compiled kernels do not load ({error}); {REMEDY}"
    except AttributeError as error:
        return f"the compiled kernels are older than the code that calls them ({error}); {REMEDY}"
    if (expected := digest(sources)) and library.quire_sources().decode() != expected:
        return f"the compiled kernels were not built from the sources beside them; {REMEDY}"
    return library


@cache
def load() -> ctypes.CDLL | str:
    """The library, or the reason it is not there."""
    found = importlib.util.find_spec("quire.kernels.cpu._native")
    if found is None or found.origin is None:
        return f"the compiled kernels were not built; {REMEDY}"
    return open_current(found.origin)


def native() -> ctypes.CDLL:
    library = load()
    if isinstance(library, str):
        raise RuntimeError(library)
    return library


def available() -> str | None:
    """None if the compiled kernels can run here, else the reason they cannot."""
    library = load()
    return library if isinstance(library, str) else None


def features() -> list[str]:
    """The kernel sets this host can run, best first; `base` runs anywhere."""
    library = load()
    if isinstance(library, str):
        return []
    names: list[str] = []
    while name := library.quire_isa(len(names)):
        names.append(name.decode())
    return names


@cache
def kernels(isa: str | None = None) -> int:
    """The address of a kernel set: by name, or the best."""
    names = features()
    chosen = isa or (names[0] if names else "")
    address = native().quire_kernels(chosen.encode())
    if not address:
        raise ValueError(f"no kernel set {chosen!r} on this host; there are {', '.join(names)}")
    return int(address)
