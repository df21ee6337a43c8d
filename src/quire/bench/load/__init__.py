"""Load on a server that is already running, over HTTP, as its users would make it.

Knows: the OpenAI wire format, Prometheus text. Refuses to know: engines; any server that speaks the API will do.
"""
