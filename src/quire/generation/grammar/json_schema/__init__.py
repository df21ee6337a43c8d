"""JSON schemas rewritten into forms that a grammar compiler knows, meaning the same or less."""
