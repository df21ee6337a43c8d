"""The gRPC contract: `quire.proto`, and its messages as classes, made when imported from the descriptors protoc left.

To renew the descriptors, from the folder `src` (grpcio-tools has protoc):

    python -m grpc_tools.protoc -I . --descriptor_set_out=quire/serve/grpc/proto/quire.binpb \
        quire/serve/grpc/proto/quire.proto

Code that protoc writes would need the very protobuf version that wrote it; descriptors go with any. Refuses to know:
servers.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

PACKAGE = "quire.v1"
SERVICE = f"{PACKAGE}.Quire"


def load_messages() -> dict[str, Any]:
    """Message name → class, for all messages of the contract."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    data = resources.files("quire.serve.grpc.proto").joinpath("quire.binpb").read_bytes()
    pool = descriptor_pool.DescriptorPool()  # its own: a client in this process may have loaded the contract too
    found: dict[str, Any] = {}
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        pool.Add(file)
        for message in file.message_type:
            described = pool.FindMessageTypeByName(f"{file.package}.{message.name}")
            found[message.name] = message_factory.GetMessageClass(described)
    return found
