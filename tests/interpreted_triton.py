"""What lets Triton's interpreter run our kernels: on a CPU, as numpy. Imported by conftests of tests that do so."""

import functools
import inspect

import pytest

tl = pytest.importorskip("triton.language")
interpreter = pytest.importorskip("triton.runtime.interpreter")
_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor, scope):
    """The interpreter turns one-element arrays into range bounds with int(), which numpy 2.4 no longer allows."""
    _patch_tensor(tensor, scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_and_index


@functools.cache
def _builtins(package):
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtins(package, builder, scope):
    """The interpreter goes through all members of its packages at every call of a function within a kernel."""
    for name, member in _builtins(package):
        if getattr(package, name) is member:
            interpreter._patch_attr(package, name, member, builder, scope)


interpreter._patch_builtin = _patch_builtins
_dot = interpreter.InterpreterBuilder.create_dot


def _dot_of_bfloat16(self, a, b, *rest):
    """The interpreter keeps bfloat16 as its bits and multiplies those; give it what they mean."""
    return _dot(self, _widened(a), _widened(b), *rest)


def _widened(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype("uint32") << 16).view("float32"), tl.float32)


interpreter.InterpreterBuilder.create_dot = _dot_of_bfloat16
