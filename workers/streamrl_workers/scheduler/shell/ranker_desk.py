"""Who answers the core's questions to a ranker that takes long.

Owns the choice, and the loop that gives a light ranker time: portions between other events, so that none waits longer than a portion takes.
Rankers with a process of their own are asked by `ranker_process.py`.

Portion loop: consumes RankSome; produces calls of `core.rank_some`; waits for RankSome and, between two portions, for everybody else.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from streamrl.spec.scheduling import LanguageModelRanker
from streamrl.spec.scheduling import Ranker as RankerChoice
from streamrl_workers.ranker.protocol import Opening
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler.lengths.rankers import AnsweredRanker, DeferredRanker, HashingRanker, Ranker
from streamrl_workers.scheduler.lengths.rankers.files import FIELD
from streamrl_workers.scheduler.shell.ranker_process import RankerProcess
from streamrl_workers.scheduler.shell.ranker_questions import RankerNumbers

PAUSE_S = 0.01
"""Between two portions of some 3 ms: a long backlog takes a quarter of the event loop."""
DIR_STATE = "ranker"
"""In the run folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """How answers reach the core."""

    on_scores: Callable[[Mapping[int, float]], None]
    """Scores by prompt key."""
    on_portion: Callable[[], None]
    """A light ranker may work now."""


class RankerDesk:
    """The core's questions to its ranker."""

    def __init__(self, answers: Answers, *, opening: Opening | None) -> None:
        """`opening`: of the ranker's process; None: it has none."""
        self._answers = answers
        self._work = asyncio.Event()
        self._process = None if opening is None else RankerProcess(opening, on_scores=answers.on_scores)

    def ask(self, question: fx.AskRanker) -> None:
        """Queue it."""
        assert self._process is not None, "a question to a ranker without a process"
        self._process.ask(question)

    def rank_some(self, _: fx.RankSome) -> None:
        """There is work for a portion."""
        self._work.set()

    async def run_portions(self) -> None:
        """The portion loop."""
        while True:
            await self._work.wait()
            self._work.clear()
            self._answers.on_portion()
            await asyncio.sleep(PAUSE_S)

    async def run_process(self) -> None:
        """The process, as long as there is hope for it. Raises `UserError` for a folder that cannot be used."""
        if self._process is not None:
            await self._process.run()

    def numbers(self) -> RankerNumbers:
        """What the process has done."""
        return RankerNumbers() if self._process is None else self._process.numbers()


def in_a_run(ranker: Ranker | None) -> Ranker | None:
    """What the core is given for what `open_ranker` has opened."""
    return DeferredRanker(ranker) if isinstance(ranker, HashingRanker) else ranker


def opening_of(choice: RankerChoice | None, *, ranker: Ranker | None, base_dir: Path, run_dir: Path) -> Opening | None:
    """Of the process of the ranker that a job names; None: it has none."""
    if choice is None or not isinstance(ranker, AnsweredRanker):
        return None
    member = choice.value
    tuned = member if isinstance(member, LanguageModelRanker) else None
    return Opening(
        ranker=choice.key,
        path=str((base_dir / member.path).resolve()),
        field=f"{FIELD}.{choice.key}.path",
        state_dir=str(run_dir.resolve() / DIR_STATE),
        cpu_percent=tuned.cpu_percent if tuned else 0,
        refit_pairs=tuned.refit_pairs if tuned else 0,
    )
