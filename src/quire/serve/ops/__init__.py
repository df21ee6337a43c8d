"""What operators use: health, metrics, live view, explanations, cache administration, sleep."""
