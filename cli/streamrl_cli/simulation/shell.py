"""Around the core: what the scheduler's shell does with events and effects, in virtual time.

Owns the order of effects, the delays of journal and rewards, and who is connected. Does not own what peers do.

Invariant, as of the real shell: all effects of one event are carried out before the next event reaches the core. So peers
only take note when they are told something; they act in `settle`, when the moment's effects are done.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl_cli.simulation.core_settings import core_settings, known_curves, predictions
from streamrl_cli.simulation.lengths import LengthModel
from streamrl_cli.simulation.measures import Measures
from streamrl_cli.simulation.scenario import Scenario
from streamrl_cli.simulation.timeline import Timeline
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.replay import replay

Call = Callable[[Core, float], list[fx.Effect]]
"""An event of the core: (core, now in seconds) -> effects."""


class Peer(Protocol):
    """Somebody who is told commands."""

    name: str

    def settle(self) -> None:
        """Act on what this moment brought."""


class GeneratorPeer(Peer, Protocol):
    """A replica, as the shell knows it."""

    link_s: float

    @property
    def step(self) -> int | None:
        """Version in the engine; None: none yet."""

    def take(self, command: pb.GeneratorCommand) -> None:
        """A command has arrived."""


class TrainerPeer(Peer, Protocol):
    """The trainer, as the shell knows it."""

    def take(self, command: pb.TrainerCommand) -> None:
        """A command has arrived."""

    def hand(self, group: fx.HandGroup) -> None:
        """A group has arrived."""


class Shell:
    """The core and everything between it and its peers."""

    def __init__(self, scenario: Scenario, *, lengths: LengthModel, measures: Measures) -> None:
        self.timeline = Timeline()
        self.lengths = lengths
        self.measures = measures
        self.predictions = predictions(scenario, lengths=lengths, step=lambda: len(measures.compositions))
        self.core = Core(core_settings(scenario), replay([]), lengths=self.predictions, curves=known_curves(scenario))
        self.unit = scenario.resolution_tokens
        self.max_tokens = scenario.max_tokens
        self.prompt_tokens = scenario.prompt_tokens
        self.tells_partials = scenario.partial_progress or scenario.scheduling.rebalance is not None
        """Whether replicas tell of running samples while nothing waits."""
        self.calls = 0
        """Events that the core was told."""
        self.finished = False
        self.generators: dict[str, GeneratorPeer] = {}
        """Those that are connected."""
        self.trainer: TrainerPeer | None = None
        self.touched: dict[str, Peer] = {}
        """Peers that this moment has brought something to."""
        self._reward_s = scenario.rewards.seconds
        self._commit_s = scenario.journal.commit_seconds
        self._scores: list[fx.ScoreSample] = []
        self._prompts: list[fx.NeedPrompts] = []
        """Asked for and not given, by rising index."""
        self._batch_groups = scenario.pipeline.batch_groups
        self._batch_samples = scenario.pipeline.batch_groups * scenario.group_size
        self._batch_by_batch = scenario.batch_by_batch
        self._staleness = scenario.pipeline.staleness
        self._written = self._durable = 0
        self._committing = self._scoring = False
        self._carry_out: dict[type, Callable[[Any], None]] = {
            fx.ToGenerator: self._to_generator,
            fx.ToTrainer: self._to_trainer,
            fx.HandGroup: self._hand_group,
            fx.Write: self._write,
            fx.NeedPrompts: self._prompts.append,
            fx.ScoreSample: self._scores.append,
            fx.Finished: self._finish,
            fx.Failed: self._fail,
        }

    def units(self, tokens: int) -> int:
        """As the scheduler is told a length."""
        return max(1, round(tokens / self.unit))

    # ---- events

    def tell(self, call: Call) -> None:
        """Bring one event to the core and carry out its effects."""
        self.calls += 1
        for effect in call(self.core, self.timeline.now_s):
            self._carry_out[type(effect)](effect)

    def join(self, generator: GeneratorPeer, info: fx.GeneratorInfo) -> None:
        """A replica says hello."""
        self.generators[generator.name] = generator
        self.tell(lambda core, now_s: core.generator_joined(info, now_s=now_s))

    def part(self, generator: GeneratorPeer, *, reason: str) -> None:
        """Its link is closed."""
        if self.generators.get(generator.name) is generator:
            del self.generators[generator.name]
            self.tell(lambda core, now_s: core.generator_left(generator.name, reason=reason, now_s=now_s))

    def settle(self) -> None:
        """Until nothing more happens at this moment."""
        while True:
            if self._prompts and self._prompts[0].first_index < self._prompts_there():
                self._answer_prompts()
            elif self._scores and not self._scoring:
                self._scoring = True
                asked, self._scores[:] = self._scores.copy(), []
                self._later(self._reward_s, self._score, asked)
            elif self._written > self._durable and not self._committing:
                self._committing = True
                self._later(self._commit_s, self._committed, self._written)
            elif self.touched:
                self.touched.pop(next(iter(self.touched))).settle()
            else:
                return

    # ---- answers

    def _later(self, delay_s: float, act: Callable[[Any], None], what: object) -> None:
        if delay_s:
            self.timeline.after(delay_s, act, what)
        else:
            act(what)

    def _prompts_there(self) -> float:
        """So many prompts, from the first on, may be given by now."""
        if not self._batch_by_batch:
            return math.inf
        whole = self.measures.scored // self._batch_samples
        if self._prompts[0].first_index >= self._batch_groups * (whole + 1):
            return self._batch_groups * whole
        steps = [one.step for one in self.generators.values()]
        ready = bool(steps) and all(step is not None and step >= whole - self._staleness for step in steps)
        return self._batch_groups * (whole + ready)

    def _answer_prompts(self) -> None:
        there = self._prompts_there()
        asked, self._prompts[:] = self._prompts.copy(), []
        prompts: list[fx.Prompt] = []
        for need in asked:
            given = int(min(max(0, there - need.first_index), need.count))
            indices = range(need.first_index, need.first_index + given)
            prompts += [fx.Prompt(split=need.split, index=i, text=self.lengths.text_of(i)) for i in indices]
            if given < need.count:
                rest = need.count - given
                self._prompts.append(replace(need, first_index=need.first_index + given, count=rest))
        self.tell(lambda core, _: core.prompts_arrived(prompts))

    def _score(self, asked: Sequence[fx.ScoreSample]) -> None:
        self._scoring = False
        scores = [fx.Score(group_id=ask.group_id, sample_index=ask.sample_index, reward=1.0, parts={}) for ask in asked]
        self.measures.scored += len(scores)
        self.tell(lambda core, _: core.scores_arrived(scores))

    def _committed(self, sequence: int) -> None:
        self._committing = False
        self._durable = sequence
        self.tell(lambda core, _: core.committed(sequence))
        dispatch = self.core.plan.why
        self.measures.recorded(
            self.core.last_step, trusted=self.predictions.trusted, dispatch=dispatch, now_s=self.timeline.now_s
        )

    # ---- effects

    def _to_generator(self, effect: fx.ToGenerator) -> None:
        generator = self.generators.get(effect.generator_id)
        if generator is None:
            return
        if generator.link_s:
            self.timeline.after(generator.link_s, generator.take, effect.command)
        else:
            generator.take(effect.command)

    def _to_trainer(self, effect: fx.ToTrainer) -> None:
        if self.trainer is not None:
            self.trainer.take(effect.command)

    def _hand_group(self, effect: fx.HandGroup) -> None:
        if self.trainer is not None:
            self.trainer.hand(effect)

    def _write(self, effect: fx.Write) -> None:
        self._written = effect.sequence
        if isinstance(effect.record, fx.StepTaken):
            self.measures.composed(effect.record.step, effect.record.group_ids)

    def _finish(self, _: fx.Finished) -> None:
        self.finished = True

    def _fail(self, effect: fx.Failed) -> None:
        raise UserError(field="simulation", rule=f"the run cannot go on: {effect.reason}")
