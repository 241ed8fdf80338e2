"""The trainer's side of the world around the core: what it does and says, driven by hand. Checks invariants 1 and 2 at each step."""

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import records as rec
from support.core_peers import SimTrainer
from support.core_rows import check_held_out, is_of_row
from support.turns import check_trajectory, states_of


class TrainerSide:
    """Part of `World`."""

    def start_trainer(self, *, credit: int = 1_000_000) -> None:
        """A new process, from the newest checkpoint."""
        self.instances += 1
        self.trainer = SimTrainer(f"t{self.instances}", self.checkpoint, credit=credit)
        self.join_trainer()

    def join_trainer(self) -> None:
        trainer = self.trainer
        trainer.connected, trainer.welcomed, trainer.said = True, False, None
        trainer.inbox.clear()
        hello = pb.TrainerHello(
            trainer_id="trainer-0",
            instance=trainer.instance,
            step=trainer.step,
            held_groups=list(trainer.held),
            unrecorded_step=trainer.unrecorded,
            weights_address="h:1",
            checkpoint_step=self.checkpoint,
        )
        self.do(self.core.trainer_joined(hello))

    def deliver_trainer(self) -> None:
        trainer = self.trainer
        command = trainer.inbox.popleft()
        match command.WhichOneof("command"):
            case "welcome":
                trainer.attempt, trainer.welcomed, trainer.owed = command.welcome.attempt, True, 0
                assert command.welcome.batch_groups == self.job.batch_groups
                self.do(self.core.credit(trainer.credit))
                self.publish()
            case "group":
                assert command.group.step == trainer.step
                assert command.group.group_id not in trainer.held
                trainer.held[command.group.group_id] = command.group
                trainer.owed += command.group.size_bytes
            case "step_recorded":
                if trainer.unrecorded is not None and command.step_recorded.step == trainer.unrecorded.step:
                    trainer.unrecorded = None
            case "held_out":
                trainer.held_out = check_held_out(command.held_out.samples, job=self.job)
            case "idle":
                trainer.idle = command.idle.cause
            case "restart":
                raise AssertionError(f"restart: {command.restart.reason}")

    def pay(self) -> None:
        """The trainer has room again for what it has taken."""
        paid, self.trainer.owed = self.trainer.owed, 0
        self.do(self.core.credit(paid))

    def can_wait(self) -> bool:
        """Whether the trainer has nothing to compute and has not said so."""
        trainer = self.trainer
        ready = trainer is not None and trainer.connected and trainer.welcomed and not trainer.coming
        return ready and len(trainer.held) < self.job.batch_groups and trainer.said != (trainer.step, len(trainer.held))

    def say_it_waits(self) -> None:
        trainer = self.trainer
        trainer.said = (trainer.step, len(trainer.held))
        self.do(self.core.trainer_waits(pb.TrainerWaits(step=trainer.step, groups=len(trainer.held))))

    def publish(self) -> None:
        name = pb.VersionName(attempt=self.trainer.attempt, step=self.trainer.step, hash=b"h")
        self.do(self.core.published(pb.Published(version=name, size_bytes=1), address="h:1"))

    def take_step(self) -> None:
        trainer = self.trainer
        done = pb.StepDone(step=trainer.step, group_ids=[*trainer.held], states=states_of(trainer.held, job=self.job))
        self.check_step(trainer.step, list(trainer.held.values()))
        trainer.unrecorded = done
        trainer.held = {}
        trainer.step += 1
        self.do(self.core.step_done(done))
        self.publish()

    def check_step(self, step: int, groups: list[pb.Group]) -> None:
        """Invariants 1 and 2, from what the trainer really got."""
        ids = tuple(sorted(group.group_id for group in groups))
        recorded = [tuple(sorted(r.group_ids)) for r in self.durable if isinstance(r, rec.StepTaken) and r.step == step]
        assert all(ids == before for before in recorded), "a step was repeated with other groups"
        numbers = [group.group_id for group in groups]
        left = {group.group_id for group in self.core._groups if not group.recorded}
        in_order = numbers == sorted(numbers) and all(number in numbers for number in left if number < numbers[-1])
        assert in_order or not self.job.delivery.by_number, "what is behind none of them is in a step or dropped"
        others = {g for s, taken in self.history.items() if s < step for g in taken}
        assert not others & set(ids), "a group is in two steps"
        self.history = {s: taken for s, taken in self.history.items() if s < step} | {step: ids}
        for group in groups:
            assert len(group.samples) == self.job.group_size
            for trajectory in group.samples:
                check_trajectory(trajectory, job=self.job, ours=self.ours and not self.job.extensions.supervised)
                assert not self.job.extensions.supervised or is_of_row(trajectory, group.group_id)
            first = min(trajectory.spans[0].step for trajectory in group.samples)
            assert step - first <= self.job.staleness
            self.staleness_seen.add(step - first)

    def write_checkpoint(self) -> None:
        """Journal first, then the file, then the word to the scheduler."""
        trainer = self.trainer
        self.checkpoint = trainer.step
        exported = trainer.step >= self.job.steps
        done = pb.Checkpointed(
            step=trainer.step, path=f"step-{trainer.step}", exported=exported, oldest_step=trainer.step
        )
        self.do(self.core.checkpointed(done))

    def can_take_step(self) -> bool:
        trainer = self.trainer
        ready = trainer is not None and trainer.connected and trainer.welcomed and trainer.unrecorded is None
        return ready and len(trainer.held) == self.job.batch_groups

    def can_checkpoint(self) -> bool:
        trainer = self.trainer
        ready = trainer is not None and trainer.connected and trainer.welcomed and trainer.unrecorded is None
        recorded = ready and trainer.step <= self.core.view().step and not trainer.held
        return recorded and (trainer.step > self.checkpoint or trainer.step >= self.job.steps)
