"""The scheduler's part of an agent host's connection: requests of the task pool go out, rows come back.

Owns what each event of the link does. Does not own who plays what (`tasks/agent_hosts.py`), nor the course of a connection
(`connections.py`). The core does not know agent hosts: to it a turn is with the task pool.
"""

import json
from collections.abc import Iterator
from typing import Any

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.server.connections import (
    AgentHostEntry,
    Connections,
    PeerHandler,
    PeerLink,
    dispatch,
    log,
)
from streamrl_workers.stream.messages import ProtocolError
from streamrl_workers.tasks.agent_hosts import AgentHosts, HostedItem


class AgentHostHandler(PeerHandler):
    """One agent host."""

    entry: AgentHostEntry

    def __init__(self, connections: Connections, hosts: AgentHosts, *, hello: pb.AgentsHello, life: str) -> None:
        """`life`: of this scheduler."""
        link = PeerLink(f"agent host {hello.host_id}")
        super().__init__(connections, AgentHostEntry(link=link, hello=hello))
        self._hosts = hosts
        self._life = life
        self._id = hello.host_id
        self.handlers = {
            "answer": self._on_answer,
            "started": lambda started: hosts.started(self._id, started.number),
            "silences": lambda silences: hosts.silent(self._id, silences.messages),
            "leaving": lambda _: hosts.leaving(self._id),
        }

    def on_join(self) -> None:
        log.info("agent host %s has joined", self._id)
        self.entry.link.send(pb.AgentsCommand(welcome=pb.AgentsWelcome(life=self._life)))
        self._hosts.joined(self._id, instance=self.entry.hello.instance, send=self._send)

    def on_leave(self) -> None:
        self._hosts.left(self._id)

    async def take(self, event: Any) -> None:  # noqa: ANN401 - as in the class above
        if self.connections.hears(self.entry):
            dispatch(event, self.handlers)

    def _left(self) -> None:
        self.on_leave()

    def _send(self, number: int, asked: HostedItem) -> None:
        """Written out when it is its turn: a link that comes back is asked all again, with long histories."""

        def make() -> Iterator[bytes]:
            request = pb.AgentsRequest(number=number, request=asked.message(), item=asked.item)
            yield pb.AgentsCommand(request=request).SerializeToString()

        self.entry.link.send_later(make)

    def _on_answer(self, answer: pb.AgentsAnswer) -> None:
        try:
            row = json.loads(answer.row)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"an answer is no JSON: {error}") from None
        self._hosts.answered(self._id, answer.number, row)
