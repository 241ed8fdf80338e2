"""gRPC servers and channels with the settings that all parts share.

Owns message limits, keep-alive, binding and connecting with deadlines, and the pauses between
attempts to connect again. Does not own what is said over a channel.
"""

import asyncio
import socket
from dataclasses import dataclass, field
from random import Random

import grpc
import grpc.aio

from streamrl.errors import UserError
from streamrl_workers.stream.auth import LOOPBACK, TokenInterceptor
from streamrl_workers.stream.roles import RoleInterceptor
from streamrl_workers.stream.tls import Tls

MESSAGE_LIMIT_BYTES = 64 * 2**20
"""Largest message: a group of many long trajectories fits."""
_KEEPALIVE_MS = 20_000
"""A peer that vanished without a word is noticed after this and the next."""
_KEEPALIVE_ANSWER_MS = 10_000

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_ANSWER_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER_OPTIONS = (*OPTIONS, ("grpc.so_reuseport", 0))  # so that a port in use is an error, not a shared port
_CHANNEL_OPTIONS = (
    *OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),  # `http_proxy` of the environment is for the world outside
)


class ConnectTimeoutError(TimeoutError):
    """Nobody answered at an address in time; the text says who was awaited, where, how long."""


def make_server(token: str, *, tls: Tls | None = None) -> grpc.aio.Server:
    """A server that serves holders of `token` only; with `tls`, roles of this job's certificates (`roles.py`)."""
    if tls is None:
        return grpc.aio.server(interceptors=[TokenInterceptor(token)], options=_SERVER_OPTIONS)
    options = (*_SERVER_OPTIONS, *tls.server_options())
    return grpc.aio.server(interceptors=[RoleInterceptor(tls.identity)], options=options)


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
        raise UserError(
            field=f"port {port}",
            rule=f"cannot be bound on {host}: in use or not permitted",
            fix="free it or choose another",
        ) from None
    return f"{name}:{bound}"


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

    def next_pause_s(self) -> float:
        """The next pause."""
        pause_s = min(self.limit_s, self.first_s * 2.0 ** min(self._attempts, 32))
        self._attempts += 1
        return pause_s * (1.0 - 0.5 * self.random.random())

    async def pause(self) -> None:
        """Wait the next pause."""
        await asyncio.sleep(self.next_pause_s())

    def reset(self) -> None:
        """Begin again at `first_s`: an attempt has succeeded."""
        self._attempts = 0


async def connect_any_time(
    address: str, *, deadline_s: float, who: str, attempt_s: float = 2.0, tls: Tls | None = None
) -> grpc.aio.Channel:
    """A connected channel, tried again with pauses until `deadline_s` seconds have passed.

    Raises:
        ConnectTimeoutError: nobody answered in all that time.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    backoff = Backoff()
    while True:
        left_s = end - loop.time()
        try:
            return await connect(address, timeout_s=max(0.05, min(attempt_s, left_s)), who=who, tls=tls)
        except ConnectTimeoutError:
            if loop.time() >= end:
                raise ConnectTimeoutError(_silence(address, who=who, within_s=deadline_s, tls=tls)) from None
        await backoff.pause()


def _silence(address: str, *, who: str, within_s: float, tls: Tls | None) -> str:
    """gRPC does not say why: nobody is there, or one side does not take the other's certificate."""
    how = "" if tls is None else f" with TLS as {tls.identity}"
    return f"{who} did not answer at {address}{how} within {within_s:g} s"
