"""Stores of pages below the device, one file each. They move bytes; `memory/` decides which, and where to."""
