"""Plain torch made fast: no compiler, no extension, any device. The fallback everything else must beat."""
