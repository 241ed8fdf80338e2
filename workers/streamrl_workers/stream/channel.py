"""gRPC servers, channels and services with the settings that all parts share: limits, keep-alive, deadlines, reconnecting, renewal.

Does not own what is said over a channel, nor who may call (`auth.py`).

A channel keeps the certificates that it was opened with. `Dialler` opens a successor after a share of a connection's
longest life and goes over to it once it is connected: certificates that do not work cost nothing until the server ends
the old connection. Without TLS a connection is never renewed.
Loop of its renewal: consumes time; produces a connected channel; waits for the moment, then for the server (no
deadline: the old connection serves meanwhile); unblocked by the end of the old connection.
"""

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from streamrl.errors import UserError
from streamrl.keys import ENV_TLS_DIR, ENV_TOKEN
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.auth import LOOPBACK, RoleInterceptor, TokenInterceptor
from streamrl_workers.stream.messages import FRAME_BYTES
from streamrl_workers.stream.tls import Tls

_REQUEST_LIMIT_BYTES = FRAME_BYTES + 2**10
"""What a server reads at once: a frame (`messages.py`) or a small request."""
_METADATA_BYTES = 4 * 2**10
"""Maximum size of a call's metadata. Ours have some hundred bytes."""
_IDLE_MS = 30_000
"""A connection without a call is closed then. Peers of a run keep one call open."""
_ANSWER_LIMIT_BYTES = 4 * 2**20
"""What a server says at once: a frame, or a piece of a file."""
_CALLS_PER_CONNECTION = 8
"""A generator has a few calls on each of its connections."""
_MAX_CALLS = 10_000
"""Of one server: 1,024 generators in each of 8 pools, and what else there is. More are told to come again."""
_HANDSHAKE_MS = 10_000
"""A connection that has not begun to speak gRPC by then is closed."""
PEER_LOST_S = 30.0
"""A peer that is frozen, or that vanished without a word, is noticed so long after its last sign: its connection ends."""


def keepalive_options(lost_s: float) -> tuple[tuple[str, int], ...]:
    """gRPC's: a ping after half of the silence, the other half for its answer. For that `ping_timeout_ms` governs, not `keepalive_timeout_ms`."""
    half_ms = int(lost_s * 1000 / 2)
    return (
        ("grpc.keepalive_time_ms", half_ms),
        ("grpc.http2.ping_timeout_ms", half_ms),
        ("grpc.keepalive_timeout_ms", half_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", half_ms // 2),
        ("grpc.http2.max_pings_without_data", 0),
    )


OPTIONS: tuple[tuple[str, int], ...] = keepalive_options(PEER_LOST_S)
_SERVER_OPTIONS = (
    *OPTIONS,
    ("grpc.max_receive_message_length", _REQUEST_LIMIT_BYTES),
    ("grpc.max_send_message_length", _ANSWER_LIMIT_BYTES),
    ("grpc.max_concurrent_streams", _CALLS_PER_CONNECTION),
    ("grpc.max_metadata_size", _METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * _METADATA_BYTES),
    ("grpc.max_connection_idle_ms", _IDLE_MS),
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    ("grpc.so_reuseport", 0),  # so that a port in use is an error, not a shared port
)
_CHANNEL_OPTIONS = (
    *OPTIONS,
    ("grpc.max_receive_message_length", _ANSWER_LIMIT_BYTES),
    ("grpc.max_send_message_length", _REQUEST_LIMIT_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),  # `http_proxy` of the environment is for the world outside
)
CONNECT_TIMEOUT_S = 5.0
"""Of one attempt to reach the scheduler."""
LASTING_S = 2.0
"""A connection that breaks sooner has brought nothing."""
MAX_BREAKS = 20
"""So many of them in a row, over half a minute: what one of the two has to say cannot be said."""


class ConnectTimeoutError(TimeoutError):
    """Nobody answered at an address in time; the text says who was awaited, where, how long."""


class SchedulerLostError(RuntimeError):
    """The scheduler did not come back in time."""


def make_server(token: str, *, tls: Tls | None = None) -> grpc.aio.Server:
    """A server that serves holders of `token` only; with `tls`, roles of this job's certificates (`auth.py`)."""
    door: grpc.aio.ServerInterceptor = TokenInterceptor(token)
    options: tuple[tuple[str, int | str], ...] = _SERVER_OPTIONS
    if tls is not None:
        door, options = RoleInterceptor(tls.identity), (*_SERVER_OPTIONS, *tls.server_options())
    options = (*options, ("grpc.max_allowed_incoming_connections", _most_connections()))
    return grpc.aio.server(interceptors=[door], options=options, maximum_concurrent_rpcs=_MAX_CALLS)


def _most_connections() -> int:
    """Return the maximum of one server: half of the process's files stay for everything else.

    Takes as many files as that needs, if the system gives them: shells and containers often begin with 1,024.
    """
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * _MAX_CALLS
    if files < wanted:
        files = wanted if hard == resource.RLIM_INFINITY else max(files, min(hard, wanted))
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return min(_MAX_CALLS, files // 2)


def bind(server: grpc.aio.Server, *, port: int, host: str = LOOPBACK, tls: Tls | None = None) -> str:
    """Bind `server` to `port` (0 = any) and return host:port; `tls` as in `make_server`.

    Raises:
        UserError: the port is in use or not ours to take.
    """
    family, name = (socket.AF_INET6, f"[{host}]") if ":" in host else (socket.AF_INET, host)
    try:
        socket.create_server((host, port), family=family).close()  # gRPC would write a line of its own about a failure
        bound = _add_port(server, f"{name}:{port}", tls=tls)
    except (OSError, RuntimeError):
        raise port_in_use(port, host=host) from None
    return f"{name}:{bound}"


def port_in_use(port: int, *, host: str) -> UserError:
    """What a server says that cannot have its port."""
    return UserError(
        field=f"port {port}",
        rule=f"cannot be bound on {host}: in use or not permitted",
        fix="free it or choose another",
    )


def _add_port(server: grpc.aio.Server, address: str, *, tls: Tls | None) -> int:
    port: int
    if tls is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, tls.server_credentials())
    return port


def open_channel(address: str, *, tls: Tls | None = None) -> grpc.aio.Channel:
    """A channel to `address`, not yet connected; `tls`: by certificates."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    options = (*_CHANNEL_OPTIONS, *tls.channel_options())
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)


async def connect(address: str, *, timeout_s: float, who: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """A connected channel to `who` at `address`.

    Raises:
        ConnectTimeoutError: nobody answered within `timeout_s`.
    """
    channel = open_channel(address, tls=tls)
    try:
        await asyncio.wait_for(channel.channel_ready(), timeout_s)
    except TimeoutError:
        await channel.close()
        raise ConnectTimeoutError(_silence(address, who=who, within_s=timeout_s, tls=tls)) from None
    except BaseException:
        await channel.close()
        raise
    return channel


@dataclass(slots=True, kw_only=True)
class Backoff:
    """Pauses between attempts: doubling up to a limit, each shortened by up to a half at random."""

    first_s: float = 0.05
    limit_s: float = 2.0
    random: Random = field(default_factory=Random)
    _attempts: int = 0
    _breaks: int = 0

    def next_pause_s(self) -> float:
        """The next pause."""
        pause_s = min(self.limit_s, self.first_s * 2.0 ** min(self._attempts, 32))
        self._attempts += 1
        return pause_s * (1.0 - 0.5 * self.random.random())

    async def pause(self) -> None:
        """Wait the next pause."""
        await asyncio.sleep(self.next_pause_s())

    def ended(self, *, after_s: float) -> bool:
        """A connection has ended that had been made; one that lasted begins again at `first_s`.

        Returns:
            Whether `MAX_BREAKS` in a row did not last.
        """
        if after_s >= LASTING_S:
            self._attempts = self._breaks = 0
        else:
            self._breaks += 1
        return self._breaks >= MAX_BREAKS


def _silence(address: str, *, who: str, within_s: float, tls: Tls | None) -> str:
    """gRPC does not say why: nobody is there, or one side does not take the other's certificate."""
    how = "" if tls is None else f" with TLS as {tls.identity}"
    return f"{who} did not answer at {address}{how} within {within_s:g} s"


_SHARE = 0.75
"""Of a connection's longest life: the server's own bound varies by a tenth and then waits a grace."""
_ATTEMPT_S = 10.0
_LONGEST_PAUSE_S = 30.0
"""Between attempts."""


class Dialler:
    """Connections to the scheduler, one after the other. One that is too old gives way to a successor that is connected already."""

    def __init__(self, address: str, *, tls: Tls | None) -> None:
        self.address = address
        self.tls = tls
        self._successor: grpc.aio.Channel | None = None

    @property
    def has_successor(self) -> bool:
        """Whether the next one is there: it needs no pause before it."""
        return self._successor is not None

    async def channel(self, *, timeout_s: float) -> grpc.aio.Channel:
        """The next one. Raises ConnectTimeoutError: nobody answered, within `CONNECT_TIMEOUT_S` at the latest."""
        successor, self._successor = self._successor, None
        timeout_s = min(CONNECT_TIMEOUT_S, timeout_s)
        return successor or await connect(self.address, timeout_s=timeout_s, who="the scheduler", tls=self.tls)

    async def outlived(self, *tasks: "asyncio.Task[Any]", is_leaving: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the end of the first of a connection's tasks; True if its successor takes over before. One that leaves needs none."""
        if self.tls is not None:
            renewal = asyncio.create_task(self._renewed(self.tls), name="renewal of the connection")
            try:
                await asyncio.wait({*tasks, renewal}, return_when=asyncio.FIRST_COMPLETED)
                if not any(task.done() for task in tasks) and not is_leaving():
                    self._successor = renewal.result()
                    return True
            finally:
                await self._drop(renewal)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return False

    async def _renewed(self, tls: Tls) -> grpc.aio.Channel:
        await asyncio.sleep(_SHARE * tls.age_s)
        backoff = Backoff(limit_s=_LONGEST_PAUSE_S)
        while True:
            with contextlib.suppress(ConnectTimeoutError):
                return await connect(self.address, timeout_s=_ATTEMPT_S, who="the scheduler", tls=tls)
            await backoff.pause()

    async def _drop(self, renewal: "asyncio.Task[grpc.aio.Channel]") -> None:
        """End it; what it has connected is closed, if it is not the successor."""
        renewal.cancel()
        await asyncio.wait([renewal])
        if not renewal.cancelled() and renewal.exception() is None and renewal.result() is not self._successor:
            await renewal.result().close()

    async def close(self) -> None:
        """No other one is wanted."""
        if self._successor is not None:
            await self._successor.close()


def refusal_of(error: grpc.aio.AioRpcError, *, address: str, tls: Tls | None) -> UserError | None:
    """What is wrong with our token or certificate, if that is why the scheduler ended a call."""
    if error.code() not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return None
    if tls is None:
        return UserError(
            field=ENV_TOKEN,
            rule=f"is not the token of the scheduler at {address}",
            fix="start all processes of a run with one token",
        )
    return UserError(
        field=ENV_TLS_DIR,
        rule=f"the scheduler at {address} does not take its certificate: {error.details()}",
        fix="give each role the leaf of its own job",
    )


# ---- the protocol's services, made from their descriptors

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
