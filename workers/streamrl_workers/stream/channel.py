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


def make_server(token: str) -> grpc.aio.Server:
    """A server that serves holders of `token` only."""
    return grpc.aio.server(interceptors=[TokenInterceptor(token)], options=_SERVER_OPTIONS)


def bind(server: grpc.aio.Server, *, port: int, host: str = LOOPBACK) -> str:
    """Bind `server` to `port` (0 = any) and return host:port.

    Raises:
        UserError: the port is in use or not ours to take.
    """
    try:
        socket.create_server((host, port)).close()  # gRPC would write a line of its own about a failure
        bound = server.add_insecure_port(f"{host}:{port}")
    except (OSError, RuntimeError):
        raise UserError(
            field=f"port {port}",
            rule=f"cannot be bound on {host}: in use or not permitted",
            fix="free it or choose another",
        ) from None
    return f"{host}:{bound}"


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to `address`, not yet connected."""
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


async def connect(address: str, *, timeout_s: float, who: str) -> grpc.aio.Channel:
    """A connected channel to `who` at `address`.

    Raises:
        ConnectTimeoutError: nobody answered within `timeout_s`.
    """
    channel = open_channel(address)
    try:
        await asyncio.wait_for(channel.channel_ready(), timeout_s)
    except TimeoutError:
        await channel.close()
        raise ConnectTimeoutError(f"{who} did not answer at {address} within {timeout_s:g} s") from None
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


async def connect_any_time(address: str, *, deadline_s: float, who: str, attempt_s: float = 2.0) -> grpc.aio.Channel:
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
            return await connect(address, timeout_s=max(0.05, min(attempt_s, left_s)), who=who)
        except ConnectTimeoutError:
            if loop.time() >= end:
                raise ConnectTimeoutError(f"{who} did not answer at {address} within {deadline_s:g} s") from None
        await backoff.pause()
