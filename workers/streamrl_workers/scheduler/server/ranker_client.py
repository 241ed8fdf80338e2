"""The scheduler's side of the ranker's process: starts it, asks it, and goes on without it when it is gone.

```
  core ── AskRanker ──▶ RankerClient ══ socket ══ python -m streamrl_workers.ranker
       ◀─ prompts_ranked ────┘
```
Owns the process, the socket and what waits for it. The newest prompts are scored first: they begin last, so their scores come in time even
where the ranker cannot keep up; what waits is bounded, the oldest go. A process that ends, or does not answer within `ANSWER_TIMEOUT_S`, is
replaced after a pause that doubles with each, up to `LONGEST_PAUSE_S`. Nothing waits for it: dispatch goes on by the other signals. Only a
folder that cannot be used ends the run, and only when the first process says so: the user's mistake, before anything depends on it.
Invariant: behind `run` no process is left.

The loop consumes what waits; produces frames, and scores for the core; waits for a question, and for the answer to its last frame.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from streamrl.errors import UserError
from streamrl.spec.scheduling import RankerSpec
from streamrl_workers.process.child import ChildProcess, ProcessLostError
from streamrl_workers.ranker.folder import MODULE
from streamrl_workers.scheduler.effects import AskRanker

START_TIMEOUT_S = 600.0
"""Imports and loading of a model, niced, on a machine whose cores are taken."""
ANSWER_TIMEOUT_S = 300.0
"""For one batch; a mini-batch of tuning may have to end first."""
SCORED_AT_ONCE, LEARNT_AT_ONCE = 16, 256
"""Prompts of one batch: few, so that the newest need not wait long for old ones."""
MAX_CHARS = 8192
"""Of a prompt its end is sent: more than a model reads of it."""
MOST_PROMPTS, MOST_PAIRS = 16_384, 4096
"""That wait; twice what is looked ahead to at most."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 600.0
"""What kills each new one will kill the next, and each start costs ten seconds of CPU."""
DIR_STATE = "ranker"
"""In the run folder."""
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",  # the devices belong to the trainer
}

log = logging.getLogger("streamrl.scheduler.ranker")

RankerState = Literal["none", "starting", "ready", "down"]


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
    pairs: int = 0
    """That the process remembers."""
    rounds: int = 0
    """Of tuning, those of earlier processes of the run included."""
    cpu_s: float = 0.0
    """User and system time of the process that lives."""


class RankerClient:
    """Questions to the ranker's process, its answers, and its lives."""

    def __init__(
        self,
        choice: RankerSpec | None,
        *,
        base_dir: Path,
        run_dir: Path,
        on_scores: Callable[[Mapping[int, float]], None],
        patience: Patience = Patience(),
    ) -> None:
        """`choice`: of the job, its paths begin at `base_dir`; None: it has no ranker, and nothing is ever asked."""
        self._choice = choice
        self._base_dir = base_dir
        self._run_dir = run_dir
        self._on_scores = on_scores
        self._patience = patience
        self._prompts: deque[tuple[int, str]] = deque()
        self._pairs: deque[tuple[str, float]] = deque(maxlen=MOST_PAIRS)
        self._asked = asyncio.Event()
        self._status = RankerStatus(state="none" if choice is None else "starting")

    def ask(self, question: AskRanker) -> None:
        """Queue it."""
        self._prompts.extend((key, text[-MAX_CHARS:]) for key, text in question.prompts)
        while len(self._prompts) > MOST_PROMPTS:
            self._prompts.popleft()
            self._note(dropped=self._status.dropped + 1)
        self._pairs.extend((text[-MAX_CHARS:], tokens) for text, tokens in question.pairs)
        self._asked.set()

    def status(self) -> RankerStatus:
        """What it has done."""
        return replace(self._status, waiting=len(self._prompts))

    def _note(self, **changes: Any) -> None:  # noqa: ANN401 - fields of the status
        self._status = replace(self._status, **changes)

    async def run(self) -> None:
        """One process after the other. Raises `UserError` if the first says that its folder cannot be used."""
        if self._choice is None:
            return
        opening = {
            "ranker": self._choice.model_dump(mode="json", by_alias=True, exclude_none=True),
            "base_dir": str(self._base_dir.resolve()),
            "state_dir": str(self._run_dir.resolve() / DIR_STATE),
        }
        while True:
            self._note(state="starting")
            try:
                await self._live(opening)
            except (ProcessLostError, UserError) as error:
                if isinstance(error, UserError) and not self._status.deaths:
                    raise
                deaths = self._status.deaths
                pause_s = min(LONGEST_PAUSE_S, self._patience.first_pause_s * 2 ** min(deaths, 16))
                self._note(state="down", deaths=deaths + 1)
                log.warning(
                    "the ranker's process %s; started again in %g s, the run goes on without it", error, pause_s
                )
            await asyncio.sleep(pause_s)

    # ---- one life

    async def _live(self, opening: Mapping[str, Any]) -> NoReturn:
        began_s = time.monotonic()
        try:
            child = await ChildProcess.start(
                MODULE, name="ranker", what="the ranker's process", environment=_ENVIRONMENT
            )
        except OSError as error:  # no memory or no process number is left
            raise ProcessLostError(f"could not be started: {error.strerror}") from None
        try:
            limit_s = self._patience.start_s
            answer = await child.exchange(opening, limit_s=limit_s, what="did not load its model")
            if "user_error" in answer:
                raise UserError(**answer["user_error"])
            self._note(state="ready", **answer["status"])
            log.info("the ranker is ready after %.0f s", time.monotonic() - began_s)
            await self._serve(child)
        finally:
            await child.close()

    async def _serve(self, child: ChildProcess) -> NoReturn:
        """Scores first; ends when the process is lost."""
        limit_s = self._patience.answer_s
        while True:
            await self._asked.wait()
            if prompts := [self._prompts.pop() for _ in range(min(SCORED_AT_ONCE, len(self._prompts)))]:
                try:
                    what = f"did not score {len(prompts)} prompts"
                    answer = await child.exchange({"score": prompts}, limit_s=limit_s, what=what)
                except BaseException:
                    self._prompts.extend(reversed(prompts))
                    raise
                self._note(scored=self._status.scored + len(prompts), **answer["status"])
                self._on_scores({key: score for key, score in answer["scores"] if math.isfinite(score)})
            elif pairs := [self._pairs.popleft() for _ in range(min(LEARNT_AT_ONCE, len(self._pairs)))]:
                what = f"did not take {len(pairs)} pairs"
                answer = await child.exchange({"learn": pairs}, limit_s=limit_s, what=what)
                self._note(**answer["status"])
            else:
                self._asked.clear()
