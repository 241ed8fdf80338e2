"""Serves kept versions: the Weights service of the trainer.

Owns: the RPCs' argument checks and status codes. Does not own: the bytes (`publisher.py`), the server's port, who may call.
"""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream import stream_pb2_grpc
from streamrl_workers.weights.publisher import WeightStore

_MAX_CHUNK_BYTES = 3 * 2**20
"""gRPC refuses messages above 4 MiB; the rest is room for framing."""


class WeightsService(stream_pb2_grpc.WeightsServicer):
    """GetManifest and Fetch over a `WeightStore`."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    async def GetManifest(  # noqa: N802 - the RPC's name
        self, request: pb.ManifestRequest, context: "grpc.aio.ServicerContext[pb.ManifestRequest, pb.Manifest]"
    ) -> AsyncIterator[pb.Manifest]:
        with self._store.pulling(request.version) as manifest:
            if manifest is None:
                await context.abort(grpc.StatusCode.NOT_FOUND, self._gone(request.version))
                raise AssertionError("abort raises")
            yield manifest
            await asyncio.get_running_loop().create_future()  # for ever: the puller ends the call

    async def Fetch(  # noqa: N802 - the RPC's name
        self, request: pb.FetchRequest, context: "grpc.aio.ServicerContext[pb.FetchRequest, pb.Chunk]"
    ) -> AsyncIterator[pb.Chunk]:
        if not 1 <= request.chunk_bytes <= _MAX_CHUNK_BYTES:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"chunk_bytes must be 1 to {_MAX_CHUNK_BYTES}, got {request.chunk_bytes}",
            )
        offset = request.offset
        while True:  # looked up again for each chunk: a stalled reader holds no bytes
            data = self._store.chunk(
                request.version, tensor=request.tensor, offset=offset, limit_bytes=request.chunk_bytes
            )
            if data is None:
                await context.abort(
                    grpc.StatusCode.NOT_FOUND, f"tensor {request.tensor}: {self._gone(request.version)}"
                )
            if not data:
                return
            yield pb.Chunk(data=data)
            offset += len(data)

    def _gone(self, version: pb.VersionName) -> str:
        kept = ", ".join(f"({v.attempt}, {v.step})" for v in self._store.versions()) or "none"
        return f"version ({version.attempt}, {version.step}) is not kept; kept: {kept}"
