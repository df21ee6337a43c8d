"""From logits to tokens: the sampler, its noise, log-probabilities, penalties.

Knows: torch, numpy, types. Refuses to know: where logits come from, pages, schedules, text.
"""
