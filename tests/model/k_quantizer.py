"""Floats to Q5_K and Q6_K blocks, which the gguf package only reads: rounded to nearest, without llama.cpp's search for
better scales."""

import numpy as np


def quantize_k(weight: np.ndarray, kind: str) -> np.ndarray:
    """[rows, columns] float32 → [rows, bytes per row] uint8"""
    blocks = weight.reshape(-1, 256).astype(np.float32)
    return {"Q5_K": _q5_k, "Q6_K": _q6_k}[kind](blocks).reshape(weight.shape[0], -1)


def _half(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As bytes, and as they will be read."""
    half = values.astype(np.float16)[:, None]
    return half.view(np.uint8), half.astype(np.float32)


def _steps(x: np.ndarray, step: np.ndarray, low: int, high: int) -> np.ndarray:
    return np.clip(np.rint(np.divide(x, step, out=np.zeros_like(x), where=step != 0)), low, high).astype(np.int32)


def _fields(numbers: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Numbers of few bits to bytes: those that lie `run` apart share one, the first in the lowest bits."""
    parts = numbers.reshape(len(numbers), -1, 8 // bits, run)
    return (parts << (bits * np.arange(8 // bits))[:, None]).sum(axis=2).astype(np.uint8).reshape(len(numbers), -1)


def _q6_k(x: np.ndarray) -> np.ndarray:
    groups = x.reshape(len(x), 16, 16)
    scale = np.abs(groups).max(axis=2) / 31
    stored, d = _half(scale.max(axis=1) / 127)
    integers = _steps(scale, d, 0, 127)
    q = _steps(groups, (d * integers)[:, :, None], -32, 31).reshape(len(x), 256) + 32
    low, high = _fields(q & 15, 4, 64), _fields(q >> 4, 2, 32)
    return np.concatenate([low, high, integers.astype(np.int8).view(np.uint8), stored], axis=1)


def _q5_k(x: np.ndarray) -> np.ndarray:
    groups = x.reshape(len(x), 8, 32)
    low = np.maximum(-groups.min(axis=2), 0)
    scale = (groups.max(axis=2) + low) / 31
    stored_d, d = _half(scale.max(axis=1) / 63)
    stored_m, m = _half(low.max(axis=1) / 63)
    scales, lows = _steps(scale, d, 0, 63), _steps(low, m, 0, 63)
    q = _steps(groups + (m * lows)[:, :, None], (d * scales)[:, :, None], 0, 31).reshape(len(x), 256)
    first = np.concatenate([scales[:, :4] | scales[:, 4:] >> 4 << 6, lows[:, :4] | lows[:, 4:] >> 4 << 6], axis=1)
    integers = np.concatenate([first, (scales[:, 4:] & 15) | (lows[:, 4:] & 15) << 4], axis=1).astype(np.uint8)
    return np.concatenate([stored_d, stored_m, integers, _fields(q >> 4, 1, 32), _fields(q & 15, 4, 32)], axis=1)
