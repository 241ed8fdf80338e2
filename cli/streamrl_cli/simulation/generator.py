"""A modelled generator: what a generator process says and does, with an engine that only takes time.

Owns one replica's life: it connects, fetches and loads weights, makes what is issued, drains, dies. The part of the wall
that it is in follows the generator's own rule (`metrics/bubbles.py`). Does not own which replicas there are
(`replicas.py`), nor the core (`shell.py`).

Differences to the process (docs/simulator.md): progress is told when a sample ends, and on the way only where the
scheduler decides by it (`scheduling.rebalance`, `partialProgress`, a pool on the trainer's devices, while nothing waits); what a real one would have
told before it died is told at its death. In such runs a sample that comes with tokens has them read: nothing is made for
the time of as many tokens of a full batch; in others that takes no time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

from streamrl.proto import stream_pb2 as pb
from streamrl_cli.simulation.engine import ModelledEngine, PoolModel
from streamrl_cli.simulation.shell import Call, Shell
from streamrl_workers.metrics.bubbles import GeneratorState, WallPartition, generator_wall
from streamrl_workers.metrics.step_times import StepCounts
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.effects import Effect

PARTIALS_INTERVAL_S = 1.0
"""A generator tells of running samples so often (`generator/link.py`): what a death costs at most."""
_SLACK_TOKENS = 1e-6
"""Sums of floats never miss the last token by rounding."""
_ZEROS = bytes(4)

Say = Callable[[], None]


@dataclass(slots=True)
class _Running:
    """One sample in the engine."""

    sample: tuple[int, int]  # group, index
    tokens: int  # of the whole completion
    prefix: int  # units that had arrived before
    begun_s: float
    made: float  # of the engine when it began
    to_go: int  # tokens when it began
    told: int = 0  # units behind the prefix


class ModelledGenerator:
    """One replica, from its start to its end."""

    def __init__(
        self, shell: Shell, *, name: str, instance: str, pool: PoolModel, gone: Callable[["ModelledGenerator"], None]
    ) -> None:
        """`gone` is called when this replica is no more."""
        self.name = name
        self.pool = pool
        self.link_s = pool.link_s
        self.wall = WallPartition(now_s=shell.timeline.now_s)
        self.connected = self.leaving = self.is_gone = False
        self._shell = shell
        self._measures = shell.measures
        self._instance = instance
        self._gone = gone
        self._engine = ModelledEngine(pool.step_s, kv_s=pool.kv_s)
        self._running: dict[int, _Running] = {}
        self._versions: list[tuple[float, pb.VersionName]] = []
        """(`made` from which on it is in the engine, version), as far back as a running sample reaches."""
        self._fetching: pb.VersionName | None = None
        self._fetching_s = 0.0
        """Since when."""
        self._next: pb.VersionName | None = None
        """To be fetched afterwards."""
        self._swapping = self._queued = self._draining = self._telling = self._paused = False
        self._read_s = 0.0
        """Until then it reads what samples have brought."""
        self._idle_cause = "no_prompts"
        self._scheduled = -1
        """The engine's revision for which its next end is in the timeline."""

    @property
    def active(self) -> int:
        """Samples in the engine."""
        return len(self._engine)

    @property
    def step(self) -> int | None:
        """Version in the engine; None: none yet."""
        return self._versions[-1][1].step if self._versions else None

    def step_times(self) -> dict[int, StepCounts]:
        """How long steps took, in the units that the scheduler is told."""
        self._advance()
        return self._engine.step_times(unit=self._shell.unit)

    # ---- life

    def connect(self, _: object = None) -> None:
        """The process is up: say hello."""
        if self.is_gone:
            return
        self.connected = True
        hello = pb.GeneratorHello(
            generator_id=self.name,
            instance=self._instance,
            pool=self.pool.name,
            slots=self.pool.slots,
            cluster=self.pool.cluster,
            weights_address=f"{self.name}:1" if self.pool.cluster else "",
        )
        self._shell.join(self, hello)
        self._shell.touched[self.name] = self

    def leave(self) -> None:
        """Finish what is active, take nothing more, go."""
        if self.is_gone or self.leaving:
            return
        self.leaving = True
        if self.connected:
            self._tell(lambda core, now_s: core.generator_leaving(self.name, now_s=now_s))
        else:
            self._end()

    def die(self) -> None:
        """The process ends now; what a real one would have told of its samples is told first."""
        if self.is_gone:
            return
        self._advance()
        told = [item for lease, run in self._running.items() if (item := self._partial(lease, run)) is not None]
        for run in self._running.values():
            self._measures.lost(self.name, run.sample, now_s=self._now_s)
        self._running.clear()
        if told:
            self._shell.tell(partial(self._progress, told))
        self._end()

    def _drained(self) -> None:
        self._shell.tell(lambda core, now_s: core.generator_drained(self.name, now_s=now_s))
        self._end()

    def _end(self) -> None:
        self.is_gone = True
        self.connected = False
        self._shell.part(self)
        self._gone(self)

    # ---- commands

    def take(self, command: pb.GeneratorCommand) -> None:
        """A command has arrived."""
        if self.is_gone:
            return
        match command.WhichOneof("command"):
            case "issue":
                self._advance()
                self._idle_cause = "no_prompts"
                for request in command.issue.items:
                    self._admit(request)
            case "cancel":
                self._advance()
                for lease in command.cancel.leases:
                    self._cancel(lease)
            case "weights":
                self._announced(command.weights.version)
            case "idle":
                self._idle_cause = command.idle.cause
            case "queue":
                self._queued = command.queue.waiting
            case "pause":
                self._advance()
                self._paused = command.pause.paused
                self._pause()
            case "drain":
                self._draining = True
        self._shell.touched[self.name] = self

    def settle(self) -> None:
        """Everything of this moment has been said: plan the next end, note what is the case, go if all is done."""
        if self.is_gone:
            return
        engine = self._engine
        if engine.revision != self._scheduled:
            self._advance()
            self._scheduled = engine.revision
            end_s = engine.next_end_s()
            if end_s is not None:
                self._shell.timeline.at(end_s, self._ended, self._scheduled)
        self._note()
        if self._shell.tells_partials and self._running and not (self._queued or self._telling):
            self._telling = True
            self._shell.timeline.after(PARTIALS_INTERVAL_S, self._tell_running, background=True)
        if self._draining and not self._running:
            self._draining = False
            self._say(self._drained)

    # ---- samples

    def _admit(self, request: pb.SampleRequest) -> None:
        sample = (request.group_id, request.sample_index)
        tokens = self._shell.lengths.group(sample[0])[sample[1]]
        prefix = len(request.prefix_tokens) >> 2
        to_go = max(1, tokens - prefix * self._shell.unit)
        now_s = self._now_s
        self._running[request.lease] = _Running(sample, tokens, prefix, now_s, self._engine.made, to_go)
        self._engine.admit(request.lease, tokens=to_go, context=self._shell.prompt_tokens + tokens - to_go)
        self._measures.began(self.name, sample, now_s=now_s)
        if prefix and self._shell.tells_partials:
            self._read(prefix * self._shell.unit)

    def _read(self, tokens: int) -> None:
        """Nothing is made while a sample's tokens so far are read."""
        slots = self.pool.slots
        self._read_s = max(self._now_s, self._read_s) + tokens * self.pool.step_s[slots] / slots
        self._pause()
        self._shell.timeline.at(self._read_s, self._has_read)

    def _has_read(self, _: object) -> None:
        if not self.is_gone:
            self._advance()
            self._pause()
            self._shell.touched[self.name] = self

    def _pause(self) -> None:
        self._engine.pause(paused=self._swapping or self._paused or self._now_s < self._read_s)

    def _cancel(self, lease: int) -> None:
        run = self._running.pop(lease, None)
        if run is not None:
            self._engine.cancel(lease)
            self._measures.lost(self.name, run.sample, now_s=self._now_s)

    def _ended(self, revision: int) -> None:
        """The engine's next end has come, unless something has changed since."""
        if self.is_gone or revision != self._engine.revision:
            return
        items = []
        now_s = self._now_s
        for lease in self._engine.end(now_s):
            run = self._running.pop(lease)
            self._measures.finished(self.name, run.sample, tokens=run.tokens, now_s=now_s)
            items.append(self._finish(lease, run, seconds=now_s - run.begun_s))
        self._shell.touched[self.name] = self
        self._tell(partial(self._progress, items))

    def _progress(self, items: list[pb.Progress], core: Core, now_s: float) -> list[Effect]:
        return core.generator_progress(self.name, items=items, now_s=now_s)

    def _finish(self, lease: int, run: _Running, *, seconds: float) -> pb.Progress:
        units = max(run.prefix + 1, self._shell.units(run.tokens)) - run.prefix - run.told
        data = _zeros(units)
        reason = "length" if run.tokens >= self._shell.max_tokens else "stop"
        return pb.Progress(
            lease=lease,
            tokens=data,
            logprobs=data,
            spans=self._spans(run, units=units),
            finish_reason=reason,
            prompt_tokens=_ZEROS,
            generate_s=seconds,
        )

    def _partial(self, lease: int, run: _Running) -> pb.Progress | None:
        """What had been told of a sample by the last interval; None: nothing."""
        now_s = self._now_s
        told_s = now_s // PARTIALS_INTERVAL_S * PARTIALS_INTERVAL_S
        if told_s <= run.begun_s:
            return None
        share = (told_s - run.begun_s) / (now_s - run.begun_s)
        return self._gain(lease, run, tokens=int((self._engine.made - run.made) * share + _SLACK_TOKENS))

    def _gain(self, lease: int, run: _Running, *, tokens: int) -> pb.Progress | None:
        """What is new of a sample that has made so many tokens here and goes on; None: nothing."""
        whole = max(run.prefix + 1, self._shell.units(run.tokens)) - run.prefix
        units = min(tokens // self._shell.unit, whole - 1) - run.told
        if units < 1:
            return None
        data, spans = _zeros(units), self._spans(run, units=units)
        run.told += units
        return pb.Progress(lease=lease, tokens=data, logprobs=data, spans=spans, prompt_tokens=_ZEROS)

    def _tell_running(self, _: object) -> None:
        """Of all that runs, as a process does by the clock."""
        self._telling = False
        if self.is_gone:
            return
        self._advance()
        made = self._engine.made + _SLACK_TOKENS
        gains = (self._gain(lease, run, tokens=int(made - run.made)) for lease, run in self._running.items())
        items = [item for item in gains if item is not None]
        if items:
            self._tell(partial(self._progress, items))
        self._shell.touched[self.name] = self

    def _spans(self, run: _Running, *, units: int) -> list[pb.VersionSpan]:
        """Which version made which of the next `units`, behind those that were told."""
        versions = self._versions
        if versions[-1][0] <= run.made:
            name = versions[-1][1]
            return [pb.VersionSpan(tokens=units, step=name.step, attempt=name.attempt)]
        spans: list[pb.VersionSpan] = []
        given, upto_all = run.told, run.told + units
        for place, (_, name) in enumerate(versions):
            last = place + 1 == len(versions)
            upto = upto_all if last else min(upto_all, int((versions[place + 1][0] - run.made) // self._shell.unit))
            if upto > given:
                spans.append(pb.VersionSpan(tokens=upto - given, step=name.step, attempt=name.attempt))
                given = upto
        return spans

    # ---- weights

    def _announced(self, version: pb.VersionName) -> None:
        """Fetch it now, or after the one that is on its way (as `weights/pull.py`)."""
        if self._fetching is not None:
            self._next = None if version == self._fetching else version
        else:
            self._fetch(version)

    def _fetch(self, version: pb.VersionName) -> None:
        self._fetching = version
        self._fetching_s = self._now_s
        pool = self.pool
        if pool.cluster:
            self._shell.uplink.fetch(
                version,
                cluster=pool.cluster,
                size_bytes=pool.weight_bytes,
                most_bytes_per_s=pool.bandwidth,
                then=self._fetched,
            )
        else:
            self._shell.timeline.after(pool.weight_bytes / pool.bandwidth, self._fetched, version)

    def _fetched(self, version: pb.VersionName) -> None:
        if self.is_gone:
            return
        self._measures.took(
            self.name, f"fetch {version.step}", seconds=self._now_s - self._fetching_s, begun_s=self._fetching_s
        )
        self._advance()
        self._swapping = True
        self._pause()
        self._shell.touched[self.name] = self
        seconds = self.pool.load_s
        self._measures.took(self.name, f"load {version.step}", seconds=seconds, begun_s=self._now_s)
        self._shell.timeline.after(seconds, self._loaded, version)

    def _loaded(self, version: pb.VersionName) -> None:
        if self.is_gone:
            return
        self._advance()
        self._swapping = False
        self._pause()
        self._versions.append((self._engine.made, version))
        oldest = min((run.made for run in self._running.values()), default=math.inf)
        while len(self._versions) > 1 and self._versions[1][0] <= oldest:
            del self._versions[0]
        self._fetching = None
        if self._next is not None:
            following, self._next = self._next, None
            self._fetch(following)
        self._shell.touched[self.name] = self
        self._tell(lambda core, now_s: core.weights_loaded(self.name, version=version, now_s=now_s))

    # ---- inside

    @property
    def _now_s(self) -> float:
        return self._shell.timeline.now_s

    def _tell(self, call: Call) -> None:
        self._say(partial(self._shell.tell, call))

    def _say(self, say: Say) -> None:
        """Tell the scheduler, as long as the link takes; a dead process's last words are lost with its link."""
        if self.link_s:
            self._shell.timeline.after(self.link_s, self._speak, say)
        else:
            say()

    def _speak(self, say: Say) -> None:
        if not self.is_gone:
            say()

    def _advance(self) -> None:
        self._engine.advance(self._now_s)

    def _note(self) -> None:
        """Tell the bubble clock what is the case from now on."""
        active = 0 if self._paused else len(self._engine)
        if active and not self._swapping:
            states = self.pool.queued_states if self._queued else self.pool.lonely_states
            self.wall.enter(states[active - 1], now_s=self._now_s)
            return
        situation = GeneratorState(
            connected=self.connected,
            usable=bool(self._versions),
            swapping=self._swapping,
            pulling=self._fetching is not None,
            blocked=False,
            active=active,
            slots=self.pool.slots,
            queued=self._queued,
            idle_cause="phase" if self._paused else self._idle_cause,
        )
        self.wall.enter(generator_wall(situation), now_s=self._now_s)


@lru_cache(maxsize=4096)
def _zeros(units: int) -> bytes:
    """Tokens and log-probs that say nothing: those of equal length are shared."""
    return bytes(4 * units)
