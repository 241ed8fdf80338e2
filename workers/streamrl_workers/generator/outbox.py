"""What this generator has to tell the scheduler, until the link's writer takes it.

Owns: control events and the progress book between engine loop and writer. Does not own: the connection, when to send.

Invariants:
- Progress made before a control event is sent before it.
- Nothing is kept while there is no connection: the next hello tells the rest.
- Bounded: running requests by slots and token limits, ended ones by `full` (the engine loop pauses).
"""

import asyncio
from collections import deque

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.generator.progress import ProgressBook

_MAX_UNSENT_BYTES = 32 * 2**20
"""Of ended requests; more than that and the engine pauses until the scheduler has taken them."""


class Outbox:
    """Hands events from the engine loop to the link's writer."""

    def __init__(self) -> None:
        self.book = ProgressBook()
        self.filled = asyncio.Event()  # something is to be sent now
        self._controls: deque[pb.GeneratorEvent] = deque()
        self._open = False

    def open(self) -> None:
        """A connection is there: begin to keep events."""
        self.clear()
        self._open = True

    def clear(self) -> None:
        """The connection is gone, and with it everything that was to be sent."""
        self._open = False
        self._controls.clear()
        self.book.clear()

    @property
    def full(self) -> bool:
        """Whether the engine must pause."""
        return self.book.unsent_bytes > _MAX_UNSENT_BYTES

    @property
    def empty(self) -> bool:
        """Whether no end of a request waits to be sent."""
        return not self.book.has_ended()

    def post(self, event: pb.GeneratorEvent) -> None:
        """Send `event`, after the progress so far."""
        if self._open:
            self._controls.append(event)
            self.filled.set()

    def progressed(self) -> None:
        """The book has taken deltas: ended requests are sent at once."""
        if self.book.has_ended():
            self.filled.set()

    def pop(self, *, running: bool) -> list[pb.GeneratorEvent]:
        """Everything to be sent now; `running`: the gains of running requests, too."""
        self.filled.clear()
        batches = self.book.pop_ended()
        if running or self._controls:
            batches += self.book.pop_running()
        events = [pb.GeneratorEvent(progress=batch) for batch in batches] + list(self._controls)
        self._controls.clear()
        return events
