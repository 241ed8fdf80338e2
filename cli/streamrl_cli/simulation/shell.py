"""Around the core: virtual time, the core's settings, and what the scheduler's shell does with events and effects.

Owns the order of events and effects, the delays of journal and rewards, and who is connected. Does not own what peers do.
The scheduler reads its settings out of the RLJob of the same run (`Settings.from_job`), so that a field of `scheduling`
means here what it means there. Held-out evaluation is left out: it is the same load in every setting that is compared.

Invariant, as of the real shell: all effects of one event are carried out before the next event reaches the core. So peers
only take note when they are told something; they act in `settle`, when the moment's effects are done.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from streamrl.errors import UserError
from streamrl.latency import LatencyCurve
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.base import SpecModel, parse_bytes
from streamrl.spec.rljob import RLJobSpec
from streamrl_cli.simulation.clock import VirtualClock
from streamrl_cli.simulation.lengths import LengthModel, ModelledRanker
from streamrl_cli.simulation.links import Uplink
from streamrl_cli.simulation.results import Measures
from streamrl_cli.simulation.scenario import Scenario
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.dispatch.speeds import Curves
from streamrl_workers.scheduler.lengths import LengthHistory, Lengths, prompt_key
from streamrl_workers.scheduler.records import Recovered, StepTaken
from streamrl_workers.scheduler.settings import JobTasks, SchedulerSettings, TaskSettings
from streamrl_workers.tasks.values import NeedPrompts, Prompt, Score, ScoreSample

Call = Callable[[Core, float], list[fx.Effect]]
"""An event of the core: (core, now in seconds) -> effects."""


class Peer(Protocol):
    """A generator or the trainer, as the shell sees it."""

    def settle(self) -> None:
        """Act on what the moment has brought."""


class GeneratorPeer(Peer, Protocol):
    """A generator."""

    name: str
    link_s: float

    @property
    def step(self) -> int | None:
        """Step of its version; None: it has none."""

    def take(self, command: pb.GeneratorCommand) -> None:
        """Take a command of the scheduler."""


class TrainerPeer(Peer, Protocol):
    """The trainer."""

    def take(self, command: pb.TrainerCommand) -> None:
        """Take a command of the scheduler."""

    def deliver(self, effect: fx.DeliverGroup) -> None:
        """Take a group."""


def core_settings(scenario: Scenario) -> SchedulerSettings:
    """The core's settings; bytes and tokens are in the scenario's units of `resolutionTokens`."""
    unit = scenario.resolution_tokens
    settings = SchedulerSettings.from_job(RLJobSpec.model_validate_json(json.dumps(_job(scenario))))
    max_tokens = -(-scenario.max_tokens // unit)
    task = TaskSettings(sampling=pb.Sampling(temperature=1.0, top_p=1.0, max_tokens=max_tokens))
    return replace(
        settings,
        tasks=JobTasks(of_job=(task,), max_tokens=max_tokens),
        extensions=replace(settings.extensions, shared_pools=shared_pools(scenario)),
        evaluation=replace(settings.evaluation, prompts=0),
        archived_percent=0,
        max_buffer_bytes=max(1, parse_bytes(scenario.scheduling.max_buffer_bytes) // unit),
    )


def shared_pools(scenario: Scenario) -> frozenset[str]:
    """Pools on the trainer's devices."""
    colocated = scenario.pipeline.mode == "Colocated"
    return frozenset(pool.name for pool in scenario.pools if colocated or pool.devices == "Trainer")


def known_curves(scenario: Scenario) -> Curves | None:
    """The pools' curves, if the scheduler is to know them; per unit of `resolutionTokens`, as it is told lengths."""
    if not scenario.curves_known:
        return None
    unit = scenario.resolution_tokens
    return Curves(
        {
            pool.name: LatencyCurve.of_milliseconds(((p.batch, p.milliseconds) for p in pool.latency), scale=unit)
            for pool in scenario.pools
        }
    )


def _job(scenario: Scenario) -> dict[str, Any]:
    """The smallest job with the scenario's scheduling; what the core does not look at is of no account."""
    uplink = scenario.trainer.uplink if scenario.trainer.uplink_in_turn else None
    return {
        "seed": scenario.seed,
        "model": {"scratch": {}},
        "task": {
            "dataset": {"jsonl": {"path": "none.jsonl"}},
            "groupSize": scenario.group_size,
            "sampling": {"maxTokens": 1},
            "rewards": [{"name": "answer", "exactMatch": {}}],
        },
        "pipeline": _plain(scenario.pipeline),
        "scheduling": _plain(scenario.scheduling),
        **({} if uplink is None else {"weights": {"http": {"uplinkBytesPerSecond": uplink}}}),
        "generators": [{"name": "sim", "engine": {"simulated": {}}}],
        "trainer": {"engine": {"simulated": {}}},
    }


def _plain(model: SpecModel) -> dict[str, Any]:
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


class Shell:
    """The core and everything between it and its peers."""

    def __init__(self, scenario: Scenario, *, lengths: LengthModel, measures: Measures) -> None:
        self.timeline = VirtualClock()
        uplink = scenario.trainer.uplink
        self.uplink = Uplink(self.timeline, bytes_per_s=math.inf if uplink is None else parse_bytes(uplink))
        self.lengths = lengths
        self.measures = measures
        signals: tuple[str, ...] = scenario.scheduling.length_signals
        self._ranker: ModelledRanker | None = None
        if scenario.ranker is not None:
            signals = (*signals, "Ranker")
            self._ranker = ModelledRanker(
                scenario.ranker, lengths=lengths, seed=scenario.seed, step=lambda: len(measures.compositions)
            )
        self.predictions = Lengths(LengthHistory(), signals=signals)
        self.core = Core(core_settings(scenario), Recovered(), lengths=self.predictions, curves=known_curves(scenario))
        self.unit = scenario.resolution_tokens
        self.max_tokens = scenario.max_tokens
        self.prompt_tokens = scenario.prompt_tokens
        lends = scenario.pipeline.mode != "Colocated" and bool(shared_pools(scenario))
        self.tells_partials = scenario.partial_progress or scenario.scheduling.rebalance is not None or lends
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
        self._scores: list[ScoreSample] = []
        self._prompts: list[NeedPrompts] = []
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
            fx.DeliverGroup: self._deliver_group,
            fx.Write: self._write,
            NeedPrompts: self._prompts.append,
            ScoreSample: self._scores.append,
            fx.AskRanker: lambda effect: None,  # the modelled one answers when a prompt is given
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
        if self.core.has_more:
            self.tell(lambda core, _: core.resume())

    def join(self, generator: GeneratorPeer, hello: pb.GeneratorHello) -> None:
        """A replica says hello."""
        self.generators[generator.name] = generator
        self.tell(lambda core, now_s: core.generator_joined(hello, now_s=now_s))

    def part(self, generator: GeneratorPeer) -> None:
        """Its link is closed."""
        if self.generators.get(generator.name) is generator:
            del self.generators[generator.name]
            self.tell(lambda core, now_s: core.generator_left(generator.name))

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
        prompts: list[Prompt] = []
        for need in asked:
            given = int(min(max(0, there - need.first_index), need.count))
            indices = range(need.first_index, need.first_index + given)
            prompts += [Prompt(split=need.split, index=i, text=self.lengths.text_of(i)) for i in indices]
            if given < need.count:
                rest = need.count - given
                self._prompts.append(replace(need, first_index=need.first_index + given, count=rest))
        if self._ranker is not None:
            self.predictions.ranked({prompt_key(prompt.text): self._ranker.score(prompt.text) for prompt in prompts})
        self.tell(lambda core, _: core.prompts_arrived(prompts))

    def _score(self, asked: Sequence[ScoreSample]) -> None:
        self._scoring = False
        scores = [Score(group_id=ask.group_id, sample_index=ask.sample_index, reward=1.0, parts={}) for ask in asked]
        self.measures.scored += len(scores)
        self.tell(lambda core, _: core.scores_arrived(scores))

    def _committed(self, sequence: int) -> None:
        self._committing = False
        self._durable = sequence
        self.tell(lambda core, _: core.committed(sequence))
        dispatch = self.core.order.why
        self.measures.recorded(
            self.core.last_step, trusted=self.predictions.trusted, dispatch=dispatch, now_s=self.timeline.now_s
        )

    # ---- effects

    def _to_generator(self, effect: fx.ToGenerator) -> None:
        generator = self.generators.get(effect.generator_id)
        if generator is not None:
            self._later(generator.link_s, generator.take, effect.command)

    def _to_trainer(self, effect: fx.ToTrainer) -> None:
        if self.trainer is not None:
            self.trainer.take(effect.command)

    def _deliver_group(self, effect: fx.DeliverGroup) -> None:
        if self.trainer is not None:
            self.trainer.deliver(effect)

    def _write(self, effect: fx.Write) -> None:
        self._written = effect.sequence
        if isinstance(effect.record, StepTaken):
            self.measures.compositions[effect.record.step] = tuple(effect.record.group_ids)

    def _finish(self, _: fx.Finished) -> None:
        self.finished = True

    def _fail(self, effect: fx.Failed) -> None:
        raise UserError(field="simulation", rule=f"the run cannot go on: {effect.reason}")
