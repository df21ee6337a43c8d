"""What sequences may have beyond tokens and pages: one feature a file, each keeping its own state."""
