"""A modelled trainer: the step story of `trainer/step_loop.py`, with an engine that only takes time.

One step:
1. take groups as they come and work on their tokens, while others arrive;
2. when the last group is there: the rest, then the optimiser;
3. say that the step is done (once the step before is recorded), copy the weights, publish them;
4. every so often: a checkpoint, when the journal has the step.

Owns one process's way through these and its part of the wall, over restarts. Does not own what the core does with it.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

from streamrl.proto import stream_pb2 as pb
from streamrl_cli.simulation.scenario import Scenario
from streamrl_cli.simulation.shell import Shell
from streamrl_workers.metrics.bubbles import WallPartition, WallState, idle
from streamrl_workers.scheduler.effects import DeliverGroup

CREDIT_BYTES = 1 << 50
"""The window of groups on their way is not modelled: the simulated trainer takes them at once."""
_BUSY = WallState(part="busy")
_WEIGHTS = WallState(part="weights")
_OTHER = WallState(part="other")


class ModelledTrainer:
    """The trainer of a run, and its checkpoints."""

    def __init__(self, shell: Shell, scenario: Scenario) -> None:
        self.name = "trainer"
        self.wall = WallPartition(now_s=shell.timeline.now_s)
        self._shell = shell
        self._spec = scenario.trainer
        self._batch_groups = scenario.pipeline.batch_groups
        self._steps = scenario.pipeline.steps
        self._checkpoint = 0
        self._lives = 0
        self._step = self._attempt = 0
        self._inbox: deque[DeliverGroup] = deque()
        self._gathered: list[int] = []
        self._unrecorded: int | None = None
        self._cause = "no_samples"
        self._at_work = False
        self._told_waits: tuple[int, int] | None = None
        """Step and groups with which it last said that it waits."""
        self._ready = False
        """Whether it takes groups: welcomed, published, and not done."""
        self._goes_on: Callable[[], None] | None = None
        self._after_record: Callable[[], None] | None = None
        """What is done once the last step is in the journal."""

    @property
    def connected(self) -> bool:
        """Whether the scheduler has it."""
        return self._shell.trainer is self

    def connect(self, _: object = None) -> None:
        """The process is up: say hello."""
        self._lives += 1
        self._begin()
        self._shell.trainer = self
        hello = pb.TrainerHello(
            trainer_id="trainer-0",
            instance=f"trainer {self._lives}",
            step=self._step,
            checkpoint_step=self._checkpoint,
            weights_address="trainer:1",
        )
        self._shell.tell(lambda core, now_s: core.trainer_joined(hello))

    def restart(self, down_s: float) -> None:
        """The process dies; another one begins at the newest checkpoint. One that is down already stays down as long as it was to."""
        if not self.connected:
            return
        self._shell.trainer = None
        self._shell.tell(lambda core, now_s: core.trainer_left())
        self._lives += 1
        self._enter(_OTHER)
        self._shell.timeline.after(down_s, self.connect)

    # ---- commands

    def take(self, command: pb.TrainerCommand) -> None:
        """A command has arrived."""
        match command.WhichOneof("command"):
            case "welcome":
                self._attempt = command.welcome.attempt
                self._goes_on = self._welcomed
            case "step_recorded":
                if command.step_recorded.step == self._unrecorded:
                    self._unrecorded = None
            case "idle":
                self._cause = command.idle.cause
            case "restart":
                raise AssertionError(f"the scheduler refuses the trainer's history: {command.restart.reason}")
        self._shell.touched[self.name] = self

    def deliver(self, group: DeliverGroup) -> None:
        """A group has arrived."""
        assert group.step == self._step, f"a group of step {group.step} in step {self._step}"
        self._inbox.append(group)
        self._shell.touched[self.name] = self

    def settle(self) -> None:
        """Go on, if what was waited for has come."""
        if not self.connected:
            return
        if self._goes_on is not None:
            goes_on, self._goes_on = self._goes_on, None
            goes_on()
        elif self._at_work:
            return
        elif self._after_record is not None:
            if self._unrecorded is None:
                goes_on, self._after_record = self._after_record, None
                goes_on()
        elif self._ready:
            self._work()

    # ---- the step story

    def _begin(self) -> None:
        """A new process, at its checkpoint."""
        self._step = self._checkpoint
        self._attempt = 0
        self._inbox.clear()
        self._gathered = []
        self._unrecorded = self._goes_on = self._after_record = None
        self._cause = "no_samples"
        self._at_work = self._ready = False
        self._told_waits = None

    def _welcomed(self) -> None:
        self._shell.tell(lambda core, _: core.credit(CREDIT_BYTES))
        self._copy(self._take_groups)

    def _take_groups(self) -> None:
        self._ready = self._step < self._steps
        if self._ready:
            self._work()
        else:
            self._wait("no_samples")

    def _work(self) -> None:
        """Everything that has come goes into the engine."""
        tokens = samples = paid_bytes = 0
        while self._inbox:
            group = self._inbox.popleft()
            self._gathered.append(group.group_id)
            lengths = self._shell.lengths.group(group.group_id)
            tokens += sum(lengths)
            samples += len(lengths)
            paid_bytes += group.size_bytes
        if paid_bytes:
            self._shell.tell(lambda core, _: core.credit(paid_bytes))
        work_s = tokens * self._spec.seconds_per_token + samples * self._spec.seconds_per_sample
        if len(self._gathered) >= self._batch_groups:
            self._during(_BUSY, work_s + self._spec.seconds_per_step, self._done, what=f"step {self._step}")
        elif work_s:
            self._during(_BUSY, work_s, self._work, what=f"step {self._step}")
        else:
            self._wait(self._cause)

    def _wait(self, cause: str) -> None:
        """There is nothing to compute."""
        self._enter(idle(cause))
        waits = (self._step, len(self._gathered))
        if waits != self._told_waits:
            self._told_waits = waits
            told = pb.TrainerWaits(step=self._step, groups=len(self._gathered))
            self._shell.tell(lambda core, _: core.trainer_waits(told))

    def _done(self) -> None:
        """The optimiser's step is taken."""
        self._ready = False
        self._enter(_WEIGHTS)
        self._after_record = self._say_done
        self._shell.touched[self.name] = self

    def _say_done(self) -> None:
        done = pb.StepDone(step=self._step, group_ids=self._gathered)
        self._unrecorded = self._step
        self._step += 1
        self._gathered = []
        self._cause = "no_samples"
        self._shell.tell(lambda core, _: core.step_done(done))
        self._copy(self._published)

    def _copy(self, then: Callable[[], None]) -> None:
        """Copy the weights, then publish them."""
        self._during(_WEIGHTS, self._spec.publish_seconds, partial(self._publish, then), what=f"publish {self._step}")

    def _publish(self, then: Callable[[], None]) -> None:
        name = pb.VersionName(attempt=self._attempt, step=self._step, hash=b"simulated")
        published = pb.Published(version=name, size_bytes=self._spec.weight_bytes)
        self._shell.tell(lambda core, _: core.published(published, address="trainer:1"))
        then()

    def _published(self) -> None:
        if self._step % self._spec.checkpoint_interval_steps and self._step != self._steps:
            self._take_groups()
            return
        seconds = self._spec.checkpoint_seconds
        self._during(_OTHER, seconds, self._save, what=f"checkpoint {self._step}")

    def _save(self) -> None:
        self._enter(_OTHER)
        self._after_record = self._saved
        self._shell.touched[self.name] = self

    def _saved(self) -> None:
        self._checkpoint = step = self._step
        done = pb.Checkpointed(step=step, path=f"step-{step}", exported=step == self._steps, oldest_step=step)
        self._shell.tell(lambda core, _: core.checkpointed(done))
        self._take_groups()

    # ---- time

    def _during(self, state: WallState, seconds: float, then: Callable[[], None], *, what: str) -> None:
        """In this state for so long, then go on."""
        self._enter(state)
        self._at_work = True
        self._shell.measures.took(self.name, what, seconds=seconds, begun_s=self._shell.timeline.now_s)
        life = self._lives
        self._shell.timeline.after(seconds, self._over, (life, then))

    def _over(self, what: tuple[int, Callable[[], None]]) -> None:
        life, then = what
        if life == self._lives:
            self._at_work = False
            then()

    def _enter(self, state: WallState) -> None:
        self.wall.enter(state, now_s=self._shell.timeline.now_s)
