"""Quantising a plain checkpoint once, by what its layers see of a text: AWQ, GPTQ, SmoothQuant, FP8."""
