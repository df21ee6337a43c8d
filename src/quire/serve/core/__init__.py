"""What every API family shares: turns, generations, constraints, rate limits. Speaks no family's dialect."""
