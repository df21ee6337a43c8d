"""Decoders as data: what an architecture is, how its weights are named and loaded, and its forward pass.

A family (one file each) turns a config into a `DecoderSpec` and weight names into places; one `Model` runs them
all through exchangeable stages. Knows: types, assets' weight sources, kernels. Refuses to know: requests, pages'
owners, sampling.
"""
