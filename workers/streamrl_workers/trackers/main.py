"""The process of one tracker: `python -m streamrl_workers.trackers FD`.

```
  scheduler ══ socket: look, end ══▶ TRACKER ── its package ──▶ files, or a server
            ◀═ how far it came ═════   ▲  └── trackers/<key>.json
                                       └── metrics/*.jsonl, archive/
```
The loop consumes frames; tells the tracker what is new in the run folder; produces an answer to each frame; waits for a frame. Unblocked by the
scheduler and by the end of the socket, which ends it.

Frames, as `process/framing.py` carries them:

    from the scheduler   {"key": .., "trackers": as the job has them, "run_dir": .., "plugin_dir": .. or null, "run": {"id", "name", "config"}}, once
                         then {"look": true}, at the end {"end": "succeeded" | "failed"}
    to the scheduler     {"steps": told, "cpu_s": .., "is_all": whether nothing more was there}, for each frame
                         {"error": ".."}, and then this process ends

The position is stored when the tracker has brought all before it to where a kill of this process does not take it away.
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamrl.errors import EXIT_DONE, EXIT_FAULT
from streamrl.keys import DIR_TRACKERS
from streamrl.spec.trackers import Trackers
from streamrl_workers.process import framing
from streamrl_workers.process.child import begin_as_child
from streamrl_workers.trackers.feed import TrackerFeed
from streamrl_workers.trackers.registry import Outcome, TrackedRun, TrackerRun, open_run

MOST_ERROR_CHARS = 300
MOST_MEMORY_BYTES = 4 * 2**30
"""Maximum memory of this process: packages read an answer of a server whole, whatever its size."""

log = logging.getLogger("streamrl.trackers")


def main() -> int:
    """Serve the scheduler until it is gone; the exit code."""
    control = begin_as_child(most_bytes=MOST_MEMORY_BYTES)
    frame = framing.receive(control)
    if frame is None:
        return EXIT_DONE
    try:
        process = open_tracker(frame)
        process.serve(control)
    except ConnectionError:  # the scheduler is gone
        return EXIT_DONE
    except Exception as error:  # whatever a tracker's package raises ends this process, and nothing else
        log.debug("the tracker failed", exc_info=True)
        with contextlib.suppress(ConnectionError):
            control.sendall(framing.encode({"error": _said(error)}))
        return EXIT_FAULT
    return EXIT_DONE


def open_tracker(frame: Mapping[str, Any]) -> "TrackerProcess":
    """Go on from where an earlier process of the run came to."""
    key, run_dir = str(frame["key"]), Path(frame["run_dir"])
    trackers = Trackers.model_validate(frame["trackers"])
    feed = TrackerFeed(run_dir, key=key, sample_interval_steps=trackers.sample_interval_steps)
    folder = run_dir / DIR_TRACKERS / key
    folder.mkdir(parents=True, exist_ok=True)
    before = feed.position
    next_step = before.steps + 1 if before.steps_offset or before.evaluations_offset else 0
    run = TrackedRun(folder=folder, next_step=next_step, **frame["run"])
    plugin_dir = Path(frame["plugin_dir"]) if frame.get("plugin_dir") else None
    return TrackerProcess(open_run(key, trackers.named()[key], run=run, plugin_dir=plugin_dir), feed=feed)


class TrackerProcess:
    """A tracker, what it is told, and the loop."""

    def __init__(self, tracker: TrackerRun, *, feed: TrackerFeed) -> None:
        self._tracker = tracker
        self._feed = feed

    def serve(self, control: socket.socket) -> None:
        """Until the run has ended, or the scheduler closes the socket."""
        control.sendall(framing.encode(self._answer(is_all=False)))
        while (frame := framing.receive(control)) is not None:
            outcome: Outcome | None = frame.get("end")
            is_all = self._tell(final=outcome is not None)
            while outcome is not None and not is_all:
                is_all = self._tell(final=True)
            if outcome is not None:
                self._tracker.close(outcome)
            control.sendall(framing.encode(self._answer(is_all=is_all)))
            if outcome is not None:
                return
        self._tracker.close(None)

    def _tell(self, *, final: bool) -> bool:
        """Tell what is new; whether nothing more was there."""
        new = self._feed.new(final=final)
        if new.points:
            self._tracker.scalars(new.points)
        for step, rows in sorted(new.tables.items()):
            self._tracker.samples(rows, step=step)
        if new.points or new.tables:
            self._tracker.flush()
        self._feed.told(new.position)
        return new.is_all

    def _answer(self, *, is_all: bool) -> dict[str, Any]:
        times = os.times()  # with those of children that were waited for
        return {
            "steps": self._feed.position.steps,
            "cpu_s": time.process_time() + times.children_user + times.children_system,
            "is_all": is_all,
        }


def _said(error: Exception) -> str:
    """One line of what it says."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MOST_ERROR_CHARS else f"{text[:MOST_ERROR_CHARS]}…"
