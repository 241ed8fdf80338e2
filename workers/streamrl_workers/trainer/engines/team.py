"""How the ranks of one trainer find each other: rank 0 listens, the others come.

Owns: the rendezvous on MASTER_ADDR:MASTER_PORT, who is admitted, the kinds of frames, errors as values. Does not own: calls
(`linked_ranks.py`, `follower.py`). No torch: it is loaded, and its own store opened, when all ranks are there.

Invariants:
- Only who knows the run's token is admitted, each rank once, and only a rank 0 that knows it is obeyed; the token itself does
  not cross the connection, only keyed hashes of numbers that the other side has drawn for this connection.
- All waits end `timeout_s` after they began (`trainer.rankTimeoutSeconds`).
"""

import contextlib
import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from streamrl.errors import UserError
from streamrl.keys import ENV_MASTER_ADDR, ENV_MASTER_PORT
from streamrl_workers.trainer.endings import RankLostError
from streamrl_workers.trainer.engines.links import Link, Loss
from streamrl_workers.trainer.engines.place import Place

_CHALLENGE_BYTES = 32
_HELLO_BYTES = 4096
"""A hello is a line of some hundred bytes."""
_HELLO_S = 10.0
"""For the whole hello of someone who has connected; a stranger holds up the others for no longer, however slowly it speaks."""
_MALFORMED = (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError)
"""What reading the hello of a stranger can raise: an endless number, brackets without end."""
_RETRY_S = 0.2
"""Between two attempts to reach rank 0, which may start later."""

log = logging.getLogger(__name__)


class Kind(IntEnum):
    """What a frame between ranks means."""

    BUILD = 0  # rank 0: load the model; data: facts of the data group
    CALL = 1  # rank 0: [method, payload]
    ANSWER = 2  # the others: what the method returned
    ERROR = 3  # the others: what it raised
    END = 4  # rank 0: done


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What ranks need to know to find each other."""

    place: Place
    token: str
    timeout_s: float


class Team:
    """Rank 0's side: the links to all other ranks, by rank."""

    def __init__(self, meeting: Meeting, *, on_lost: Callable[[Loss], None]) -> None:
        """Listen. `on_lost` is called with the reason whenever a rank is lost. A port in use is the user's error."""
        self.meeting = meeting
        self._on_lost = on_lost
        self._links: dict[int, Link] = {}
        self._listener = _listen(meeting.place)

    @property
    def links(self) -> list[Link]:
        """Of the ranks 1 to N - 1, once all are there."""
        return [self._links[rank] for rank in sorted(self._links)]

    def gather(self) -> None:
        """Wait for all other ranks. Raises RankLostError naming those that did not come."""
        deadline_s = time.monotonic() + self.meeting.timeout_s
        with self._listener:
            while len(self._links) < self.meeting.place.size - 1:
                self._listener.settimeout(max(0.001, deadline_s - time.monotonic()))
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    raise RankLostError(f"{self._absent()} did not come within {self.meeting.timeout_s:g} s") from None
                self._admit(connection, deadline_s=min(deadline_s, time.monotonic() + _HELLO_S))
        log.info("all %d ranks are there", self.meeting.place.size)

    def end(self, *, timeout_s: float) -> None:
        """Tell all ranks that it is over and wait until they are gone."""
        self._listener.close()
        farewells = [
            threading.Thread(target=link.farewell, args=(Kind.END,), kwargs={"timeout_s": timeout_s}, daemon=True)
            for link in self.links
        ]
        for farewell in farewells:
            farewell.start()
        for farewell in farewells:
            farewell.join(timeout_s)

    def _admit(self, connection: socket.socket, *, deadline_s: float) -> None:
        rank = None
        with contextlib.suppress(*_MALFORMED):
            rank = self._greeted(connection, deadline_s=deadline_s)
        if rank is None:
            log.warning("someone who is no rank of this run has connected")
            connection.close()
            return
        self._links[rank] = Link(
            connection, peer=f"rank {rank}", silence_s=self.meeting.timeout_s, on_lost=self._on_lost
        )

    def _greeted(self, connection: socket.socket, *, deadline_s: float) -> int | None:
        """The rank that has connected; None: it is not to be admitted."""
        challenge = secrets.token_hex(_CHALLENGE_BYTES)
        _say(connection, challenge)
        hello = json.loads(_read_line(connection, deadline_s=deadline_s))
        rank, size = int(hello["rank"]), int(hello["size"])
        proof = _proof(self.meeting.token, challenge=challenge, rank=rank)
        if not hmac.compare_digest(proof, str(hello["proof"])):
            return None
        expected = self.meeting.place.size
        if size != expected or not 0 < rank < expected or rank in self._links:
            log.warning("rank %d of %d has come, expected is one of %s of %d", rank, size, self._absent(), expected)
            return None
        _say(connection, _proof(self.meeting.token, challenge=str(hello["challenge"]), rank=0))
        return rank

    def _absent(self) -> str:
        absent = [rank for rank in range(1, self.meeting.place.size) if rank not in self._links]
        return f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"


def join(meeting: Meeting, *, on_lost: Callable[[Loss], None]) -> Link:
    """The link to rank 0, which may begin to listen later. Raises RankLostError."""
    deadline_s = time.monotonic() + meeting.timeout_s
    reason = "nobody listens"
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((meeting.place.host, meeting.place.port), timeout=left_s)
            with contextlib.ExitStack() as on_error:
                on_error.callback(connection.close)
                _introduce(connection, meeting, deadline_s=deadline_s)  # rank 0 admits one after the other
                on_error.pop_all()
            return Link(connection, peer="rank 0", silence_s=meeting.timeout_s, on_lost=on_lost)
        except OSError as error:
            reason = str(error)
        time.sleep(min(_RETRY_S, max(0.0, deadline_s - time.monotonic())))
    where = f"{meeting.place.host}:{meeting.place.port}"
    raise RankLostError(f"rank 0 was not reached at {where} within {meeting.timeout_s:g} s: {reason}")


def _introduce(connection: socket.socket, meeting: Meeting, *, deadline_s: float) -> None:
    """Say who we are, and hear it: anything may listen there, an older run, another program, someone who took the port first."""
    place, challenge = meeting.place, secrets.token_hex(_CHALLENGE_BYTES)
    theirs = _read_line(connection, deadline_s=deadline_s)
    proof = _proof(meeting.token, challenge=theirs, rank=place.rank)
    _say(connection, json.dumps({"rank": place.rank, "size": place.size, "proof": proof, "challenge": challenge}))
    welcome = _read_line(connection, deadline_s=deadline_s)
    if not hmac.compare_digest(_proof(meeting.token, challenge=challenge, rank=0).encode(), welcome.encode()):
        raise ConnectionRefusedError("who listens there is not rank 0 of this run")


def _proof(token: str, *, challenge: str, rank: int) -> str:
    return hmac.new(token.encode(), f"{challenge}/{rank}".encode(), "sha256").hexdigest()


def _say(connection: socket.socket, line: str) -> None:
    connection.sendall(f"{line}\n".encode())  # some hundred bytes: the kernel takes them at once


def _read_line(connection: socket.socket, *, deadline_s: float) -> str:
    """One line without its end, byte by byte: what follows it belongs to the link."""
    line = bytearray()
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        byte = connection.recv(1)
        if not byte or len(line) > _HELLO_BYTES:
            raise ConnectionRefusedError("the other side does not introduce itself")
        line += byte
    return line.decode("ascii", errors="replace").strip()


def _listen(place: Place) -> socket.socket:
    """On the rendezvous' own address where it is one of this machine's, else on all: a service's name is not bindable."""
    try:
        return socket.create_server((place.host, place.port), backlog=place.size)
    except socket.gaierror as error:
        raise UserError(field=ENV_MASTER_ADDR, rule=f"cannot be resolved: {error.strerror}", got=place.host) from error
    except OSError as error:
        first = error
    try:
        return socket.create_server(("", place.port), backlog=place.size)
    except OSError:
        raise UserError(
            field=ENV_MASTER_PORT,
            rule=f"cannot be bound: {first.strerror}",
            got=place.port,
            fix="choose a port that is free on rank 0's machine",
        ) from first
