"""All ranks as rank 0 calls them: over links to the others, and itself.

Owns: the lockstep of calls, deadlines, who is to blame. Does not own: links (`links.py`), what is computed (`worker.py`),
the collectives inside it (torch.distributed). No torch.

    call ─▶ CALL to every other rank ─▶ own part, here ─▶ ANSWER or ERROR of every other rank ─▶ answers by rank

    consumes: answers    produces: calls    waits for: every rank's answer    unblocked by: a lost link, `timeout_s`

Invariants:
- After an error no further call is made: the ranks may no longer be in step.
- A call ends: a rank that is gone makes the collectives of the others fail (gloo sees it; NCCL does not), silence and a missing
  answer have a deadline, and where the own part hangs in a collective with a lost rank, the process ends `_GRACE_S` later.
- The rank that is gone or silent is blamed before one that has only failed: failing follows from it.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.errors import EXIT_RETRY, UserError
from streamrl_workers.trainer.endings import RetryError
from streamrl_workers.trainer.engines import codec, failures
from streamrl_workers.trainer.engines.links import LATE_S, Link, Loss, LostError
from streamrl_workers.trainer.engines.ranks import Payload
from streamrl_workers.trainer.engines.team import Kind, Team

_GRACE_S = 10.0
"""For a collective to notice by itself that a rank is lost, before the process is ended under it."""
_BLAME_S = 2.0
"""After a failure: until then a rank that died shows it by its closed connection."""

log = logging.getLogger(__name__)


class Watch:
    """Ends this process when it computes on, long after a rank was lost: a collective that never returns."""

    def __init__(self, *, exit_code: Callable[[Loss], int] = lambda _: EXIT_RETRY) -> None:
        self._exit_code = exit_code
        self._serial = 0
        self._computing = False
        self._loss = threading.Event()

    def __enter__(self) -> None:
        self._serial += 1
        self._computing = True

    def __exit__(self, *exc_info: object) -> None:
        self._computing = False

    def lost(self, loss: Loss) -> None:
        """A rank is lost."""
        self._loss.set()
        if self._computing:
            timer = threading.Timer(_GRACE_S, self._give_up, (self._serial, loss))
            timer.daemon = True
            timer.start()

    def wait_loss(self, timeout_s: float) -> None:
        """Until a rank is lost."""
        self._loss.wait(timeout_s)

    def _give_up(self, serial: int, loss: Loss) -> None:
        if self._computing and self._serial == serial:
            sys.stderr.write(f"{loss.text}\n")
            sys.stderr.flush()
            os._exit(self._exit_code(loss))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What all ranks do at one time."""

    kind: Kind
    what: str  # as errors name it
    own: Callable[[], Any]  # this rank's part
    timeout_s: float  # for the others, once the own part is done


class LinkedRanks:
    """Several ranks; implements `Ranks`."""

    def __init__(self, team: Team, *, watch: Watch) -> None:
        """`watch` is told by the team of lost ranks."""
        self._links = team.links
        self._timeout_s = team.meeting.timeout_s
        self._watch = watch
        self._worker: object = None
        self._broken = ""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._links) + 1

    def build(self, create: Callable[[], object], *, facts: Payload, timeout_s: float) -> None:
        """Make the worker of every rank at the same time; `facts` are what the others need for it."""
        messages = [codec.encode(facts)] * len(self._links)
        work = Work(kind=Kind.BUILD, what="its start", own=create, timeout_s=timeout_s)
        self._worker = self._together(work, messages)[0]

    def check_start(self) -> None:
        """Raise RuntimeError if a rank has answered before all could begin: what it has to say is an error."""
        if any(link.unread for link in self._links):
            raise RuntimeError("another rank has failed in its start")

    def call(self, method: str, payloads: Sequence[Payload]) -> list[Payload]:
        """Call the method everywhere."""
        assert len(payloads) == self.size, f"{len(payloads)} payloads for {self.size} ranks"
        messages = [codec.encode([method, payload]) for payload in payloads[1:]]
        own: Callable[[Any], Any] = getattr(self._worker, method)
        work = Work(kind=Kind.CALL, what=method, own=lambda: own(payloads[0]), timeout_s=self._timeout_s)
        return self._together(work, messages)

    def _together(self, work: Work, messages: Sequence[bytes]) -> list[Payload]:
        if self._broken:
            raise RetryError(f"the ranks are no longer in step: {self._broken}")
        try:
            with self._watch:
                for link, message in zip(self._links, messages, strict=True):
                    link.send(work.kind, message)
                answer = self._own(work.own, what=work.what)
                return [answer, *self._answers(work)]
        except LostError as error:
            self._broken = str(error)
            raise RetryError(self._broken) from error
        except Exception as error:
            self._broken = str(error)
            raise

    def _own(self, work: Callable[[], Any], *, what: str) -> Payload:
        try:
            return work()
        except (UserError, OSError):
            raise
        except RuntimeError as error:  # torch's, of collectives among others
            log.exception("rank 0 failed in %s", what)
            self._blame()
            self._raise_errors(what)
            raise RetryError(f"rank 0 failed in {what}: {error}") from error

    def _answers(self, work: Work) -> list[Payload]:
        """Of all other ranks; then the first error, if there are any."""
        deadline_s = time.monotonic() + work.timeout_s
        outcomes = [self._outcome(link, work, max(0.0, deadline_s - time.monotonic())) for link in self._links]
        self._raise_first(outcomes)
        return outcomes

    def _outcome(self, link: Link, work: Work, left_s: float) -> Payload | Exception:
        try:
            frame = link.receive(left_s)
        except TimeoutError:
            return RetryError(f"{link.peer} has not answered {work.what} for {work.timeout_s:g} s")
        value = codec.decode(frame.data)
        return failures.restore(value, peer=link.peer, what=work.what) if frame.kind == Kind.ERROR else value

    def _raise_first(self, outcomes: Sequence[Payload | Exception]) -> None:
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if any(isinstance(error, RetryError) for error in errors):
            self._blame()
        for error in sorted(errors, key=lambda e: isinstance(e, RetryError)):  # the user's errors first
            raise error

    def _raise_errors(self, what: str) -> None:
        """The errors that other ranks have answered by now."""
        outcomes = []
        for link in self._links:
            try:
                frame = link.receive(_BLAME_S / len(self._links))
            except TimeoutError:
                continue
            if frame.kind == Kind.ERROR:
                outcomes.append(failures.restore(codec.decode(frame.data), peer=link.peer, what=what))
        self._raise_first(outcomes)

    def _blame(self) -> None:
        """Raise RetryError if a rank is gone or silent."""
        self._watch.wait_loss(_BLAME_S)
        for link in self._links:
            if link.lost is not None:
                raise RetryError(link.lost.text)
        for link in self._links:
            if link.silent_s > LATE_S:
                raise RetryError(f"{link.peer} is silent for {link.silent_s:.0f} s")
