"""Formats that are kept to, as patterns of the compiler; others say something to readers only."""

KNOWN_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
