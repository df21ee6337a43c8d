"""The shared object: found, checked against its sources, opened. Refuses to know: what is done with it."""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from quire.kernels.cpu.source_digest import digest
from quire.kernels.cpu.structs import CHECKED, Decoder, Matrix, Sampling, Step

SOURCES = Path(__file__).parent / "csrc"  # in a source tree; an installed package has none
REMEDY = "build them with `pip install -e .` in a source tree, or reinstall quire, with a C++17 compiler at hand"


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "quire_sources": (c_char_p, []),
    "quire_isa": (c_char_p, [c_int]),
    "quire_kernels": (c_void_p, [c_char_p]),
    "quire_struct_bytes": (c_size_t, [c_int]),
    "quire_reserve": (c_void_p, [c_size_t]),
    "quire_release": (None, [c_void_p, c_size_t]),
    "quire_matrix_bytes": (c_size_t, [c_int, c_int, c_int]),
    "quire_pack": (c_int, [c_int, c_void_p, c_int, c_int, POINTER(Matrix)]),
    "quire_scale": (None, [POINTER(Matrix), c_void_p]),
    "quire_unpack": (None, [POINTER(Matrix), c_int, c_void_p]),
    "quire_pool": (c_void_p, [c_int]),
    "quire_pool_free": (None, [c_void_p]),
    "quire_program": (c_void_p, [POINTER(Decoder), c_void_p, c_void_p]),
    "quire_program_free": (None, [c_void_p]),
    "quire_forward": (c_int, [c_void_p, POINTER(Step)]),
    "quire_logits": (None, [c_void_p, c_void_p, c_int, c_void_p, c_size_t]),
    "quire_sample": (None, [c_void_p, c_void_p, POINTER(Sampling)]),
    "quire_score": (None, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_int, c_void_p]),
    "quire_linear": (None, [c_void_p, POINTER(Matrix), c_void_p, c_int, c_void_p]),
}


def open_library(path: str) -> ctypes.CDLL:
    """Calls release the GIL; arguments are checked by ctypes."""
    library = ctypes.CDLL(path)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    for place, struct in enumerate(CHECKED):
        if library.quire_struct_bytes(place) != ctypes.sizeof(struct):
            raise AttributeError(f"{struct.__name__} is laid out in another way")
    return library


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
