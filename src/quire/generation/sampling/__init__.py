"""From logits to tokens: logit processors, truncation, seeded draws, log-probabilities."""
