"""Quantization schemes of weights and of keys: one scheme a file."""
