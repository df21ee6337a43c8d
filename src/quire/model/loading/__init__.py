"""From a checkpoint (safetensors or GGUF) to tensors in memory."""
