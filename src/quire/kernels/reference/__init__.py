"""The oracle: each operation as its definition reads, in plain torch, with float32 inside. Speed is no concern."""
