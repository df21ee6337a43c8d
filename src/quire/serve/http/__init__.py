"""The HTTP server: ports, bounds, keys, errors, the OpenAPI document."""
