"""Checkpoints beside the training: what a step waits for, when the scheduler hears of one, how it ends."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.training import SimulatedTrainer
from streamrl_workers.metrics.bubbles import Recorder
from streamrl_workers.process.daemon_thread import begin_in_thread
from streamrl_workers.stream.digests import History
from streamrl_workers.trainer.checkpoint import CheckpointStore
from streamrl_workers.trainer.engines.engine import FileHashes
from streamrl_workers.trainer.engines.simulated import SimulatedTrainEngine
from streamrl_workers.trainer.session import Session
from streamrl_workers.trainer.step_loop import StepLoop
from streamrl_workers.weights.store import WeightStore
from support.trainer_groups import make_group

STEPS, INTERVAL = 3, 2


class Scheduler(Session):
    """A session whose scheduler answers at once, and gives a group when one is waited for."""

    def __init__(self) -> None:
        super().__init__(pb.TrainerHello(trainer_id="trainer-0", instance="i"), step=0, window_bytes=2**20)
        self.said: list[str] = []
        self.then: dict[str, Callable[[], None]] = {}
        """What happens when something was said, or is about to be."""
        self._groups = iter(make_group(number, step=number) for number in range(STEPS))
        self._tell(welcome=pb.TrainerWelcome(attempt=1, batch_groups=1))

    def _tell(self, **command: object) -> None:
        self.received(pb.TrainerCommand(**command), send=self._answer)

    def _answer(self, events: Sequence[pb.TrainerEvent]) -> None:
        for event in events:
            if event.HasField("step_done"):
                self._say(f"step {event.step_done.step}")
                self._tell(step_recorded=pb.StepRecorded(step=event.step_done.step))
            elif event.HasField("sync_journal"):
                self._tell(journal_synced=pb.JournalSynced(step=event.sync_journal.step))
            elif event.HasField("checkpointed"):
                self._say(f"checkpoint {event.checkpointed.step}{' model' * event.checkpointed.exported}")
                if event.checkpointed.exported:
                    self._tell(stop=pb.Stop(reason="done"))

    def _say(self, text: str) -> None:
        self.said.append(text)
        self.then.get(text, lambda: None)()

    def wait_change(self, *, seen_cause: str, timeout_s: float) -> None:
        group = next(self._groups)
        self.then.get(f"group {group.step}", lambda: None)()
        self._tell(group=group)


class SlowDisk(SimulatedTrainEngine):
    """Its first checkpoint is on the disk when `written` is set."""

    def __init__(self) -> None:
        super().__init__(spec=SimulatedTrainer(secondsPerStep=0), seed=0)
        self.written: Future[FileHashes] = Future()

    def save(self, directory: Path) -> "Future[FileHashes]":
        done = super().save(directory)
        return done if self.written.done() else self.written


def _loop(folder: Path, *, session: Scheduler, engine: SlowDisk) -> StepLoop:
    return StepLoop(
        engine=engine,
        session=session,
        checkpoints=CheckpointStore(folder / "checkpoints", keep_last=2),
        weights=WeightStore(newest_kept=1),
        recorder=Recorder(sink=None, metrics=None),
        history=History(),
        steps=STEPS,
        checkpoint_interval_steps=INTERVAL,
        evaluation_interval_steps=STEPS,
        store_dir=folder,
    )


def test_the_next_step_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    session, engine = Scheduler(), SlowDisk()
    session.then["step 2"] = lambda: engine.written.set_result({})
    _loop(tmp_path, session=session, engine=engine).run()
    assert session.said == ["step 0", "step 1", "step 2", "checkpoint 2", "checkpoint 3", "checkpoint 3 model"]
    assert CheckpointStore(tmp_path / "checkpoints", keep_last=2).newest().meta.step == STEPS


def test_a_trainer_asked_to_end_waits_for_the_checkpoint_under_way(tmp_path: Path) -> None:
    session, engine = Scheduler(), SlowDisk()

    def terminate() -> None:
        session.terminate()
        begin_in_thread(lambda: engine.written.set_result({}), name="the-disk")

    session.then["group 2"] = terminate
    _loop(tmp_path, session=session, engine=engine).run()
    assert session.said == ["step 0", "step 1", "checkpoint 2"]


@pytest.mark.parametrize("terminated", [False, True])
def test_a_full_disk_ends_the_run_with_its_line(tmp_path: Path, *, terminated: bool) -> None:
    session, engine = Scheduler(), SlowDisk()

    def fill() -> None:
        if terminated:
            session.terminate()
        engine.written.set_exception(OSError(28, "No space left on device"))

    session.then["group 2"] = fill
    with pytest.raises(UserError, match="a checkpoint cannot be written: No space left on device; free the disk"):
        _loop(tmp_path, session=session, engine=engine).run()
    assert session.said[:2] == ["step 0", "step 1"]
    assert "checkpoint 2" not in session.said
