"""The heartbeat file: a process touches it every second, and who started the process watches it (bounds: `streamrl.liveness`).

        thread "heartbeat" ── asks the event loop to touch ──▶ FILE ◀── age ── parent, or the kubelet's probe

Owns both ends: `start_heartbeat` and `beat_from` in the process, `HeartbeatWatch` and `kill_when_frozen` in its parent.

Loops: the thread consumes time; produces a touch, through the event loop once there is one; waits for the next second.
`kill_when_frozen` consumes the file's age; produces notices (`silences.py`), then a kill; waits for the next look; ended by its owner.

Invariants: a process that is stopped, or whose event loop is blocked, touches nothing. A file that is missing says nothing: an image of an earlier
release writes none. Time in which the watching process did not run itself (a laptop that slept) is no silence.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from streamrl.keys import ENV_HEARTBEAT_FILE
from streamrl.liveness import INTERVAL_S, liveness_s, word_s
from streamrl_workers.process.silences import Silence, announce, forget

POLL_S = INTERVAL_S / 2
"""Between two looks at a heartbeat file."""

log = logging.getLogger("streamrl.heartbeat")

_loops: list[asyncio.AbstractEventLoop] = []
"""The event loop that must run for the heart to beat, if there is one yet."""


def start_heartbeat() -> None:
    """Beat from now on, in a thread: the imports of a worker take seconds. Nothing where no file is named."""
    path = os.environ.get(ENV_HEARTBEAT_FILE)
    if path:
        touch(path)
        threading.Thread(target=_beat, args=(path,), name="heartbeat", daemon=True).start()


def child_environment(name: str, *, environ: Mapping[str, str], watched_at_once: bool = True) -> dict[str, str]:
    """For a child called `name`: its heartbeat file, beside ours; empty where we have none. It is touched here, or says nothing before the child does.

    Processes of a local run have one folder: the child's file begins with our name, since another process may have a child of that name too.
    """
    own = environ.get(ENV_HEARTBEAT_FILE)
    if not own:
        return {}
    file = Path(own).with_name(f"{Path(own).name}.{name}")
    forget(file)
    if watched_at_once:
        touch(str(file))
    else:
        file.unlink(missing_ok=True)
    return {ENV_HEARTBEAT_FILE: str(file)}


def beat_from(loop: asyncio.AbstractEventLoop) -> None:
    """From now on the event loop must run for the heart to beat; once it is closed, the interpreter is enough again."""
    _loops[:] = [loop]


def _beat(path: str) -> None:
    while True:
        time.sleep(INTERVAL_S)
        try:
            for loop in _loops:
                loop.call_soon_threadsafe(touch, path)
        except RuntimeError:  # it is closed: the process is about to end
            _loops.clear()
        if not _loops:
            touch(path)


def touch(path: str) -> None:
    """One beat."""
    with contextlib.suppress(OSError):  # a disk that is full; a missing file says nothing
        try:
            os.utime(path)
        except FileNotFoundError:
            Path(path).parent.mkdir(exist_ok=True)
            Path(path).touch(mode=0o600)


@dataclass(slots=True, kw_only=True)
class HeartbeatWatch:
    """What the heartbeat file of one process says to its parent."""

    name: str
    file: Path
    bound_s: float
    looked_s: float
    """When the file was looked at last, or the start."""
    frozen: bool = False
    """The bound is over: it is to be killed."""
    silent_s: float = 0.0
    """Time without a beat, as far as this process ran itself."""
    _since: str = ""
    """When the silence began, once it was announced."""
    _beat_ns: int | None = None

    def look(self, now_s: float) -> str:
        """Look at the file, and announce what is new; returns the message for the log, "" if nothing is new."""
        passed_s = min(now_s - self.looked_s, 2 * POLL_S)  # more passes only when this process is frozen too
        self.looked_s, before_ns = now_s, self._beat_ns
        try:
            self._beat_ns = self.file.stat().st_mtime_ns
        except OSError:
            self._beat_ns = None
        is_silent = self._beat_ns is not None and self._beat_ns == before_ns
        self.silent_s = self.silent_s + passed_s if is_silent else 0.0
        return self._news()

    def end(self) -> None:
        """The process has ended: a notice that holds does no longer."""
        if self._since and not self.frozen:
            self._announce(f"{self.name} has ended, after a silence since {self._since}", holds=False)

    def _news(self) -> str:
        since = self._since
        if since and not self.silent_s:
            self._since = ""
            return self._announce(f"{self.name} shows signs of life again, after a silence since {since}", holds=False)
        if not since and self.silent_s >= word_s(self.bound_s):
            self._since = time.strftime("%H:%M:%S", time.localtime(time.time() - self.silent_s))
            silent = f"{self.name} has shown no sign of life for {self.silent_s:.0f} s, since {self._since}"
            return self._announce(f"{silent}; after {self.bound_s:g} s it is killed and started again", holds=True)
        if since and self.silent_s >= self.bound_s and not self.frozen:
            self.frozen = True
            return self._announce(f"{self.name} has shown no sign of life since {since}: it is killed", holds=False)
        return ""

    def _announce(self, message: str, *, holds: bool) -> str:
        announce(self.file, Silence(message=message, holds=holds))
        return message


async def kill_when_frozen(name: str, *, environ: Mapping[str, str], kill: Callable[[], None]) -> None:
    """Watch a child that was given `environ`, until it is killed or its owner cancels this."""
    if ENV_HEARTBEAT_FILE not in environ:
        return
    file = Path(environ[ENV_HEARTBEAT_FILE])
    watch = HeartbeatWatch(name=name, file=file, bound_s=liveness_s(os.environ), looked_s=time.monotonic())
    try:
        while not watch.frozen:
            if line := watch.look(time.monotonic()):
                log.info(line)  # people read the notice
            await asyncio.sleep(POLL_S)
    finally:
        watch.end()
    kill()
