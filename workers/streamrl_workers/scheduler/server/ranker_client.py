"""The scheduler's side of the ranker's process: starts it, asks it, and goes on without it when it is gone.

```
  core ── AskRanker ──▶ RankerClient ══ socket ══ python -m streamrl_workers.ranker
       ◀─ prompts_ranked ────┘
```
Owns the process, the socket and what waits for it. The newest prompts are scored first: they begin last, so their scores come in time even
where the ranker cannot keep up; what waits is bounded, the oldest go. A process that ends, or does not answer within `ANSWER_TIMEOUT_S`, is
replaced after a pause that doubles; after `MAX_DEATHS` in a row, each soon after its start, there is no other, and prompts stay without a
score. Nothing waits for it: dispatch goes on by the other signals. Only a folder that cannot be used ends the run, and only when the first
process says so: the user's mistake, before anything depends on it. Invariant: behind `run` no process is left.

The loop consumes what waits; produces frames, and scores for the core; waits for a question, and for the answer to its last frame.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from streamrl.errors import UserError
from streamrl.keys import ENV_PARENT_WATCH_FD
from streamrl.spec.scheduling import RankerSpec
from streamrl_workers.process import framing
from streamrl_workers.process.heartbeat import child_environment, kill_when_frozen
from streamrl_workers.ranker import protocol
from streamrl_workers.ranker.folder import FIELD
from streamrl_workers.ranker.pairs import MAX_CHARS
from streamrl_workers.ranker.protocol import Opening, ProcessStatus
from streamrl_workers.scheduler.effects import AskRanker

START_TIMEOUT_S = 600.0
"""Imports and loading of a model, niced, on a machine whose cores are taken."""
ANSWER_TIMEOUT_S = 300.0
"""For one batch; a mini-batch of tuning may have to end first."""
SCORED_AT_ONCE, LEARNT_AT_ONCE = 16, 256
"""Prompts of one batch: few, so that the newest need not wait long for old ones."""
MOST_PROMPTS, MOST_PAIRS = 16_384, 4096
"""That wait; twice what is looked ahead to at most."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
STEADY_S = 600.0
"""One that has lived so long is not part of a row."""
MAX_DEATHS = 6
"""In a row: what kills each new one will kill the next, and each start costs ten seconds of CPU."""
CLOSE_TIMEOUT_S = 1.0
DIR_STATE = "ranker"
"""In the run folder."""
_STREAM_LIMIT_BYTES = 1 << 20
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",  # the devices belong to the trainer
}

log = logging.getLogger("streamrl.scheduler.ranker")

RankerState = Literal["none", "starting", "ready", "down", "given_up"]


class ProcessLostError(Exception):
    """The process is gone, or is as good as gone; the text says what happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long is waited."""

    start_s: float = START_TIMEOUT_S
    answer_s: float = ANSWER_TIMEOUT_S
    first_pause_s: float = FIRST_PAUSE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RankerStatus:
    """Of one scheduler's life."""

    state: RankerState = "none"
    waiting: int = 0
    """Prompts that are not scored yet."""
    dropped: int = 0
    """Prompts that waited so long that newer ones took their place."""
    scored: int = 0
    deaths: int = 0
    """Ends of its process that nobody asked for."""
    process: ProcessStatus = field(default_factory=ProcessStatus)


def opening_of(choice: RankerSpec, *, base_dir: Path, run_dir: Path) -> Opening:
    """What the process of the ranker that a job names is to be."""
    state_dir, tuned = str(run_dir.resolve() / DIR_STATE), choice.language_model
    if tuned is None:
        return Opening(path="", field=FIELD, state_dir=state_dir)
    return Opening(
        path=str((base_dir / tuned.path).resolve()),
        field=FIELD,
        state_dir=state_dir,
        cpu_percent=tuned.cpu_percent,
        refit_pairs=tuned.refit_pairs,
    )


class RankerClient:
    """Questions to the ranker's process, its answers, and its lives."""

    def __init__(
        self,
        opening: Opening | None,
        *,
        on_scores: Callable[[Mapping[int, float]], None],
        patience: Patience = Patience(),
    ) -> None:
        """`opening`: of the process; None: the job has no ranker, and nothing is ever asked."""
        self._opening = opening
        self._on_scores = on_scores
        self._patience = patience
        self._learns = opening is not None and (not opening.path or opening.cpu_percent > 0)
        self._prompts: deque[tuple[int, str]] = deque()
        self._pairs: deque[tuple[str, float]] = deque(maxlen=MOST_PAIRS)
        self._asked = asyncio.Event()
        self._state: RankerState = "none" if opening is None else "starting"
        self._scored = self._dropped = 0
        self._deaths = self._in_a_row = 0
        self._process = ProcessStatus()
        self._ready_s: float | None = None
        """When this process was ready."""

    def ask(self, question: AskRanker) -> None:
        """Queue it; pairs only where they are learnt."""
        if self._state == "given_up":
            return
        self._prompts.extend((key, text[-MAX_CHARS:]) for key, text in question.prompts)
        while len(self._prompts) > MOST_PROMPTS:
            self._prompts.popleft()
            self._dropped += 1
        if self._learns:
            self._pairs.extend((text[-MAX_CHARS:], tokens) for text, tokens in question.pairs)
        self._asked.set()

    def status(self) -> RankerStatus:
        """What it has done."""
        return RankerStatus(
            state=self._state,
            waiting=len(self._prompts),
            dropped=self._dropped,
            scored=self._scored,
            deaths=self._deaths,
            process=self._process,
        )

    async def run(self) -> None:
        """One process after the other. Raises `UserError` if the first says that its folder cannot be used."""
        if self._opening is None:
            return
        proof = Path(self._opening.state_dir) / "was-ready"
        """There if one was ready in this run: then its folder can be used, and what is wrong will pass."""
        while self._in_a_row < MAX_DEATHS:
            self._state, self._ready_s = "starting", None
            try:
                await self._live(self._opening, proof)
            except ProcessLostError as lost:
                self._mourn(str(lost), lived_s=0.0 if self._ready_s is None else time.monotonic() - self._ready_s)
            except UserError as error:
                if not (proof.exists() or self._deaths):
                    raise
                self._mourn(str(error), lived_s=0.0)
            if self._in_a_row < MAX_DEATHS:
                await asyncio.sleep(self._pause_s)

    # ---- one life

    async def _live(self, opening: Opening, proof: Path) -> None:
        began_s = time.monotonic()
        child = await _Child.start()
        try:
            await child.send(asdict(opening))
            self._process = await self._first_answer(child)
            self._state, self._ready_s = "ready", time.monotonic()
            _leave(proof)
            log.info("the ranker is ready after %.0f s", time.monotonic() - began_s)
            await self._serve(child)
        finally:
            await child.close()

    async def _first_answer(self, child: "_Child") -> ProcessStatus:
        with _within(self._patience.start_s, what="did not load its model"):
            async with asyncio.timeout(self._patience.start_s):
                frame = await framing.read(child.reader)
        if frame is None:
            raise ProcessLostError(f"ended{await child.how_it_ended()} while it loaded its model")
        if "user_error" in frame:
            raise UserError(**frame["user_error"])
        return ProcessStatus.of(frame)

    async def _serve(self, child: "_Child") -> None:
        """Scores first; ends when the process is lost."""
        while True:
            await self._asked.wait()
            if prompts := [self._prompts.pop() for _ in range(min(SCORED_AT_ONCE, len(self._prompts)))]:
                try:
                    scores = await self._exchange(
                        child, {"score": prompts}, what=f"did not score {len(prompts)} prompts"
                    )
                except BaseException:
                    self._prompts.extend(reversed(prompts))
                    raise
                self._scored += len(prompts)
                self._on_scores(scores)
            elif pairs := [self._pairs.popleft() for _ in range(min(LEARNT_AT_ONCE, len(self._pairs)))]:
                await self._exchange(child, {"learn": pairs}, what=f"did not take {len(pairs)} pairs")
            else:
                self._asked.clear()

    async def _exchange(self, child: "_Child", frame: Mapping[str, Any], *, what: str) -> dict[int, float]:
        """Scores of the answer to one frame."""
        with _within(self._patience.answer_s, what=what):
            async with asyncio.timeout(self._patience.answer_s):
                await child.send(frame)
                answer = await framing.read(child.reader)
        if answer is None:
            raise ProcessLostError(f"ended{await child.how_it_ended()}")
        self._process = ProcessStatus.of(answer)
        return protocol.scores_of(answer)

    # ---- between two lives

    def _mourn(self, what: str, *, lived_s: float) -> None:
        self._deaths += 1
        self._in_a_row = 1 if lived_s > STEADY_S else self._in_a_row + 1
        if self._in_a_row >= MAX_DEATHS:
            self._state = "given_up"
            self._prompts.clear()
            self._pairs.clear()
            log.error(
                "the ranker's process %s; given up after %d in a row, prompts stay without a score", what, MAX_DEATHS
            )
            return
        self._state = "down"
        log.warning("the ranker's process %s; started again in %g s, the run goes on without it", what, self._pause_s)

    @property
    def _pause_s(self) -> float:
        return float(min(LONGEST_PAUSE_S, self._patience.first_pause_s * 2 ** max(0, self._in_a_row - 1)))


class _Child:
    """A living process."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        *,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        line: int,
        heartbeat: Mapping[str, str],
    ) -> None:
        self.reader = reader
        self._process = process
        self._writer = writer
        self._lifeline = line
        self._watch = asyncio.create_task(
            kill_when_frozen("the ranker's process", environ=heartbeat, kill=process.kill),
            name="heartbeat of the ranker",
        )

    @classmethod
    async def start(cls) -> "_Child":
        """Start it. Raises `ProcessLostError`."""
        ours, theirs = socket.socketpair()
        heartbeat = child_environment("ranker", environ=os.environ)
        with theirs, _lifeline() as (read_end, write_end):
            try:
                process = subprocess.Popen(  # noqa: ASYNC220 - takes a millisecond; no pipe is waited for
                    [sys.executable, "-m", protocol.MODULE, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), read_end),
                    env={**os.environ, **_ENVIRONMENT, **heartbeat, ENV_PARENT_WATCH_FD: str(read_end)},
                    start_new_session=True,
                )
            except OSError as error:  # no memory or no process number is left
                ours.close()
                os.close(write_end)
                raise ProcessLostError(f"could not be started: {error.strerror}") from None
        ours.setblocking(False)  # noqa: FBT003 - positional in the standard library
        reader, writer = await asyncio.open_connection(sock=ours, limit=_STREAM_LIMIT_BYTES)
        return cls(process, reader=reader, writer=writer, line=write_end, heartbeat=heartbeat)

    async def send(self, frame: Mapping[str, Any]) -> None:
        """Write a frame; waits while the process does not read. Raises `ProcessLostError`."""
        try:
            self._writer.write(framing.encode(frame))
            await self._writer.drain()
        except ConnectionError:
            raise ProcessLostError(f"ended{await self.how_it_ended()}") from None

    async def how_it_ended(self) -> str:
        """For a sentence; "" if it has not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = await asyncio.to_thread(self._process.wait, CLOSE_TIMEOUT_S)
            return f" by signal {-code}" if code < 0 else f" with status {code}"
        return ""

    async def close(self) -> None:
        """End it: politely by closing the socket, else by SIGKILL; what it has saved is whole either way."""
        self._watch.cancel()
        self._writer.transport.abort()
        try:
            await asyncio.to_thread(self._process.wait, CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await asyncio.to_thread(
                self._process.wait
            )  # no deadline: a killed process ends, if only when it gets a core
        finally:
            os.close(self._lifeline)


def _leave(proof: Path) -> None:
    with contextlib.suppress(OSError):
        proof.parent.mkdir(parents=True, exist_ok=True)
        proof.touch()


@contextmanager
def _within(limit_s: float, *, what: str) -> Iterator[None]:
    """A deadline that passes is the loss of the process."""
    try:
        yield
    except TimeoutError:
        raise ProcessLostError(f"{what} within {limit_s:g} s") from None


@contextmanager
def _lifeline() -> Iterator[tuple[int, int]]:
    """A pipe: the read end is closed here when the child has it, the write end is the caller's."""
    read_end, write_end = os.pipe()
    try:
        yield read_end, write_end
    finally:
        os.close(read_end)
