"""The step loop with a real session, engine and disk, and a scheduler that gives a group whenever it is waited for."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec
from streamrl_cli.replaying.history import HistoryStep
from streamrl_cli.replaying.retrain import retrain
from streamrl_workers.metrics.bubbles import Recorder
from streamrl_workers.scheduler.journal.sample_store import StoredGroup
from streamrl_workers.stream.digests import History
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.checkpoint import CheckpointStore
from streamrl_workers.trainer.engines.process_group import SingleRank
from streamrl_workers.trainer.engines.rank_link import Payload
from streamrl_workers.trainer.engines.torch_engine import TorchEngine
from streamrl_workers.trainer.session import Session
from streamrl_workers.trainer.step_loop import StepLoop
from streamrl_workers.weights.store import WeightStore
from support.tiny_trainer import tiny_engine, tiny_worker
from support.trainer_groups import make_group, trainer_spec

BATCH, STEPS = 4, 3
ANSWERS = {
    "step_done": lambda event: {"step_recorded": pb.StepRecorded(step=event.step_done.step)},
    "sync_journal": lambda event: {"journal_synced": pb.JournalSynced(step=event.sync_journal.step)},
    "checkpointed": lambda event: {"stop": pb.Stop(reason="done")} if event.checkpointed.exported else {},
}


class LateGroups(Session):
    """No group is there before the trainer waits for one: the first look of each step finds none."""

    def __init__(self) -> None:
        super().__init__(pb.TrainerHello(trainer_id="trainer-0", instance="i"), step=0, window_bytes=2**20)
        self.done: list[pb.StepDone] = []
        self.groups = [make_group(number, step=number // BATCH) for number in range(STEPS * BATCH)]
        self._late = iter(self.groups)
        self.tell(welcome=pb.TrainerWelcome(attempt=1, batch_groups=BATCH))

    def tell(self, **command: object) -> None:
        self.received(pb.TrainerCommand(**command), send=self._answer)

    def _answer(self, events: Sequence[pb.TrainerEvent]) -> None:
        self.done += [event.step_done for event in events if event.HasField("step_done")]
        for event in events:
            if answer := ANSWERS.get(event.WhichOneof("event"), lambda _: {})(event):
                self.tell(**answer)

    def wait_change(self, *, seen_cause: str, timeout_s: float) -> None:
        self.tell(group=next(self._late))
        super().wait_change(seen_cause=seen_cause, timeout_s=timeout_s)


def recorded(session: LateGroups) -> Iterator[HistoryStep]:
    """As the archive would tell it."""
    groups = {group.group_id: group for group in session.groups}
    for done in session.done:
        taken = [
            StoredGroup(
                head=pb.ArchivedGroup(group_id=number, samples=[pb.ArchivedSample()] * len(groups[number].samples)),
                source=pb.ArchivedSamples(samples=groups[number].samples),
            )
            for number in done.group_ids
        ]
        yield HistoryStep(
            step=done.step,
            attempt=1,
            groups=tuple(taken),
            micro_steps=tuple(done.micro_steps),
            cuts=done.cuts,
            version_hash=done.version_hash,
        )


def _run(engine: TorchEngine, *, session: LateGroups, folder: Path) -> None:
    StepLoop(
        engine=engine,
        session=session,
        checkpoints=CheckpointStore(folder / "checkpoints", keep_last=1),
        weights=WeightStore(newest_kept=1),
        recorder=Recorder(sink=None, metrics=None),
        history=History(),
        steps=STEPS,
        checkpoint_interval_steps=STEPS,
        evaluation_interval_steps=STEPS,
        store_dir=folder,
    ).run()


def test_replayed_groups_are_prepared_from_the_steps_first_group_on(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    job = trainer_spec(
        steps=STEPS,
        rule="trajectoryBalance",
        algorithm={"beta": 0.5, "replay": {"sharePercent": 50}},
        microBatchTokens=128,  # a replayed group has more than a quarter, with which an idle trainer begins
    )
    session = LateGroups()
    _run(tiny_engine(job), session=session, folder=tmp_path)
    assert [done.metrics["replayed_groups"] for done in session.done] == [0, BATCH, BATCH]
    assert all(1 in done.micro_steps and 0 not in done.micro_steps for done in session.done)
    versions = list(retrain(tiny_engine(job), list(recorded(session))))
    assert versions[:-1] == [done.version_hash for done in session.done]


class Pair:
    """Two ranks that do not talk to each other: what rank 0 publishes follows from its own micro-batches."""

    size = 2

    def __init__(self, spec: RLJobSpec) -> None:
        self._ranks = [SingleRank(tiny_worker(spec)) for _ in range(self.size)]

    def call(self, method: str, payloads: Sequence[Payload]) -> list[Payload]:
        return [rank.call(method, [payload])[0] for rank, payload in zip(self._ranks, payloads, strict=True)]

    def begin(self, method: str, payloads: Sequence[Payload]) -> Future[list[Payload]]:
        return self._ranks[0].begin(method, payloads[:1])


def test_a_replay_takes_the_micro_steps_of_several_ranks(tmp_path: Path) -> None:
    """Where uneven rounds wait, a micro-step leaves samples behind, and an idle trainer takes them with the next groups."""
    torch.set_num_threads(1)
    job = trainer_spec(steps=STEPS, microBatchTokens=32)

    def engine() -> TorchEngine:
        return TorchEngine(Pair(job), spec=job, algorithm=create_algorithm(job))

    session = LateGroups()
    _run(engine(), session=session, folder=tmp_path)
    assert all(done.micro_steps for done in session.done)
    assert all(list(done.micro_steps) == sorted(set(done.micro_steps)) for done in session.done)
    versions = list(retrain(engine(), list(recorded(session))))
    assert versions[:-1] == [done.version_hash for done in session.done]


def test_passes_of_the_held_out_loss_are_no_part_of_the_step_s_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    job = trainer_spec(steps=STEPS)
    session, engine, calls = LateGroups(), tiny_engine(job), []
    session.tell(welcome=pb.TrainerWelcome(attempt=1, batch_groups=BATCH, held_out_samples=1))
    session.tell(held_out=pb.HeldOut(samples=make_group(99).samples[:1]))
    throughput, held_out_loss = engine.throughput, engine.held_out_loss
    monkeypatch.setattr(engine, "throughput", lambda: calls.append("times") or throughput())
    monkeypatch.setattr(engine, "held_out_loss", lambda samples: calls.append("loss") or held_out_loss(samples))
    _run(engine, session=session, folder=tmp_path)
    assert calls == ["loss", *["times"] * STEPS, "loss"]
