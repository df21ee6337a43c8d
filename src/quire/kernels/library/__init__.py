"""Kernels of libraries: cuBLAS products chosen by name, cuDNN attention for prefill."""
