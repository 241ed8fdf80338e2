"""One run in virtual time: the scheduler's own core decides, engines and a trainer only take time.

Less than `streamrl simulate`, so that tens of thousands of runs take minutes: weights, journal and rewards take no time, nobody
dies, groups may have one sample. What decides is the same code, and so is the engine. Rewards of a group come together.
The first batches are planned before anything may begin. A version is loaded by one replica after the other, in another order each time.

Owns the loop. Pure: everything that is random is drawn before (`draws.py`).
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

from streamrl.latency import LatencyCurve
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.base import SpecModel
from streamrl_cli.simulation.engine import ModelledEngine
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.dispatch.speeds import Curves
from streamrl_workers.scheduler.lengths import Lengths
from streamrl_workers.scheduler.records import Recovered
from streamrl_workers.scheduler.settings import (
    DispatchSettings,
    EvaluationSettings,
    JobTasks,
    SchedulerSettings,
    TaskSettings,
)
from streamrl_workers.tasks.values import NeedPrompts, Prompt, Score, ScoreSample

LOAD_S = 1e-3
"""Of a version, at least: a batch is planned meanwhile, as in a run."""
LEASE_S = 1e9
"""Nobody falls silent."""
BYTES = 1 << 50
"""More than any run buffers."""

Call = Callable[[Core], list[fx.Effect]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Replicas of one kind."""

    name: str
    replicas: int
    slots: int
    curve: LatencyCurve
    """Seconds a token by active samples."""
    kv_s: float = 0.0
    """Seconds that a token of context adds to a decoding step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is run."""

    pools: Sequence[Pool]
    batch_groups: int
    group_size: int
    """One: groups are not scored, and there is one step."""
    dispatch: str
    options: SpecModel | None = None
    steps: int = 1
    staleness: int = 0
    unit: int = 1
    """The core is told lengths in units of so many tokens: they are bytes in its memory."""
    curves_known: bool = True
    beat_s: float = 0.0
    """Between heartbeats; 0: none."""
    load_s: tuple[float, float] = (LOAD_S, LOAD_S)
    """Of a version: the first replica's, and the last one's; those between are spread evenly."""
    train_token_s: float = 0.0
    """Seconds of training a token; groups are trained as they come, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What became of it."""

    step_s: tuple[float, ...]
    """When each step was done; with groups of one sample, when the last sample had ended."""
    why: tuple[str, ...]
    """How dispatch went at the end of each step."""

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return self.step_s[-1]


class World:
    """One run."""

    def __init__(self, job: Job, *, tokens: Sequence[Sequence[int]], lengths: Lengths, core: type[Core] = Core) -> None:
        """`tokens`: of each sample, by group; enough groups for all steps. `lengths`: what predicts them. `core`: one that is watched."""
        self._job = job
        self._tokens = tokens
        known = {pool.name: pool.curve.scaled(job.unit) for pool in job.pools} if job.curves_known else None
        self._core = core(_settings(job), Recovered(), lengths=lengths, curves=Curves(known))
        self._now_s = 0.0
        self._serial = 0
        self._events: list[tuple[float, int, Callable[[int], None], int]] = []
        self._calls: deque[Call] = deque()
        self._written = self._durable = 0
        self._engines: list[_Replica] = []
        self._by_name: dict[str, _Replica] = {}
        self._order: tuple[int, list[_Replica]] = (-1, [])
        """Of loading: the version, and who is first."""
        self._touched: dict[int, _Replica] = {}
        self._scores: dict[int, list[Score]] = {}
        self._trainer = _Trainer()
        self._samples = 0
        self._step_s: list[float] = []
        self._why: list[str] = []
        self._carry_out: Mapping[type, Callable[..., None]] = {
            fx.ToGenerator: self._to_generator,
            fx.ToTrainer: lambda effect: None,
            fx.DeliverGroup: self._deliver,
            fx.Write: self._write,
            NeedPrompts: self._prompts,
            ScoreSample: self._ask_score,
            fx.AskRanker: lambda effect: None,  # it has answered before
        }

    def run(self) -> Ran:
        """To the end of the last step."""
        self._tell(lambda core: core.start(0.0))
        self._join()
        self._settle()  # the first batches are planned
        hello = pb.TrainerHello(trainer_id="trainer-0", instance="t", weights_address="t:1")
        self._tell(lambda core: core.trainer_joined(hello))
        self._tell(lambda core: core.credit(BYTES))
        self._publish(0)
        if self._job.beat_s:
            self._at(self._job.beat_s, self._beat, 0)
        wanted = self._job.steps
        while len(self._step_s) < wanted:
            self._settle()
            if len(self._step_s) < wanted:
                assert self._events, "nothing more happens"
                self._now_s, _, act, what = heappop(self._events)
                act(what)
        return Ran(step_s=tuple(self._step_s), why=tuple(self._why))

    # ---- core

    def _tell(self, call: Call) -> None:
        """One event, then its effects, then what these brought."""
        self._calls.append(call)

    def _settle(self) -> None:
        """Until nothing more happens at this moment."""
        core, calls, carry_out = self._core, self._calls, self._carry_out
        while True:
            if calls:
                for effect in calls.popleft()(core):
                    carry_out[type(effect)](effect)
            elif core.has_more:
                calls.append(lambda core: core.resume())
            elif self._written > self._durable:
                self._durable = self._written
                calls.append(_committed(self._durable))
            elif self._touched:
                for replica in self._touched.values():
                    end_s = replica.engine.next_end_s()
                    if end_s is not None:
                        self._at(end_s, self._ended(replica), replica.engine.revision)
                self._touched.clear()
            else:
                return

    def _at(self, at_s: float, act: Callable[[int], None], what: int) -> None:
        self._serial += 1
        heappush(self._events, (at_s, self._serial, act, what))

    def _write(self, effect: fx.Write) -> None:
        self._written = effect.sequence

    def _prompts(self, need: NeedPrompts) -> None:
        last = min(need.first_index + need.count, len(self._tokens))
        found = [Prompt(split="train", index=i, text=str(i)) for i in range(need.first_index, last)]
        self._tell(lambda core: core.prompts_arrived(found))

    def _ask_score(self, ask: ScoreSample) -> None:
        if self._job.group_size == 1:
            self._samples += 1
            if self._samples == self._job.batch_groups:
                self._done(0)
            return
        scores = self._scores.setdefault(ask.group_id, [])
        scores.append(Score(group_id=ask.group_id, sample_index=ask.sample_index, reward=1.0, parts={}))
        if len(scores) == self._job.group_size:
            del self._scores[ask.group_id]
            self._tell(lambda core: core.scores_arrived(scores))

    # ---- generators

    def _join(self) -> None:
        for pool in self._job.pools:
            step_s = [pool.curve.at(batch) for batch in range(pool.slots + 1)]
            for ordinal in range(pool.replicas):
                replica = _Replica(f"generator-{pool.name}-{ordinal}", ModelledEngine(step_s, kv_s=pool.kv_s))
                self._engines.append(replica)
                self._by_name[replica.name] = replica
                info = pb.GeneratorHello(generator_id=replica.name, instance="1", pool=pool.name, slots=pool.slots)
                self._tell(_joined(info))

    def _to_generator(self, effect: fx.ToGenerator) -> None:
        command = effect.command
        replica = self._by_name[effect.generator_id]
        match command.WhichOneof("command"):
            case "issue":
                engine = replica.engine
                engine.advance(self._now_s)
                for request in command.issue.items:
                    tokens = self._tokens[request.group_id][request.sample_index]
                    replica.running[request.lease] = tokens
                    engine.admit(request.lease, tokens=tokens, context=0)
                self._touched[id(replica)] = replica
            case "weights":
                replica.coming.append(command.weights.version)
                self._at(self._now_s + self._load_s(replica), self._load(replica), 0)

    def _load_s(self, replica: "_Replica") -> float:
        """Who is first changes from version to version."""
        version = replica.coming[-1].step
        if self._order[0] != version:
            self._order = (version, Random(version).sample(self._engines, len(self._engines)))
        first_s, last_s = self._job.load_s
        return first_s + (last_s - first_s) * self._order[1].index(replica) / max(1, len(self._engines) - 1)

    def _load(self, replica: "_Replica") -> Callable[[int], None]:
        def act(_: int) -> None:
            replica.version = version = replica.coming.popleft()
            self._tell(_loaded(replica.name, version, now_s=self._now_s))

        return act

    def _ended(self, replica: "_Replica") -> Callable[[int], None]:
        def act(revision: int) -> None:
            if revision != replica.engine.revision:
                return
            items = [self._progress(lease, replica) for lease in replica.engine.end(self._now_s)]
            self._touched[id(replica)] = replica
            name, now_s = replica.name, self._now_s
            self._tell(lambda core: core.generator_progress(name, items=items, now_s=now_s))

        return act

    def _progress(self, lease: int, replica: "_Replica") -> pb.Progress:
        units = max(1, round(replica.running.pop(lease) / self._job.unit))
        data = bytes(4 * units)
        version = replica.version
        assert version is not None
        span = pb.VersionSpan(tokens=units, step=version.step, attempt=version.attempt)
        return pb.Progress(
            lease=lease, tokens=data, logprobs=data, spans=[span], finish_reason="stop", prompt_tokens=bytes(4)
        )

    def _beat(self, _: int) -> None:
        for replica in self._engines:
            replica.engine.advance(self._now_s)
            self._tell(_alive(replica, unit=self._job.unit, now_s=self._now_s))
        self._at(self._now_s + self._job.beat_s, self._beat, 0)

    # ---- trainer

    def _deliver(self, group: fx.DeliverGroup) -> None:
        trainer = self._trainer
        trainer.held.append(group.group_id)
        seconds = self._job.train_token_s * sum(self._tokens[group.group_id])
        trainer.free_s = max(trainer.free_s, self._now_s) + seconds
        if len(trainer.held) == self._job.batch_groups:
            held, trainer.held = trainer.held, []
            trainer.step += 1
            done = pb.StepDone(step=trainer.step - 1, group_ids=held)
            self._at(trainer.free_s, lambda _: self._step_done(done), 0)

    def _step_done(self, done: pb.StepDone) -> None:
        self._tell(lambda core: core.step_done(done))
        self._publish(done.step + 1)
        self._done(done.step)

    def _publish(self, step: int) -> None:
        name = pb.VersionName(attempt=1, step=step, hash=b"m")
        published, now_s = pb.Published(version=name, size_bytes=1), self._now_s
        self._tell(lambda core: core.tick(now_s))
        self._tell(lambda core: core.published(published, address="t:1"))

    def _done(self, step: int) -> None:
        assert len(self._step_s) == step
        self._step_s.append(self._now_s)
        self._why.append(self._core.order.why)


class _Replica:
    """One modelled generator."""

    def __init__(self, name: str, engine: ModelledEngine) -> None:
        self.name = name
        self.engine = engine
        self.running: dict[int, int] = {}
        self.version: pb.VersionName | None = None
        self.coming: deque[pb.VersionName] = deque()


@dataclass(slots=True)
class _Trainer:
    """Trains groups as they come."""

    held: list[int] = field(default_factory=list)
    step: int = 0
    free_s: float = 0.0


def _settings(job: Job) -> SchedulerSettings:
    return SchedulerSettings(
        batch_groups=job.batch_groups,
        staleness=job.staleness,
        steps=job.steps,
        group_size=job.group_size,
        tasks=JobTasks(
            of_job=(TaskSettings(sampling=pb.Sampling(temperature=1.0, top_p=1.0, max_tokens=1 << 20)),),
            max_tokens=1 << 20,
        ),
        seed=1,
        evaluation=EvaluationSettings(prompts=0, interval=1),
        lease_s=LEASE_S,
        max_buffer_bytes=BYTES,
        dispatch=DispatchSettings(policy=job.dispatch, options=job.options, length_signals=()),
        prompt_look_ahead=max(64, 2 * job.batch_groups),
    )


def _committed(sequence: int) -> Call:
    return lambda core: core.committed(sequence)


def _joined(info: pb.GeneratorHello) -> Call:
    return lambda core: core.generator_joined(info, now_s=0.0)


def _loaded(name: str, version: pb.VersionName, *, now_s: float) -> Call:
    return lambda core: core.weights_loaded(name, version=version, now_s=now_s)


def _alive(replica: _Replica, *, unit: int, now_s: float) -> Call:
    reading = replica.engine.step_times(unit=unit)
    return lambda core: core.generator_alive(replica.name, now_s=now_s, reading=reading)
