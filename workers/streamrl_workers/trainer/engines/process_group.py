"""All ranks of one trainer: how they find each other, and how rank 0, the coordinator, calls them.

Owns: the rendezvous on MASTER_ADDR:MASTER_PORT and who is admitted; the lockstep of calls, deadlines, who is to blame; the word that
all is over. Does not own: connections (`rank_link.py`), what is computed (`worker.py`), the collectives inside it
(torch.distributed). No torch: it is loaded, and its own store opened, when all ranks are there.

    call ─▶ CALL to every other rank ─▶ own part, here ─▶ ANSWER or ERROR of every other rank ─▶ answers by rank

    consumes: answers    produces: calls    waits for: every rank's answer    unblocked by: a lost link, a deadline

Invariants:
- Only who knows the run's token is admitted, each rank once, and only a rank 0 that knows it is obeyed; the token itself does
  not cross the connection, only keyed hashes of numbers that the other side has drawn for this connection.
- Every call reaches every rank, in the same order; each gets its own payload. A rank without a sample gets an empty payload and
  runs a masked dummy: unequal numbers of forward passes would leave a rank stuck in a collective.
- After an error no further call is made: the ranks may no longer be in step.
- A call ends: a rank that is gone makes the collectives of the others fail (gloo sees it; NCCL does not), silence and a missing
  answer have a deadline, and where the own part hangs in a collective with a lost rank, the process ends `_GRACE_S` later.
- The rank that is gone or silent is blamed before one that has only failed: failing follows from it.
- Ranks are told of an end that is nobody's loss (done, asked to end, a user's error) and end with exit code 0; without that word
  they take rank 0 for dead and end with 75, to be started again (76 where rank 0 is on another node: its own end says why).
  A rank that is only silent may have no end that says why: then rank 0 ends with 75, the others with 76, and it is counted once.
"""

import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from streamrl.errors import EXIT_RETRY, UserError
from streamrl.keys import ENV_MASTER_ADDR, ENV_MASTER_PORT
from streamrl.text import say
from streamrl_workers.process.daemon_thread import begin_in_thread
from streamrl_workers.trainer.engines.engine import RankEnvironment, RankLostError, RetryError
from streamrl_workers.trainer.engines.rank_link import (
    LATE_S,
    FrameKind,
    LostPeer,
    Payload,
    PeerLostError,
    RankLink,
    decode,
    describe_error,
    encode,
    restore_error,
)

_CHALLENGE_BYTES = 32
_HELLO_BYTES = 4096
"""A hello is a line of some hundred bytes."""
_HELLO_S = 10.0
"""For the whole hello of someone who has connected; a stranger holds up the others for no longer, however slowly it speaks."""
_MALFORMED = (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError)
"""What reading the hello of a stranger can raise: an endless number, brackets without end."""
_RETRY_S = 0.2
"""Between two attempts to reach rank 0, which may start later."""
_GRACE_S = 10.0
"""For a collective to notice by itself that a rank is lost, before the process is ended under it."""
_BLAME_S = 2.0
"""After a failure: until then a rank that died shows it by its closed connection."""
_FAREWELL_S = 5.0
"""For the other ranks to end, before this process does."""

log = logging.getLogger(__name__)


class RankCalls(Protocol):
    """Ranks of the trainer that rank 0 calls together."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def call(self, method: str, payloads: Sequence[Payload]) -> list[Payload]:
        """Call `RankWorker.<method>(payload)` on every rank, each with its own payload; the answers by rank.

        Raises:
            RetryError: a rank is gone or late; the trainer is to begin again at its checkpoint.
            UserError, OSError: what a rank raised of these (the first by rank).
        """


class Ranks(RankCalls, Protocol):
    """All ranks of the trainer, as rank 0 sees them."""

    def begin(self, method: str, payloads: Sequence[Payload]) -> "Future[list[Payload]]":
        """Call a method that returns a Future, on every rank; return when all have returned.

        The Future here has the results by rank, once all ranks have theirs, or raises as `call` does. Calls may follow meanwhile; one Future is
        waited for at a time.
        """


class SingleRank:
    """The only rank is this process."""

    size = 1

    def __init__(self, worker: object) -> None:
        self._worker = worker

    def call(self, method: str, payloads: Sequence[Payload]) -> list[Payload]:
        """Call it here."""
        (payload,) = payloads
        return [getattr(self._worker, method)(payload)]

    def begin(self, method: str, payloads: Sequence[Payload]) -> "Future[list[Payload]]":
        """Begin it here."""
        (own,) = self.call(method, payloads)
        return begin_in_thread(lambda: [own.result()], name=f"trainer-{method}")


class DataRanks:
    """Data ranks, each of `copies` ranks that follow each other and get the same samples; implements `RankCalls`."""

    def __init__(self, ranks: RankCalls, *, copies: int) -> None:
        self._ranks, self._copies = ranks, copies
        self.size = ranks.size // copies

    def call(self, method: str, payloads: Sequence[Payload]) -> list[Payload]:
        """Call all ranks, each with the payload of its data rank; return the answer of the first rank of each."""
        return self._ranks.call(method, [one for one in payloads for _ in range(self._copies)])[:: self._copies]


READY, BUILD = "get_ready", "build"
"""Calls of a rank above 0 before it has a worker: until it could join torch's group, then to join it and make the worker."""
PASSES = frozenset({"rehearse", "prepare", "accumulate", "accumulate_policy", "accumulate_values"})
"""Calls in which a rank that fails leaves the others in a collective."""


def everywhere(ranks: RankCalls, method: str, payload: Payload = None) -> list[Payload]:
    """The same call with the same payload on every rank."""
    return ranks.call(method, [payload] * ranks.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """What ranks need to know to find each other."""

    env: RankEnvironment
    token: str
    timeout_s: float  # `trainer.rankTimeoutSeconds`, of every wait


class HangGuard:
    """Ends this process when it computes on, long after a rank was lost: a collective that never returns."""

    def __init__(self, *, exit_code: Callable[[LostPeer], int]) -> None:
        self._exit_code = exit_code
        self._serial = 0
        self._computing = False
        self._loss = threading.Event()

    def __enter__(self) -> None:
        self._serial += 1
        self._computing = True

    def __exit__(self, *exc_info: object) -> None:
        self._computing = False

    def lost(self, loss: LostPeer) -> None:
        """A rank is lost."""
        self._loss.set()
        if self._computing:
            timer = threading.Timer(_GRACE_S, self._give_up, (self._serial, loss))
            timer.daemon = True
            timer.start()

    def wait_loss(self, timeout_s: float) -> None:
        """Until a rank is lost."""
        self._loss.wait(timeout_s)

    def _give_up(self, serial: int, loss: LostPeer) -> None:
        if self._computing and self._serial == serial:
            say(loss.text)
            os._exit(self._exit_code(loss))


class _LateError(RetryError):
    """A rank that has not answered."""


class ProcessGroup:
    """Rank 0's side of all ranks; implements `Ranks` once they are there. It may be alone."""

    def __init__(self, rendezvous: Rendezvous, *, lost_code: int = EXIT_RETRY) -> None:
        """Listen. `lost_code`: exit code where another rank's end says why. A port in use is the user's error."""
        self._rendezvous = rendezvous
        self._timeout_s = rendezvous.timeout_s
        self._by_rank: dict[int, RankLink] = {}
        self._lost: LostPeer | None = None
        self._told: Callable[[str], None] | None = None
        self._guard = HangGuard(exit_code=lambda loss: EXIT_RETRY if loss.silent else lost_code)
        self._worker: object = None
        self._broken = ""
        self.addresses: list[str] = []
        """host:port at which each other rank serves its weights, by rank; known once it is built."""
        self._listener = None if rendezvous.env.alone else _listen(rendezvous.env)

    @property
    def links(self) -> list[RankLink]:
        """To the ranks 1 to N - 1, once all are there."""
        return [self._by_rank[rank] for rank in sorted(self._by_rank)]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._rendezvous.env.size

    @property
    def excused(self) -> bool:
        """Whether a rank is lost whose own end says why."""
        return self._lost is not None and not self._lost.silent

    @property
    def loss(self) -> RetryError | None:
        """Why this process cannot continue, once a rank is lost."""
        return None if self._lost is None else RetryError(self._lost.text)

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Be told why, at once or later and from another thread, when a rank is lost."""
        self._told = callback
        if self._lost is not None:
            callback(self._lost.text)

    def gather(self) -> "ProcessGroup | None":
        """Wait for all other ranks; None if there are none. Raises RankLostError naming those that did not come."""
        if self._listener is None:
            return None
        deadline_s = time.monotonic() + self._timeout_s
        with self._listener:
            while len(self._by_rank) < self.size - 1:
                self._listener.settimeout(max(0.001, deadline_s - time.monotonic()))
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    raise RankLostError(f"{self._absent()} did not come within {self._timeout_s:g} s") from None
                self._admit(connection, deadline_s=min(deadline_s, time.monotonic() + _HELLO_S))
        log.info("all %d ranks are there", self.size)
        return self

    def build(self, create: Callable[[], object], *, facts: Payload, timeout_s: float) -> None:
        """Make the worker of every rank at the same time, once all others are ready for it; `facts` are what they need."""
        self._together(READY, [None] * self.size, own=lambda: None, timeout_s=timeout_s)
        self._worker, *self.addresses = self._together(BUILD, [facts] * self.size, own=create, timeout_s=timeout_s)

    def call(self, method: str, payloads: Sequence[Payload]) -> list[Payload]:
        """Call the method everywhere."""
        assert len(payloads) == self.size, f"{len(payloads)} payloads for {self.size} ranks"
        function: Callable[[Any], Any] = getattr(self._worker, method)
        return self._together(method, payloads, own=lambda: function(payloads[0]), timeout_s=self._timeout_s)

    def begin(self, method: str, payloads: Sequence[Payload]) -> "Future[list[Payload]]":
        """Begin it everywhere."""
        own: Future[Payload] = self.call(method, payloads)[0]
        return begin_in_thread(lambda: self._later(method, own=own), name=f"trainer-{method}")

    def _later(self, what: str, *, own: "Future[Payload]") -> list[Payload]:
        """Wait for the results of all ranks: the own one first, as in a call."""
        answer = _tried(own.result, what=what)
        try:
            answers = self._answers(what=what, timeout_s=self._timeout_s, later=True)
            self._raise_first([*answers, answer])
        except PeerLostError as error:
            raise RetryError(str(error)) from error
        return [answer, *answers]

    def end(self, *, timeout_s: float = _FAREWELL_S) -> None:
        """All is over and nobody is lost: tell all ranks and wait until they are gone."""
        if self._listener is not None:
            self._listener.close()
        farewells = [
            threading.Thread(target=link.farewell, args=(FrameKind.END,), kwargs={"timeout_s": timeout_s}, daemon=True)
            for link in self.links
        ]
        for farewell in farewells:
            farewell.start()
        for farewell in farewells:
            farewell.join(timeout_s)

    # ---------------------------------------------------------------- rendezvous

    def _admit(self, connection: socket.socket, *, deadline_s: float) -> None:
        rank = None
        with contextlib.suppress(*_MALFORMED):
            rank = self._greeted(connection, deadline_s=deadline_s)
        if rank is None:
            log.warning("someone who is no rank of this run has connected")
            connection.close()
            return
        link = RankLink(connection, peer=f"rank {rank}", silence_s=self._timeout_s, on_lost=self._on_lost)
        self._by_rank[rank] = link

    def _greeted(self, connection: socket.socket, *, deadline_s: float) -> int | None:
        """The rank that has connected; None: it is not to be admitted."""
        challenge = secrets.token_hex(_CHALLENGE_BYTES)
        _say(connection, challenge)
        hello = json.loads(_read_line(connection, deadline_s=deadline_s))
        rank, size = int(hello["rank"]), int(hello["size"])
        proof = _proof(self._rendezvous.token, challenge=challenge, rank=rank)
        if not hmac.compare_digest(proof, str(hello["proof"])):
            return None
        if size != self.size or not 0 < rank < self.size or rank in self._by_rank:
            log.warning("rank %d of %d has come, expected is one of %s of %d", rank, size, self._absent(), self.size)
            return None
        _say(connection, _proof(self._rendezvous.token, challenge=str(hello["challenge"]), rank=0))
        return rank

    def _absent(self) -> str:
        absent = [rank for rank in range(1, self.size) if rank not in self._by_rank]
        return f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"

    def _on_lost(self, loss: LostPeer) -> None:
        self._lost = self._lost or loss
        self._guard.lost(loss)
        if self._told is not None:
            self._told(loss.text)

    # ---------------------------------------------------------------- calls

    def _together(
        self, what: str, payloads: Sequence[Payload], *, own: Callable[[], Any], timeout_s: float
    ) -> list[Payload]:
        """What all ranks do at one time. `timeout_s`: for the others, once the own part is done."""
        if self._broken:
            raise RetryError(f"the ranks are no longer in step: {self._broken}")
        try:
            with self._guard:
                messages = [encode([what, payload]) for payload in payloads[1:]]
                for link, message in zip(self.links, messages, strict=True):
                    link.send(FrameKind.CALL, message)
                answer = _tried(own, what=what)
                answers = self._answers(what=what, timeout_s=_BLAME_S if isinstance(answer, Exception) else timeout_s)
                self._raise_first([*answers, answer])
                return [answer, *answers]
        except PeerLostError as error:
            self._broken = str(error)
            raise RetryError(self._broken) from error
        except Exception as error:
            self._broken = str(error)
            raise

    def _answers(self, *, what: str, timeout_s: float, later: bool = False) -> list[Payload | Exception]:
        """Of all other ranks. Raises PeerLostError where one is gone."""
        deadline_s = time.monotonic() + timeout_s
        answers: list[Payload | Exception] = []
        for link in self.links:
            try:
                left_s = max(0.0, deadline_s - time.monotonic())
                answers.append(_received(link, timeout_s=left_s, what=what, later=later))
            except TimeoutError:
                answers.append(_LateError(f"{link.peer} has not answered {what} for {timeout_s:g} s"))
        return answers

    def _raise_first(self, answers: Sequence[Payload | Exception]) -> None:
        """The user's errors first, then those of ranks that have spoken."""
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        for error in errors:
            if isinstance(error, UserError):
                raise error  # its rank may have ended since
        if any(isinstance(error, RetryError) for error in errors):
            self._blame()
        for error in sorted(errors, key=lambda e: (isinstance(e, RetryError), isinstance(e, _LateError))):
            raise error

    def _blame(self) -> None:
        """Raise RetryError if a rank is gone or silent."""
        self._guard.wait_loss(_BLAME_S)
        for link in self.links:
            if link.lost is not None:
                raise RetryError(link.lost.text)
        for link in self.links:
            if link.silent_s > LATE_S:
                raise RetryError(f"{link.peer} is silent for {link.silent_s:.0f} s")


def _tried(work: Callable[[], Any], *, what: str) -> Payload | Exception:
    """Rank 0's own part, or the error of a collective in it: another rank may be why."""
    try:
        return work()
    except RuntimeError as error:  # torch's, of collectives among others
        log.exception("rank 0 failed in %s", what)
        return RetryError(f"rank 0 failed in {what}: {error}")


def _received(link: RankLink, *, timeout_s: float, what: str, later: bool = False) -> Payload | Exception:
    """Return the answer of another rank, or its error. Raises TimeoutError."""
    frame = link.receive(timeout_s, later=later)
    value = decode(frame.data)
    if frame.kind == FrameKind.LATER:
        return restore_error(value["error"], peer=link.peer, what=what) if "error" in value else value["answer"]
    return restore_error(value, peer=link.peer, what=what) if frame.kind == FrameKind.ERROR else value


def send_later(link: RankLink, future: "Future[Payload]") -> None:
    """Send the result of `future`, or its error, to rank 0 when it is there: how a rank above 0 serves `Ranks.begin`."""

    def send(done: "Future[Payload]") -> None:
        error = done.exception()
        value = {"answer": done.result()} if error is None else {"error": describe_error(error)}
        with contextlib.suppress(PeerLostError):  # this rank's main thread sees it too
            link.send(FrameKind.LATER, encode(value))

    future.add_done_callback(send)


def join(rendezvous: Rendezvous, *, on_lost: Callable[[LostPeer], None]) -> RankLink:
    """The link to rank 0, which may begin to listen later. Raises RankLostError."""
    deadline_s = time.monotonic() + rendezvous.timeout_s
    reason = "nobody listens"
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((rendezvous.env.host, rendezvous.env.port), timeout=left_s)
            with contextlib.ExitStack() as on_error:
                on_error.callback(connection.close)
                _introduce(connection, rendezvous, deadline_s=deadline_s)  # rank 0 admits one after the other
                on_error.pop_all()
            return RankLink(connection, peer="rank 0", silence_s=rendezvous.timeout_s, on_lost=on_lost)
        except OSError as error:
            reason = str(error)
        time.sleep(min(_RETRY_S, max(0.0, deadline_s - time.monotonic())))
    where = f"{rendezvous.env.host}:{rendezvous.env.port}"
    raise RankLostError(f"rank 0 was not reached at {where} within {rendezvous.timeout_s:g} s: {reason}")


def _introduce(connection: socket.socket, rendezvous: Rendezvous, *, deadline_s: float) -> None:
    """Say who we are, and hear it: anything may listen there, an older run, another program, someone who took the port first."""
    env, challenge = rendezvous.env, secrets.token_hex(_CHALLENGE_BYTES)
    theirs = _read_line(connection, deadline_s=deadline_s)
    proof = _proof(rendezvous.token, challenge=theirs, rank=env.rank)
    _say(connection, json.dumps({"rank": env.rank, "size": env.size, "proof": proof, "challenge": challenge}))
    welcome = _read_line(connection, deadline_s=deadline_s)
    if not hmac.compare_digest(_proof(rendezvous.token, challenge=challenge, rank=0).encode(), welcome.encode()):
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


def _listen(env: RankEnvironment) -> socket.socket:
    """On the rendezvous' own address where it is one of this machine's, else on all: a service's name is not bindable."""
    try:
        return socket.create_server((env.host, env.port), backlog=env.size)
    except socket.gaierror as error:
        raise UserError(field=ENV_MASTER_ADDR, rule=f"cannot be resolved: {error.strerror}", got=env.host) from error
    except OSError as error:
        first = error
    try:
        return socket.create_server(("", env.port), backlog=env.size)
    except OSError:
        raise UserError(
            field=ENV_MASTER_PORT,
            rule=f"cannot be bound: {first.strerror}",
            got=env.port,
            fix="choose a port that is free on rank 0's machine",
        ) from first
