"""The gRPC contract: `quire.proto`, and the code that protoc makes of it.

To make that code again, from the folder `src`:

    python -m grpc_tools.protoc -I . --python_out=. quire/serve/proto/quire.proto
"""
