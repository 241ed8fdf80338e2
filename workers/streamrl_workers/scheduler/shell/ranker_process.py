"""The scheduler's side of the ranker's process: starts it, asks it, and goes on without it when it is gone.

```
  core ── AskRanker ──▶ Questions ──▶ RankerProcess ══ socket ══ python -m streamrl_workers.ranker
       ◀─ prompts_ranked ─────────────────┘
```
Owns the process and the socket. A process that ends, or does not answer within `ANSWER_TIMEOUT_S`, is replaced after a pause that doubles; after
`MAX_DEATHS` in a row, each soon after its start, there is no other, and prompts stay without a score. Nothing waits for it: dispatch goes on by the other signals.
Only a folder that cannot be used ends the run, and only when the first process says so: the user's mistake, before anything depends on it.
Invariant: behind `run` no process is left.

Loops, while a process lives: the asker consumes questions, produces frames, and waits for the answer to the last one; the reader consumes
frames, produces scores for the core, and waits for the process. Both end with the process.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.errors import UserError
from streamrl.keys import ENV_LIFELINE_FD
from streamrl_workers.ranker import protocol
from streamrl_workers.ranker.pairs import MAX_CHARS
from streamrl_workers.ranker.protocol import Opening, ProcessNumbers
from streamrl_workers.scheduler.effects import AskRanker
from streamrl_workers.scheduler.shell.ranker_questions import Questions, RankerNumbers, RankerState
from streamrl_workers.tasks import framing

START_TIMEOUT_S = 600.0
"""Imports and loading of a model, niced, on a machine whose cores are taken."""
ANSWER_TIMEOUT_S = 300.0
"""For one batch; a mini-batch of tuning may have to end first."""
SCORED_AT_ONCE = 16
"""Prompts of one batch: few, so that the newest need not wait long for old ones."""
LEARNT_AT_ONCE = 256
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
STEADY_S = 600.0
"""One that has lived so long is not part of a row."""
MAX_DEATHS = 6
"""In a row: what kills each new one will kill the next, and each start costs ten seconds of CPU."""
CLOSE_TIMEOUT_S = 1.0
_STREAM_LIMIT_BYTES = 1 << 20
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",  # the devices belong to the trainer
}

log = logging.getLogger("streamrl.scheduler.ranker")


class ProcessLostError(Exception):
    """The process is gone, or is as good as gone; the text says what happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long is waited."""

    start_s: float = START_TIMEOUT_S
    answer_s: float = ANSWER_TIMEOUT_S
    first_pause_s: float = FIRST_PAUSE_S


class RankerProcess:
    """A desk with a process of its own."""

    def __init__(
        self, opening: Opening, *, on_scores: Callable[[Mapping[int, float]], None], patience: Patience = Patience()
    ) -> None:
        self._opening = opening
        self._on_scores = on_scores
        self._patience = patience
        self._questions = Questions()
        self._answered = asyncio.Event()
        self._state: RankerState = "starting"
        self._scored = 0
        self._deaths = 0
        self._in_a_row = 0
        self._numbers = ProcessNumbers()
        self._ready_s: float | None = None
        """When this process was ready."""
        self._proof = Path(opening.state_dir) / "was-ready"
        self._was_ready = self._proof.exists()
        """Whether one was, in this run: then its folder can be used, and what is wrong will pass."""

    def ask(self, question: AskRanker) -> None:
        """Queue it; pairs only where they are learnt."""
        pairs = question.pairs if self._opening.cpu_percent > 0 else ()
        if self._state != "given_up" and (question.prompts or pairs):
            prompts = tuple((key, text[-MAX_CHARS:]) for key, text in question.prompts)
            self._questions.add(AskRanker(prompts=prompts, pairs=tuple((text[-MAX_CHARS:], n) for text, n in pairs)))

    def numbers(self) -> RankerNumbers:
        """What it has done."""
        return RankerNumbers(
            state=self._state,
            waiting=self._questions.waiting,
            dropped=self._questions.dropped,
            scored=self._scored,
            deaths=self._deaths,
            process=self._numbers,
        )

    async def run(self) -> None:
        """One process after the other. Raises `UserError` if the first says that its folder cannot be used."""
        while self._in_a_row < MAX_DEATHS:
            self._state, self._ready_s = "starting", None
            try:
                await self._live()
            except ProcessLostError as lost:
                self._mourn(str(lost), lived_s=0.0 if self._ready_s is None else time.monotonic() - self._ready_s)
            except UserError as error:
                if not self._was_ready and not self._deaths:
                    raise
                self._mourn(str(error), lived_s=0.0)
            if self._in_a_row < MAX_DEATHS:
                await asyncio.sleep(self._pause_s)

    # ---- one life

    async def _live(self) -> None:
        began_s = time.monotonic()
        child = await _Child.start()
        try:
            await child.send(self._opening.frame())
            self._numbers = await self._first_answer(child)
            self._state, self._was_ready, self._ready_s = "ready", True, time.monotonic()
            with contextlib.suppress(OSError):
                self._proof.parent.mkdir(parents=True, exist_ok=True)
                self._proof.touch()
            log.info("the ranker %s is ready after %.0f s", self._opening.ranker, time.monotonic() - began_s)
            await self._serve(child)
        finally:
            await child.close()

    async def _first_answer(self, child: "_Child") -> ProcessNumbers:
        try:
            async with asyncio.timeout(self._patience.start_s):
                frame = await framing.read(child.reader)
        except TimeoutError:
            raise ProcessLostError(f"did not load its model within {self._patience.start_s:g} s") from None
        if frame is None:
            raise ProcessLostError(f"ended{await child.how_it_ended()} while it loaded its model")
        if "user_error" in frame:
            raise UserError(**frame["user_error"])
        return protocol.numbers_of(frame)

    async def _serve(self, child: "_Child") -> None:
        """Until the process is lost."""
        tasks = {
            asyncio.create_task(self._read(child), name="ranker reader"),
            asyncio.create_task(self._ask(child), name="ranker asker"),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
        raise ProcessLostError(f"ended{await child.how_it_ended()}")

    async def _read(self, child: "_Child") -> None:
        while (frame := await framing.read(child.reader)) is not None:
            self._numbers = protocol.numbers_of(frame)
            if frame["scores"]:
                self._scored += len(frame["scores"])
                self._answered.set()
                self._on_scores(protocol.scores_of(frame))

    async def _ask(self, child: "_Child") -> None:
        """Scores first; returns when the process cannot be reached."""
        while True:
            await self._questions.wait()
            if prompts := self._questions.prompts(SCORED_AT_ONCE):
                try:
                    await self._score(child, prompts)
                except BaseException:
                    self._questions.put_back(prompts)
                    raise
            elif pairs := self._questions.pairs(LEARNT_AT_ONCE):
                await self._teach(child, pairs)

    async def _teach(self, child: "_Child", pairs: list[tuple[str, float]]) -> None:
        try:
            async with asyncio.timeout(self._patience.answer_s):
                await child.send(protocol.to_learn(pairs))
        except TimeoutError:
            limit_s = self._patience.answer_s
            raise ProcessLostError(f"did not take {len(pairs)} pairs within {limit_s:g} s") from None

    async def _score(self, child: "_Child", prompts: list[tuple[int, str]]) -> None:
        self._answered.clear()
        try:
            async with asyncio.timeout(self._patience.answer_s):
                await child.send(protocol.to_score(prompts))
                await self._answered.wait()
        except TimeoutError:
            limit_s = self._patience.answer_s
            raise ProcessLostError(f"did not score {len(prompts)} prompts within {limit_s:g} s") from None

    # ---- between two lives

    def _mourn(self, what: str, *, lived_s: float) -> None:
        self._deaths += 1
        self._in_a_row = 1 if lived_s > STEADY_S else self._in_a_row + 1
        if self._in_a_row >= MAX_DEATHS:
            self._state, self._questions = "given_up", Questions()
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
    ) -> None:
        self.reader = reader
        self._process = process
        self._writer = writer
        self._lifeline = line

    @classmethod
    async def start(cls) -> "_Child":
        """Start it. Raises `ProcessLostError`."""
        ours, theirs = socket.socketpair()
        with theirs, _lifeline() as (read_end, write_end):
            try:
                process = subprocess.Popen(  # noqa: ASYNC220 - takes a millisecond; no pipe is waited for
                    [sys.executable, "-m", protocol.MODULE, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), read_end),
                    env={**os.environ, **_ENVIRONMENT, ENV_LIFELINE_FD: str(read_end)},
                    start_new_session=True,
                )
            except OSError as error:  # no memory or no process number is left
                ours.close()
                os.close(write_end)
                raise ProcessLostError(f"could not be started: {error.strerror}") from None
        ours.setblocking(False)  # noqa: FBT003 - positional in the standard library
        reader, writer = await asyncio.open_connection(sock=ours, limit=_STREAM_LIMIT_BYTES)
        return cls(process, reader=reader, writer=writer, line=write_end)

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


@contextmanager
def _lifeline() -> Iterator[tuple[int, int]]:
    """A pipe: the read end is closed here when the child has it, the write end is the caller's."""
    read_end, write_end = os.pipe()
    try:
        yield read_end, write_end
    finally:
        os.close(read_end)
