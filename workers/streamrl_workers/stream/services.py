"""The protocol's services, made from their descriptors: a client's calls, a server's handlers."""

from types import SimpleNamespace

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from streamrl.proto import stream_pb2 as pb

SCHEDULER: ServiceDescriptor = pb.DESCRIPTOR.services_by_name["Scheduler"]
"""Served by the scheduler. Generators and the trainer dial out to it, so they work behind NAT."""


Client = SimpleNamespace
"""A call for each method."""


def client(channel: grpc.aio.Channel, service: ServiceDescriptor) -> Client:
    """The calls of a service by name: `client(channel, SCHEDULER).Train(metadata=...)`."""
    calls = Client()
    for method in service.methods:
        call = channel.stream_stream if method.client_streaming else channel.unary_stream
        path = f"/{service.full_name}/{method.name}"
        take, give = (
            GetMessageClass(method.output_type).FromString,
            GetMessageClass(method.input_type).SerializeToString,
        )
        setattr(calls, method.name, call(path, request_serializer=give, response_deserializer=take))
    return calls


def serve(server: grpc.aio.Server, service: ServiceDescriptor, methods: object) -> None:
    """Answer the service's calls by the methods of the same names; what `methods` lacks is not served."""
    handlers = {}
    for method in service.methods:
        if (behaviour := getattr(methods, method.name, None)) is not None:
            streams = method.client_streaming
            make = grpc.stream_stream_rpc_method_handler if streams else grpc.unary_stream_rpc_method_handler
            take = GetMessageClass(method.input_type).FromString
            handlers[method.name] = make(behaviour, take, GetMessageClass(method.output_type).SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
