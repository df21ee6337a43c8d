namespace quire { struct Kernels; const Kernels* kernels_neon() { return nullptr; } }
