"""How model families write calls of tools: one file a format, over the protocol of `call_format`."""
