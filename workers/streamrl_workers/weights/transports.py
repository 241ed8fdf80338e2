"""How weights travel, by the keys of `spec.weights`."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from streamrl_workers.weights.http_client import HttpSource
from streamrl_workers.weights.http_server import HttpWeightServer
from streamrl_workers.weights.source import Source


class WeightServer(Protocol):
    """Serves a `ServedStore`."""

    address: str
    """That a source is opened with."""
    served_bytes: int

    def close(self) -> None:
        """End it."""
        ...


class Transport(NamedTuple):
    """Both ends."""

    serve: Callable[..., WeightServer]
    connect: Callable[..., Awaitable[Source]]


TRANSPORTS = {"http": Transport(HttpWeightServer, HttpSource.connect)}
