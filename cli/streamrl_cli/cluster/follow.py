"""Follows one job to its end: a line when its progress or its state changes, and each new event.

Asks every few seconds; an API server that does not answer is asked again for a while. Ends with the job.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from time import monotonic

from streamrl.errors import EXIT_DONE, EXIT_FAULT
from streamrl_cli import console
from streamrl_cli.cluster.api import Cluster, Object, UnreachableError
from streamrl_cli.cluster.describe import event_text, event_time
from streamrl_cli.cluster.jobs import DELETING, ENDED, FAILED, NOT_SEEN, SUCCEEDED, progress, state, why
from streamrl_cli.cluster.patience import Patience
from streamrl_cli.cluster.refusals import NotFoundError
from streamrl_operator.kube.kinds import EVENT, RLJOB

EXIT_INTERRUPTED = 130
"""What shells expect of a program that Ctrl-C stopped."""
INTERVAL_S = 2.0
_OPERATOR_LATE_S = 20.0
"""An operator that has not looked at a new job after so long is probably not there."""

Say = Callable[[str], None]


async def follow(name: str, *, cluster: Cluster, interval_s: float = INTERVAL_S, say: Say = console.out) -> int:
    """Show a job's progress until it has ended; 0 Succeeded, 1 Failed or deleted, 130 after Ctrl-C."""
    try:
        return await _Follower(name, cluster=cluster, say=say).to_the_end(interval_s)
    except asyncio.CancelledError:
        say(f"detached; the job goes on. Look again: streamrl status {name} -n {cluster.namespace}")
        return EXIT_INTERRUPTED


class _Follower:
    """What was shown already."""

    def __init__(self, name: str, *, cluster: Cluster, say: Say) -> None:
        self.name = name
        self.cluster = cluster
        self.say = say
        self.last_line = ""
        self.seen_events: set[tuple[str, str]] = set()
        self.began = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.begun_s = monotonic()
        self.patience = Patience()
        self.warned = False

    async def to_the_end(self, interval_s: float) -> int:
        while True:
            try:
                code = await self._look()
            except NotFoundError:
                self.say(f"{self.name} was deleted")
                return EXIT_FAULT
            except UnreachableError as error:
                self.patience.bear(error)
                self._show(f"waiting: {error}")
                code = None
            if code is not None:
                return code
            await asyncio.sleep(interval_s)

    async def _look(self) -> int | None:
        """Show what is new; the exit code if the job has ended."""
        job = await self.cluster.get(RLJOB, self.name)
        await self._show_events(job)
        self.patience.answered()
        now = state(job)
        self._warn(now)
        self._show(_line(job))
        if now not in ENDED:
            return None
        return EXIT_DONE if now == SUCCEEDED else EXIT_FAULT

    async def _show_events(self, job: Object) -> None:
        fields = f"regarding.name={self.name},regarding.uid={job['metadata']['uid']}"
        events = await self.cluster.find(EVENT, fields=fields)
        for event in sorted(events, key=event_time):
            seen = (event["metadata"]["name"], event_time(event))
            if seen not in self.seen_events and event_time(event) >= self.began:
                self.say(f"  {event.get('type', '')} {event.get('reason', '')}: {event_text(event)}")
            self.seen_events.add(seen)

    def _show(self, line: str) -> None:
        if line != self.last_line:
            self.say(line)
        self.last_line = line

    def _warn(self, now: str) -> None:
        if now == NOT_SEEN and not self.warned and monotonic() - self.begun_s > _OPERATOR_LATE_S:
            self.warned = True
            self.say("no operator has looked at the job yet; is it installed, and does it watch this namespace?")


def _line(job: Object) -> str:
    message = f"; {why(job)}" if state(job) in (FAILED, DELETING) or not job.get("status", {}).get("step") else ""
    return f"{progress(job)}{message}"
