"""A small world around the scheduler's core: links, a journal, generators, a trainer, all driven by hand.

What the server does asynchronously is a queue here: a test decides what happens next. Checks who is paused.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from random import Random

from streamrl.latency import LatencyCurve
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.dispatch.speeds import Curves
from streamrl_workers.scheduler.extension_settings import ExtensionSettings
from streamrl_workers.scheduler.lengths import Lengths
from streamrl_workers.scheduler.settings import (
    DeliverySettings,
    DispatchSettings,
    EvaluationSettings,
    JobTasks,
    SchedulerSettings,
    TaskSettings,
)
from streamrl_workers.tasks.values import NeedPrompts, PlayTurn, Score, ScoreSample, TurnAnswer
from support.core_peers import SimGenerator, SimTrainer, check_request, group_command, hello_of
from support.core_rows import prompts_of
from support.core_trainer import TrainerSide
from support.replayed import replay
from support.turns import CONTEXT_CHAR, next_token

STEEP = LatencyCurve((1, 64), (0.01, 0.2))
"""Seconds of a step in the pool "p": it is known, so that dispatch plans; nothing is known of others."""
SAMPLING = pb.Sampling(temperature=1.0, top_p=1.0, max_tokens=8)
EVALUATION = {
    "evaluation_prompts": "prompts",
    "evaluation_sampled": "sampled",
    "evaluation_interval": "interval",
    "evaluates": "enabled",
}
DISPATCH = {"dispatch": "policy", "dispatch_options": "options", "length_signals": "length_signals"}
DELIVERY = {"by_number": "by_number", "whole_batches": "whole_batches"}
BRANCHES = 0.3
"""Chance that an environment's answer begins a new context."""


def settings(**changes) -> SchedulerSettings:
    """A job; `changes` are fields of the settings or of one of their parts."""
    sampling, max_turns = changes.pop("sampling", SAMPLING), changes.pop("max_turns", None)
    tasks = changes.pop("tasks", (TaskSettings(sampling=sampling, max_turns=max_turns),))
    most = max(task.sampling.max_tokens for task in tasks)
    values = {
        "batch_groups": 3,
        "staleness": 1,
        "steps": 4,
        "group_size": 2,
        "seed": 7,
        "lease_s": 10.0,
        "max_buffer_bytes": 1 << 20,
        "prompt_look_ahead": 8,
        "tasks": JobTasks(of_job=tasks, max_tokens=most, **_taken(changes, {"shares": "shares"})),
        "evaluation": EvaluationSettings(**{"prompts": 2, "interval": 2, **_taken(changes, EVALUATION)}),
        "dispatch": DispatchSettings(
            **{"policy": "longestFirst", "length_signals": ("History",), **_taken(changes, DISPATCH)}
        ),
        "delivery": DeliverySettings(**_taken(changes, DELIVERY)),
        "extensions": ExtensionSettings(**_taken(changes, {one.name: one.name for one in fields(ExtensionSettings)})),
    }
    return SchedulerSettings(**{**values, **changes})


def _taken(changes: dict, names: dict[str, str]) -> dict:
    """Those of the changes that are of one part, by its own names."""
    return {ours: changes.pop(name) for name, ours in names.items() if name in changes}


class World(TrainerSide):
    """The core and everybody around it."""

    ours = True  # all tokens are by `next_token`

    def __init__(
        self, job: SchedulerSettings, *, slots: tuple[int, ...] = (3, 2), lengths: Lengths | None = None
    ) -> None:
        self.job = job
        self.lengths = lengths
        self.now_s = 0.0
        self.durable: list[rec.Record] = []
        self.unsynced: deque[fx.Write] = deque()
        self.scores: deque[ScoreSample] = deque()
        self.turns: deque[PlayTurn] = deque()
        self.played: set[int] = set()
        self.prompts: deque[NeedPrompts] = deque()
        self.slots = slots
        self.clusters: dict[str, str] = {}  # of generators that are in another one than the trainer
        self.pools: dict[str, str] = {}  # of generators that are not in "p"
        self.kv: int | None = None  # capacity in tokens of those that join
        self.lives = 0
        self.instances = 0
        self.checkpoint = 0
        self.finished = False
        self.failed = ""
        self.trainer: SimTrainer | None = None
        self.generators: dict[str, SimGenerator] = {}
        self.begun: dict[int, int] = {}
        self.history: dict[int, tuple[int, ...]] = {}
        self.staleness_seen: set[int] = set()
        self.boot()

    def reward(self, group_id: int, sample_index: int) -> float:
        """With dynamic sampling two of three groups have equal rewards."""
        return float(sample_index) if self.job.extensions.draws_per_step > 1 and group_id % 3 == 0 else 1.0

    # ---- the scheduler

    def boot(self) -> None:
        """A scheduler starts from what is durable; everybody's link is new."""
        self.lives += 1
        self.unsynced.clear()
        self.scores.clear()
        self.turns.clear()
        self.prompts.clear()
        self.taken = {record.step for record in self.durable if isinstance(record, rec.StepTaken)}
        """Steps with a record, durable or not, as this scheduler knows it."""
        self.redrawn = 0  # groups dropped for the step being filled because their rewards are equal
        self.generators = {name: generator for name, generator in self.generators.items() if not generator.leaving}
        self.core = self.make_core()
        self.do(self.core.start(self.now_s))
        for generator in self.generators.values():
            generator.connected = False
        if self.trainer is not None:
            self.trainer.connected = False

    def make_core(self) -> Core:
        """The core of this life, from what is durable."""
        return Core(
            self.job,
            replay(self.durable),
            first_lease=self.lives * 1_000_000,
            lengths=self.lengths,
            curves=Curves({"p": STEEP}),
        )

    def do(self, effects: list[fx.Effect]) -> None:
        for effect in effects:
            self.take(effect)
        self.check()
        if self.core.has_more:
            self.do(self.core.resume())

    def take(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Write():
                self.unsynced.append(effect)
                self.note(effect.record)
            case ScoreSample():
                self.scores.append(effect)
            case PlayTurn():
                assert effect.lease not in self.played, "a turn is asked about twice"
                self.played.add(effect.lease)
                self.turns.append(effect)
            case NeedPrompts():
                self.prompts.append(effect)
            case fx.ToGenerator():
                self.tell_generator(effect)
            case fx.ToTrainer():
                if self.trainer is not None and self.trainer.connected:
                    self.trainer.inbox.append(effect.command)
            case fx.DeliverGroup():
                if self.trainer is not None and self.trainer.connected:
                    self.trainer.inbox.append(group_command(effect, self.samples_of(effect)))
            case fx.Finished():
                self.finished = True
            case fx.Failed():
                self.failed = effect.reason

    def samples_of(self, effect: fx.DeliverGroup) -> Sequence[bytes]:
        """Its own, or the journal's: those must be durable."""
        found = (r for r in self.durable if isinstance(r, rec.Scored) and r.group_id == effect.group_id)
        return effect.trajectories or next(found).trajectories

    def tell_generator(self, effect: fx.ToGenerator) -> None:
        generator = self.generators.get(effect.generator_id)
        if generator is not None and generator.connected:
            is_issue = effect.command.HasField("issue")
            assert not (generator.leaving and is_issue), "it takes nothing more"
            assert not (generator.told_paused and is_issue), "it is paused"
            if effect.command.HasField("pause"):
                generator.told_paused = effect.command.pause.paused
            generator.inbox.append(effect.command)

    def check(self) -> None:
        view = self.core.view()
        assert view.groups_by_state["planned"] <= (1 + self.job.staleness) * self.job.batch_groups
        live = sum(view.groups_by_state[s] for s in ("planned", "issued", "running", "finished"))
        assert live <= (1 + self.job.staleness) * self.job.batch_groups
        most = (1 + self.job.staleness) * self.job.batch_groups * self.job.group_size
        assert view.waiting_samples <= most + self.job.evaluation.prompts * (1 + self.job.evaluation.sampled)
        assert view.prompts_ready <= self.job.prompt_look_ahead
        for generator in self.generators.values():
            assert len(generator.active) <= generator.slots or not generator.connected
        if not (self.core.has_more or self.core._ending or self.core._failed):
            self.check_pauses()
        if self.job.delivery.whole_batches and view.delivered_groups and view.step not in self.taken:
            assert view.buffered_groups >= self.job.batch_groups, "delivered before the batch was whole"

    def check_pauses(self) -> None:
        """Who is on the trainer's devices is paused, unless the trainer has nothing to compute."""
        trainer = self.trainer
        goes_on = trainer is not None and trainer.has_nothing and self.core.view().step <= trainer.step
        awaits_record = goes_on and self.core.view().step < trainer.step
        for generator in self.generators.values():
            if generator.connected and not awaits_record:
                assert generator.told_paused == (generator.pool in self.job.extensions.shared_pools and not goes_on)

    def note(self, record: rec.Record) -> None:
        """Dynamic sampling is bounded for each step."""
        if isinstance(record, rec.StepTaken) and record.step not in self.taken:
            self.taken.add(record.step)
            self.redrawn = 0
        elif isinstance(record, rec.Dropped) and record.reason == "zero_variance":
            self.redrawn += 1
            assert self.redrawn <= (self.job.extensions.draws_per_step - 1) * self.job.batch_groups

    def commit(self, count: int) -> None:
        taken = [self.unsynced.popleft() for _ in range(min(count, len(self.unsynced)))]
        self.durable.extend(write.record for write in taken)
        if taken:
            self.do(self.core.committed(taken[-1].sequence))

    # ---- the task pool

    def deliver_prompts(self) -> None:
        self.do(
            self.core.prompts_arrived(prompts_of(self.prompts.popleft(), supervised=self.job.extensions.supervised))
        )

    def score(self, *, fail: bool) -> None:
        ask = self.scores.popleft()
        which = {"group_id": ask.group_id, "sample_index": ask.sample_index}
        if fail:
            score = Score(**which, reward=None, parts={}, error="it hung", kind="timeout")
        else:
            reward = self.reward(ask.group_id, ask.sample_index)
            score = Score(**which, reward=reward, parts={"whole": reward, "twice": 2 * reward})
        self.do(self.core.scores_arrived([score]))

    def answer_turn(
        self, *, done: bool, error: str = "", observation: str = "o", context: bool = False, late: bool = False
    ) -> None:
        """The environment answers the oldest turn; `context`: with a new one; `late`: and says it once more."""
        ask = self.turns.popleft()
        answer = TurnAnswer(
            group_id=ask.group_id,
            sample_index=ask.sample_index,
            lease=ask.lease,
            observation=CONTEXT_CHAR * len(observation) if context else observation,
            context=context and bool(observation),
            reward=0.5,
            done=done,
            error=error,
            kind="raised" if error else None,
        )
        for _ in range(2 if late else 1):
            self.do(self.core.turns_answered([answer]))

    # ---- generators

    def join_generator(self, name: str, *, pool: str = "p") -> None:
        pool = self.pools.get(name, pool)
        generator = self.generators.get(name)
        if generator is None or generator.leaving:
            self.generators.pop(name, None)
            self.instances += 1
            slots = self.slots[len(self.generators) % len(self.slots)]
            version, cluster = (
                (0, 0) if pool == self.job.extensions.reference_pool else None,
                self.clusters.get(name, ""),
            )
            generator = SimGenerator(name, f"i{self.instances}", slots, version=version, cluster=cluster)
            self.generators[name] = generator
        generator.connected = True
        generator.inbox.clear()
        generator.active.clear()
        generator.wanted = None
        generator.pool = pool or self.pools.get(name, "p")
        generator.paused = generator.told_paused = False
        self.do(self.core.generator_joined(hello_of(generator, kv=self.kv), now_s=self.now_s))

    def kill_generator(self, name: str) -> None:
        del self.generators[name]
        self.do(self.core.generator_left(name))

    def leave_generator(self, name: str) -> None:
        self.generators[name].leaving = True
        self.do(self.core.generator_leaving(name, now_s=self.now_s))

    def finish_leaving(self, name: str) -> bool:
        """A generator that leaves and holds nothing goes; whether it did."""
        generator = self.generators[name]
        if not generator.drain or not generator.connected or generator.active or generator.inbox:
            return False
        held = self.core.view().active_leases
        self.do(self.core.generator_drained(name, now_s=self.now_s))
        assert self.core.view().active_leases >= held, "it held nothing, so nothing is taken back"
        self.kill_generator(name)
        return True

    def deliver_generator(self, generator: SimGenerator) -> None:
        command = generator.inbox.popleft()
        match command.WhichOneof("command"):
            case "issue":
                generator.idle = ""
                for request in command.issue.items:
                    generator.active[request.lease] = request
            case "cancel":
                for lease in command.cancel.leases:
                    generator.active.pop(lease, None)
            case "weights":
                generator.wanted, generator.source = command.weights.version, command.weights.address
            case "idle":
                generator.idle = command.idle.cause
            case "pause":
                generator.paused = command.pause.paused
            case "drain":
                generator.drain = True

    def load_weights(self, generator: SimGenerator) -> None:
        assert generator.wanted is not None
        assert generator.version is None or generator.wanted.step >= generator.version[1], "a version's number fell"
        generator.version = (generator.wanted.attempt, generator.wanted.step)
        loaded, generator.wanted = generator.wanted, None
        recorded = {record.step for record in self.durable if isinstance(record, rec.StepTaken)}
        assert loaded.step == 0 or loaded.step - 1 in recorded, "a version was announced whose step has no record"
        self.do(self.core.weights_loaded(generator.name, version=loaded, now_s=self.now_s))

    def fail_weights(self, generator: SimGenerator) -> None:
        assert generator.wanted is not None
        failed, generator.wanted = generator.wanted, None
        self.do(self.core.weights_failed(generator.name, version=failed, now_s=self.now_s))

    def stall_weights(self, generator: SimGenerator) -> None:
        stalled = pb.WeightsStalled(version=generator.wanted, address=generator.source)
        self.do(self.core.weights_stalled(generator.name, stalled=stalled, now_s=self.now_s))

    def make_token(self, generator: SimGenerator, lease: int, *, finish: str) -> None:
        request = generator.active[lease]
        check_request(request, version=generator.version, pinned=not self.job.partial_rollouts)
        item = next_token(request, version=generator.version, finish=finish)
        if item.finish_reason:
            del generator.active[lease]
        self.do(self.core.generator_progress(generator.name, items=[item], now_s=self.now_s))

    # ---- what can be done now

    def progress_some(self, chance: Random, *, pace: float, finish: float) -> None:
        """Each thing that can happen happens with chance `pace`; a sample that gains a token ends with `finish`."""
        while self.prompts and chance.random() < pace:
            self.deliver_prompts()
        self.commit(int(len(self.unsynced) * min(1.0, 2 * pace * (1 - chance.random()))))
        while self.scores and chance.random() < pace:
            self.score(fail=False)
        while self.turns and chance.random() < pace:
            done = chance.random() < finish
            context = chance.random() < BRANCHES and not done
            self.answer_turn(done=done, context=context, observation="o" * (1 + len(self.turns)))
        for generator in [g for g in self.generators.values() if g.connected]:
            while generator.inbox and chance.random() < pace:
                self.deliver_generator(generator)
            pinned = any(request.pinned for request in generator.active.values())
            if generator.wanted is not None and not pinned and chance.random() < pace:
                self.load_weights(generator)
            for lease in [lease for lease in generator.active if not generator.paused and chance.random() < pace]:
                self.make_token(generator, lease, finish="stop" if chance.random() < finish else "")
        while self.trainer is not None and self.trainer.connected and self.trainer.inbox and chance.random() < pace:
            self.deliver_trainer()
        if self.trainer is not None and self.trainer.owed and self.trainer.connected:
            self.pay()
        if self.can_take_step() and chance.random() < pace:
            self.take_step()
        if self.can_wait() and chance.random() < pace:
            self.say_it_waits()

    def progress_once(self) -> bool:
        """Everything that can happen happens once; whether anything did."""
        acted = False
        while self.prompts:
            self.deliver_prompts()
            acted = True
        if self.unsynced:
            self.commit(len(self.unsynced))
            acted = True
        while self.scores:
            self.score(fail=False)
            acted = True
        while self.turns:
            self.answer_turn(done=True)
            acted = True
        for generator in list(self.generators.values()):
            while generator.connected and generator.inbox:
                self.deliver_generator(generator)
                acted = True
            pinned = any(request.pinned for request in generator.active.values())
            if generator.connected and generator.wanted is not None and not pinned:
                self.load_weights(generator)
                acted = True
            for lease in [] if generator.paused else list(generator.active):
                self.make_token(generator, lease, finish="stop")
                acted = True
            acted |= self.finish_leaving(generator.name)
        while self.trainer is not None and self.trainer.connected and self.trainer.inbox:
            self.deliver_trainer()
            acted = True
        if self.trainer is not None and self.trainer.owed:
            self.pay()
            acted = True
        if self.can_take_step():
            self.take_step()
            acted = True
        if self.can_wait():
            self.say_it_waits()
            acted = True
        return acted

    def run_out(self, *, rounds: int = 400) -> None:
        """With everybody alive and given time, the run must end."""
        if self.trainer is None:
            self.start_trainer()
        if not self.trainer.connected:
            self.join_trainer()
        for _ in range(rounds):
            if self.finished:
                return
            for name in ("a", "b"):
                if name not in self.generators or not self.generators[name].connected:
                    self.join_generator(name)
            acted = self.progress_once()
            if self.trainer.step >= self.job.steps and self.can_checkpoint():
                self.write_checkpoint()  # in each round: it counts as no progress, so time passes meanwhile
            if not acted:
                self.now_s += 0.1
                for generator in self.generators.values():
                    self.do(self.core.generator_alive(generator.name, now_s=self.now_s))
                self.do(self.core.tick(self.now_s))
        raise AssertionError(f"the run does not end: {self.core.view()}")
