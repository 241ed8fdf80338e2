"""The scheduler's side of the trackers' processes: starts them, has them look at the run folder, and goes on without them.

```
  TrackerClients ── a TrackerClient each ══ socket ══ python -m streamrl_workers.trackers ── reads the run folder itself
```
Owns the processes and their lives. A process that ends, fails, or does not answer in time is replaced after a pause that doubles with each, up to
`LONGEST_PAUSE_S`, until one lives longer; the first of such a row is a warning. Nothing of a run waits for a tracker: only at its end they have
`END_TIMEOUT_S` together to tell the rest. Invariant: behind `end` no process is left.

A client's loop consumes time; produces frames and its status; waits for an answer, for the next look, or for the end of the run.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from streamrl.errors import EXIT_DONE, EXIT_USER_ERROR
from streamrl.spec import RLJob
from streamrl_workers.process.child import ChildProcess, ProcessLostError
from streamrl_workers.scheduler.server.lifetime import ProcessExit
from streamrl_workers.trackers.registry import MODULE, Outcome

LONGEST_PAUSE_S = 600.0
"""What ends each new one will end the next, and each start costs seconds of CPU."""
_OUTCOMES: dict[int, Outcome] = {EXIT_DONE: "succeeded", EXIT_USER_ERROR: "failed"}
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""A tracker's package needs no devices."""

log = logging.getLogger("streamrl.scheduler.trackers")

TrackerState = Literal["starting", "ready", "down", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerTimes:
    """How long is waited, and how often is looked."""

    look_s: float = 5.0
    """Between two looks at the run folder."""
    start_s: float = 180.0
    """Imports, niced, and a server that is far away."""
    answer_s: float = 120.0
    first_pause_s: float = 5.0
    end_s: float = 30.0
    """All of them together, at the end of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerStatus:
    """Of one tracker in one scheduler's life."""

    state: TrackerState = "starting"
    steps: int = 0
    """That it was told of."""
    deaths: int = 0
    """Ends of its process that nobody asked for."""
    error: str = ""
    """Why it is down."""
    cpu_s: float = 0.0
    """User and system time of the process that lives."""


class TrackerClient:
    """One tracker's process, and its lives."""

    def __init__(self, key: str, opening: Mapping[str, Any], *, times: TrackerTimes) -> None:
        """`opening`: the first frame."""
        self.key = key
        self.status = TrackerStatus()
        self._opening = opening
        self._times = times
        self._ended = asyncio.Event()
        self._outcome: Outcome | None = None

    def end(self, outcome: Outcome) -> None:
        """Have it tell the rest; then `run` returns."""
        self._outcome = outcome
        self._ended.set()

    async def run(self) -> None:
        """One process after the other, until one has told the run's end."""
        pause_s = self._times.first_pause_s
        while True:
            began_s = time.monotonic()
            try:
                await self._live()
            except Exception as error:  # noqa: BLE001 - whatever it is: a tracker ends no run
                if time.monotonic() - began_s > LONGEST_PAUSE_S:
                    pause_s = self._times.first_pause_s
                self._note_loss(error, pause_s=pause_s)
            else:
                self._note(state="ended")
            if self._ended.is_set():
                return
            await self._ended_within(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _note_loss(self, error: Exception, *, pause_s: float) -> None:
        level = logging.INFO if self.status.error else logging.WARNING
        self._note(state="down", deaths=self.status.deaths + 1, error=str(error) or type(error).__name__)
        after = "" if self._ended.is_set() else f"; started again in {pause_s:g} s, the run goes on without it"
        log.log(level, "tracker %s: its process %s%s", self.key, self.status.error, after)

    async def _live(self) -> None:
        """One process; returns when it has told the run's end."""
        times = self._times
        name, what = f"tracker-{self.key}", f"the process of tracker {self.key}"
        try:
            child = await ChildProcess.start(MODULE, name=name, what=what, environment=_ENVIRONMENT)
        except OSError as error:  # no memory or no process number is left
            raise ProcessLostError(f"could not be started: {error.strerror}") from None
        try:
            await self._ask(child, self._opening, limit_s=times.start_s, what="did not begin the run in the tracker")
            while not self._ended.is_set():
                is_all = await self._ask(child, {"look": True}, limit_s=times.answer_s, what="did not tell what is new")
                self._note(state="ready", error="")
                if is_all:
                    await self._ended_within(times.look_s)
            await self._ask(child, {"end": self._outcome}, limit_s=times.end_s, what="did not tell the rest")
            self._note(error="")
        finally:
            await child.close()

    async def _ask(self, child: ChildProcess, frame: Mapping[str, Any], *, limit_s: float, what: str) -> bool:
        """Whether it has told all that was there. Raises `ProcessLostError`."""
        answer = await child.exchange(frame, limit_s=limit_s, what=what)
        if "error" in answer:
            raise ProcessLostError(f"failed: {answer['error']}")
        self._note(steps=int(answer["steps"]), cpu_s=float(answer["cpu_s"]))
        return bool(answer["is_all"])

    async def _ended_within(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._ended.wait()

    def _note(self, **changes: Any) -> None:  # noqa: ANN401 - fields of the status
        self.status = replace(self.status, **changes)


class TrackerClients:
    """All trackers of a job."""

    def __init__(
        self,
        job: RLJob,
        *,
        run_dir: Path,
        store_dir: Path,
        plugin_dir: Path | None = None,
        times: TrackerTimes = TrackerTimes(),
    ) -> None:
        """`store_dir`: its name tells apart the jobs of a cluster that have one name after the other. `plugin_dir`: as of `load_plugin`."""
        trackers = job.spec.trackers
        opening = {
            "trackers": trackers.model_dump(mode="json", by_alias=True, exclude_none=True),
            "run_dir": str(run_dir.resolve()),
            "plugin_dir": None if plugin_dir is None else str(plugin_dir),
            "run": tracked_run(job, run_dir=run_dir, store_dir=store_dir) if trackers.named() else {},
        }
        self._times = times
        self._clients = [TrackerClient(key, {**opening, "key": key}, times=times) for key in trackers.named()]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start each in a task of its own."""
        self._tasks = [asyncio.create_task(one.run(), name=f"tracker {one.key}") for one in self._clients]

    def status(self) -> dict[str, Any]:
        """By key."""
        return {one.key: asdict(one.status) for one in self._clients}

    def warnings(self) -> list[dict[str, str]]:
        """What a person should look at."""
        return [
            {"type": "TrackerDown", "message": f"tracker {one.key}: its process {one.status.error}"}
            for one in self._clients
            if one.status.error
        ]

    async def end(self, ending: ProcessExit | None) -> None:
        """Have all tell the rest, if the run has ended; None, or an ending that is none of the run: end them at once."""
        outcome = None if ending is None else _OUTCOMES.get(ending.exit_code)
        if outcome is not None and self._tasks:
            for one in self._clients:
                one.end(outcome)
            _, late = await asyncio.wait(self._tasks, timeout=self._times.end_s)
            for one in (one for one, task in zip(self._clients, self._tasks, strict=True) if task in late):
                end_s, told = self._times.end_s, one.status.steps
                log.warning("tracker %s: not done %g s after the run's end, told of %d steps", one.key, end_s, told)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


_ID_CHARS = 16


def tracked_run(job: RLJob, *, run_dir: Path, store_dir: Path) -> dict[str, Any]:
    """Id, name and configuration of the run. The id follows from what tells the run apart: on Kubernetes the job's uid, else its folder's making."""
    made = run_dir / "run.json"
    origin = store_dir.name if store_dir != run_dir else made.read_text(encoding="utf-8") if made.is_file() else ""
    name = job.metadata.name if store_dir != run_dir else run_dir.resolve().name
    identity = json.dumps([job.metadata.namespace, job.metadata.name, name, origin])
    config = job.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=_NOT_CONFIG)
    return {"id": hashlib.sha256(identity.encode()).hexdigest()[:_ID_CHARS], "name": name, "config": config["spec"]}


_NOT_CONFIG: Any = {"spec": {"generators": {"__all__": {"pod"}}, "trainer": {"pod"}, "trackers": True}}
"""Environment of pods may hold what is nobody else's; where a run is tracked is no property of it."""
