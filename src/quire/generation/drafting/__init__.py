"""Speculative decoding: proposers (n-gram, suffix, draft heads) and the verification of their drafts."""
