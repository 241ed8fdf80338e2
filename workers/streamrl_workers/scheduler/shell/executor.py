"""Carries out the core's effects, in order. All calls of the core go through here, on one event loop.

Owns the order of effects and the answer to each journal commit. Decides nothing.

Invariant: effects of one event are carried out before the next event reaches the core.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.journal import Journal
from streamrl_workers.scheduler.journal_store import JournalFaultError
from streamrl_workers.scheduler.shell.ending import EndingBox
from streamrl_workers.scheduler.shell.ranker_desk import RankerDesk
from streamrl_workers.scheduler.shell.signal_pages import Numbers
from streamrl_workers.scheduler.shell.switchboard import Switchboard
from streamrl_workers.scheduler.shell.taskdesk import TaskDesk


class Executor:
    """Effects in, I/O out."""

    def __init__(
        self, core: Core, *, journal: Journal, switchboard: Switchboard, numbers: Numbers, ending: EndingBox
    ) -> None:
        self._core = core
        self._numbers = numbers
        self._journal = journal
        self._switchboard = switchboard
        self._ending = ending
        self._carry_out: dict[type, Callable[[Any], None]] = {
            fx.ToGenerator: lambda effect: switchboard.to_generator(effect.generator_id, effect.command),
            fx.ToTrainer: lambda effect: switchboard.to_trainer(effect.command),
            fx.HandGroup: self._hand_group,
            fx.Write: journal.append,
            fx.Finished: lambda effect: ending.finished(effect.step),
            fx.Failed: lambda effect: ending.user_error(effect.reason),
        }

    def attach(self, desk: TaskDesk, *, ranking: RankerDesk) -> None:
        """Connect the task pool and the ranker; before the first effect."""
        self._carry_out[fx.AskRanker] = ranking.ask
        self._carry_out[fx.RankSome] = ranking.rank_some
        self._carry_out[fx.NeedPrompts] = desk.need_prompts
        self._carry_out[fx.ScoreSample] = desk.score
        self._carry_out[fx.PlayTurn] = desk.play

    def run(self, effects: Sequence[fx.Effect]) -> None:
        """Carry out effects."""
        for effect in effects:
            self._carry_out[type(effect)](effect)

    def on_prompts(self, prompts: Sequence[fx.Prompt]) -> None:
        """The task pool has made prompts."""
        self.run(self._core.prompts_arrived(prompts))

    def on_scores(self, scores: Sequence[fx.Score]) -> None:
        """The task pool has scored completions."""
        self.run(self._core.scores_arrived(scores))

    def on_turns(self, answers: Sequence[fx.TurnAnswer]) -> None:
        """Environments have answered turns."""
        self.run(self._core.turns_answered(answers))

    def on_ranked(self, scores: Mapping[int, float]) -> None:
        """The ranker's process has scored prompts."""
        self.run(self._core.prompts_ranked(scores))

    def on_rank_portion(self) -> None:
        """There is time for a portion of what the ranker has put off."""
        self.run(self._core.rank_some())

    def on_committed(self, sequence: int) -> None:
        """Records are durable."""
        effects = self._core.committed(sequence)
        self._numbers.observe()
        self.run(effects)

    def _hand_group(self, effect: fx.HandGroup) -> None:
        """The samples of a recorded step's group are in the journal only."""
        if not effect.trajectories:
            try:
                effect = replace(effect, trajectories=self._journal.samples_of(effect.group_id))
            except JournalFaultError as fault:
                self._ending.retry(str(fault))
                return
        self._switchboard.hand_group(effect)
