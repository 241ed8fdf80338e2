"""The scheduler's two ports, gRPC and signals, and what the process hears from the system.

Owns binding, publishing and closing them. Does not own what is served.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc.aio

from streamrl_workers.metrics.signals import Pages, SignalsServer
from streamrl_workers.scheduler.environment import Environment
from streamrl_workers.scheduler.shell.ending import EndingBox
from streamrl_workers.scheduler.shell.loops import report
from streamrl_workers.scheduler.shell.signal_pages import Numbers
from streamrl_workers.stream.channel import bind, make_server
from streamrl_workers.stream.endpoint import write_endpoint
from streamrl_workers.stream.lifeline import on_terminate

_STOP_GRACE_S = 0.5


@dataclass(slots=True, kw_only=True)
class Front:
    """The two ports. Bound and published at once; they answer with content once the parts are there."""

    server: grpc.aio.Server
    signals: SignalsServer = field(init=False)
    numbers: Numbers | None = None
    fault: Callable[[], str] = lambda: ""
    """Why it cannot work now, once it has started."""

    def __post_init__(self) -> None:
        self.signals = SignalsServer(
            Pages(
                metrics=lambda: self.numbers.metrics() if self.numbers else b"",
                numbers=lambda: self.numbers.numbers() if self.numbers else {},
                fault=lambda: self.fault() if self.numbers else "starting",
            )
        )

    @classmethod
    async def open(cls, environment: Environment, *, ending: EndingBox) -> "Front":
        """Bind both ports and publish them."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: _loop_fault(context, ending))
        on_terminate(loop, lambda: ending.asked("the scheduler was asked to end; start it again to go on"))
        host, tls = environment.around.bind_host, environment.around.tls
        server = make_server(environment.around.token, tls=tls)
        address = bind(server, port=environment.grpc_port, host=host, tls=tls)
        front = cls(server=server)
        port = await front.signals.start(host=host, port=environment.signals_port)
        write_endpoint(environment.run_dir, process=environment.process, grpc=address, signals=f"{host}:{port}")
        return front

    async def close(self) -> None:
        """Close both ports; connections that are still open are broken off."""
        await self.server.stop(_STOP_GRACE_S)
        await self.signals.close()
        if self.numbers is not None:
            self.numbers.close()


def _loop_fault(context: dict[str, object], ending: EndingBox) -> None:
    error = context.get("exception")
    if isinstance(error, BaseException):
        report(error, ending=ending)
    else:
        logging.getLogger("streamrl.scheduler").error("%s", context.get("message"))
