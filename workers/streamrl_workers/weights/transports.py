"""How weights travel, by the keys of `spec.weights`."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import parse_bytes
from streamrl.spec.training import FolderWeights, HttpWeights
from streamrl_workers.stream.object_store import ObjectFolder
from streamrl_workers.stream.tls import Tls
from streamrl_workers.weights.folder import FolderPartWriter, FolderSource, FolderWeightServer, run_identity
from streamrl_workers.weights.http_client import HttpSource, PassingWeightServer
from streamrl_workers.weights.http_server import HttpWeightServer
from streamrl_workers.weights.source import ServedStore, Source
from streamrl_workers.weights.store import WeightStore


class WeightServer(Protocol):
    """Serves a `ServedStore`."""

    address: str
    """That a source is opened with."""
    served_bytes: int

    def offer(self, version: pb.VersionName, *, ended: Callable[[], bool]) -> bool:
        """Returns when a version of the store can be had at the address, and may be announced; False: `ended` was true before.

        Raises:
            StoreUnavailableError: it cannot be had in time.
            UserError: it never can.
        """
        ...

    def close(self) -> None:
        """End it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSetup:
    """What a trainer's server may need."""

    spec: Any
    """Of the job, below the transport's key."""
    store: Path
    """Directory of the run's checkpoints, whose name names the run."""
    copies: ObjectFolder | None
    """Copies of that directory."""
    newest_kept: int
    """Versions that generators may still ask for."""
    token: str
    tls: Tls | None
    host: str
    port: int


class Transport(NamedTuple):
    """Both ends."""

    serve: Callable[[WeightStore, ServerSetup], WeightServer]
    """The trainer's."""
    bring_part: Callable[[ServedStore, ServerSetup], Callable[[pb.VersionName], None]]
    """Of a trainer's ranks above 0: what they do with a part before it is given."""
    connect: Callable[..., Awaitable[Source]]
    relay: Callable[..., WeightServer] | None
    """Of a generator that passes on what it pulled; None: none does, since versions are brought to where all find them."""


def _serve_http(store: WeightStore, setup: ServerSetup) -> WeightServer:
    spec: HttpWeights = setup.spec
    remote, uplink = spec.remote_bytes_per_second, spec.uplink_bytes_per_second
    return PassingWeightServer(
        store,
        token=setup.token,
        tls=setup.tls,
        host=setup.host,
        port=setup.port,
        remote_bytes_per_s=None if remote is None else parse_bytes(remote),
        uplink_bytes_per_s=None if uplink is None else parse_bytes(uplink),
    )


def _folder(kind: type[FolderWeightServer], store: ServedStore, setup: ServerSetup) -> FolderWeightServer:
    spec: FolderWeights = setup.spec
    return kind(
        store,
        url=spec.url,
        run=setup.store.resolve().name,
        owner=lambda: run_identity(setup.store, copies=setup.copies),
        newest_kept=setup.newest_kept,
        timeout_s=spec.timeout_seconds,
    )


def _nowhere(_store: ServedStore, _setup: ServerSetup) -> Callable[[pb.VersionName], None]:
    """Parts are served where they are."""
    return lambda _: None


def _to_folder(store: ServedStore, setup: ServerSetup) -> Callable[[pb.VersionName], None]:
    writer = _folder(FolderPartWriter, store, setup)

    def bring(part: pb.VersionName) -> None:
        writer.offer(part, ended=lambda: False)

    return bring


TRANSPORTS = {
    "http": Transport(_serve_http, _nowhere, HttpSource.connect, relay=HttpWeightServer),
    "folder": Transport(
        lambda store, setup: _folder(FolderWeightServer, store, setup), _to_folder, FolderSource.connect, relay=None
    ),
}
