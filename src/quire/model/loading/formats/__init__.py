"""Published formats of quantised checkpoints, one a file: how each keeps a matrix in safetensors files."""
