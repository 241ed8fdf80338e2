"""Connections between a puller and a server of weights over HTTP: what ends them."""

from collections.abc import Iterator

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.hashing import TensorBytes
from streamrl_workers.weights.http_client import HttpSource
from streamrl_workers.weights.http_server import HttpWeightServer
from streamrl_workers.weights.source import SourceBrokenError
from streamrl_workers.weights.store import WeightStore


@pytest.fixture
def served() -> Iterator[tuple[str, pb.VersionName]]:
    store = WeightStore()
    tensors = {"w": TensorBytes("uint8", (1,), memoryview(b"w"))}
    version = store.publish(attempt=1, step=1, tensors=tensors)
    server = HttpWeightServer(store, token="secret")
    yield server.address, version
    server.close()


class Unusable:
    """Certificates that are just being replaced."""

    server_name = "there"

    def ssl_context(self, *, server: bool) -> None:
        raise ValueError("half of a certificate")


async def test_a_connection_that_cannot_be_used_is_a_break(served: tuple[str, pb.VersionName]) -> None:
    with pytest.raises(SourceBrokenError, match="half of a certificate"):
        await HttpSource.connect(served[0], tls=Unusable(), token="", role="trainer")
