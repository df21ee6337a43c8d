"""The gRPC API: the same engine, keys and limits as over HTTP."""
