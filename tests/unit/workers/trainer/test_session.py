"""The conversation with the scheduler, without a connection: credit, breaks, endings."""

import time
from collections.abc import Sequence

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.process.daemon_thread import begin_in_thread
from streamrl_workers.trainer.engines.engine import RetryError
from streamrl_workers.trainer.session import Session, StoppedError, TerminatedError
from support.trainer_groups import make_group

WINDOW_BYTES = 10_000


class Wire:
    """A session and all that it said."""

    def __init__(self, *, step: int = 0) -> None:
        identity = pb.TrainerHello(trainer_id="trainer-0", instance="i", weights_address="127.0.0.1:1")
        self.session = Session(identity, step=step, window_bytes=WINDOW_BYTES)
        self.said: list[pb.TrainerEvent] = []

    def connect(self, *, attempt: int = 1) -> pb.TrainerHello:
        hello = self.session.hello()
        self.get(welcome=pb.TrainerWelcome(attempt=attempt, batch_groups=2, lease_seconds=2.0))
        return hello

    def get(self, **command: object) -> None:
        self.session.received(pb.TrainerCommand(**command), send=self._send)

    def _send(self, events: Sequence[pb.TrainerEvent]) -> None:
        self.said += events

    def heard(self) -> list[str]:
        """Kinds of what was said since the last call."""
        kinds = [event.WhichOneof("event") for event in self.said]
        self.said.clear()
        return kinds


def test_a_new_trainer_says_hello_then_its_window():
    wire = Wire(step=3)
    hello = wire.connect()
    assert (hello.step, hello.checkpoint_step, list(hello.held_groups)) == (3, 3, [])
    assert not hello.HasField("unrecorded_step")
    assert wire.session.wait_welcome().batch_groups == 2
    assert [event.credit.bytes for event in wire.said] == [WINDOW_BYTES]


def test_credit_comes_back_when_a_group_is_taken():
    wire, group = Wire(), make_group(1)
    wire.connect()
    wire.said.clear()
    wire.get(group=group)
    assert wire.said == []
    assert [g.group_id for g in wire.session.poll()] == [1]
    assert [event.credit.bytes for event in wire.said] == [group.size_bytes]
    assert wire.session.poll() == []


def test_after_a_break_it_says_what_it_holds_and_takes_a_group_once():
    wire, waiting = Wire(), make_group(2)
    wire.connect()
    wire.get(group=make_group(1))
    wire.session.poll()
    wire.get(group=waiting)
    wire.session.disconnected()
    wire.said.clear()
    hello = wire.connect()
    assert list(hello.held_groups) == [1, 2]
    assert [event.credit.bytes for event in wire.said] == [WINDOW_BYTES - waiting.size_bytes]
    wire.get(group=waiting)  # again: its credit comes back at once
    assert [group.group_id for group in wire.session.poll()] == [2]
    assert [event.credit.bytes for event in wire.said[1:]] == [waiting.size_bytes, waiting.size_bytes]


def _waits(wire: Wire) -> list[tuple[int, int]]:
    found = [(event.waits.step, event.waits.groups) for event in wire.said if event.HasField("waits")]
    wire.said.clear()
    return found


def test_it_says_that_it_waits_with_what_it_has_taken():
    wire = Wire(step=2)
    wire.connect()
    wire.session.wait_change(seen_cause="no_samples", timeout_s=0.0)
    assert _waits(wire) == [(2, 0)]
    wire.get(group=make_group(1, step=2))
    wire.session.wait_change(seen_cause="no_samples", timeout_s=0.0)
    assert _waits(wire) == [], "a group is there"
    wire.session.poll()
    wire.session.wait_change(seen_cause="no_samples", timeout_s=0.0)
    assert _waits(wire) == [(2, 1)]
    wire.session.step_done(pb.StepDone(step=2, group_ids=[1]))
    wire.get(stop=pb.Stop(reason="the run has ended"))
    with pytest.raises(StoppedError):
        wire.session.wait_stop()
    assert _waits(wire) == [(3, 0)], "also behind its last step"


def test_a_new_scheduler_hears_that_it_waits():
    wire = Wire()
    wire.connect()
    with wire.session._telling_that_it_waits():
        wire.session.disconnected()
        wire.said.clear()
        wire.connect()
    assert _waits(wire) == [(0, 0)]
    wire.connect()
    assert _waits(wire) == [], "it computes"


def _do_step(wire: Wire, *, step: int) -> None:
    wire.get(group=make_group(10 + step, step=step))
    wire.session.poll()
    wire.session.step_done(pb.StepDone(step=step, group_ids=[10 + step]))


def test_a_step_whose_record_is_unknown_is_said_again():
    wire = Wire()
    wire.connect()
    _do_step(wire, step=0)
    wire.session.disconnected()
    hello = wire.connect()
    assert (hello.step, hello.unrecorded_step.step, list(hello.unrecorded_step.group_ids)) == (1, 0, [10])
    wire.get(step_recorded=pb.StepRecorded(step=0))
    wire.session.wait_recorded(1)
    wire.session.disconnected()
    assert not wire.connect().HasField("unrecorded_step")


def test_what_happened_between_hello_and_welcome_is_said_after_it():
    wire = Wire()
    wire.connect()
    wire.get(group=make_group(10))
    wire.session.poll()
    wire.session.disconnected()
    wire.said.clear()
    wire.session.hello()
    wire.session.step_done(pb.StepDone(step=0, group_ids=[10]))
    assert wire.said == []
    wire.get(welcome=pb.TrainerWelcome(attempt=1, batch_groups=2, lease_seconds=2.0))
    assert wire.heard() == ["credit", "step_done"]


def test_version_and_checkpoint_are_said_after_every_welcome():
    wire = Wire()
    wire.connect()
    wire.session.publish(pb.Published(version=pb.VersionName(attempt=1, step=0)))
    wire.session.checkpointed(pb.Checkpointed(step=0, path="checkpoints/step-00000000", exported=True))
    wire.session.disconnected()
    wire.heard()
    wire.connect()
    assert wire.heard() == ["credit", "published", "checkpointed"]


def test_a_scheduler_that_takes_it_for_another_attempt_ends_it():
    wire = Wire()
    wire.connect()
    wire.connect(attempt=2)
    with pytest.raises(RetryError, match="attempt 2, it is 1"):
        wire.session.poll()


def test_a_group_of_another_step_ends_it():
    wire = Wire()
    wire.connect()
    wire.get(group=make_group(1, step=5))
    with pytest.raises(RetryError, match="group 1 of step 5 while doing step 0"):
        wire.session.poll()


@pytest.mark.parametrize(
    ("command", "error"),
    [({"stop": pb.Stop(reason="done")}, StoppedError), ({"restart": pb.Restart(reason="mismatch")}, RetryError)],
)
def test_stop_and_restart_end_every_wait(command, error):
    wire = Wire()
    wire.connect()
    _do_step(wire, step=0)
    wire.get(**command)
    for wait in (wire.session.poll, wire.session.wait_stop, lambda: wire.session.wait_recorded(1)):
        with pytest.raises(error):
            wait()


def test_asked_to_end_it_takes_no_more_groups_but_still_syncs_the_journal():
    wire = Wire()
    wire.connect()
    _do_step(wire, step=0)
    wire.session.terminate()
    with pytest.raises(TerminatedError):
        wire.session.poll()
    wire.get(step_recorded=pb.StepRecorded(step=0))
    wire.session.wait_recorded(1)


class Journal(Wire):
    """It is brought to the disk by another thread."""

    def _send(self, events: Sequence[pb.TrainerEvent]) -> None:
        for event in events:
            if event.HasField("sync_journal"):
                synced = pb.JournalSynced(step=event.sync_journal.step)
                begin_in_thread(lambda synced=synced: self.get(journal_synced=synced), name="journal")


def test_a_checkpoint_that_was_written_long_after_sigterm_still_gets_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire, clock_s = Journal(), time.monotonic
    wire.connect()
    _do_step(wire, step=0)
    wire.get(step_recorded=pb.StepRecorded(step=0))
    wire.session.terminate()
    monkeypatch.setattr(time, "monotonic", lambda: clock_s() + 60.0)
    wire.session.sync_journal(1)


def test_the_idle_cause_is_known_and_a_break_is_no_idleness():
    wire = Wire()
    assert wire.session.idle_cause == "disconnected"
    wire.connect()
    assert wire.session.idle_cause == "no_samples"
    wire.get(idle=pb.Idle(cause="due_group"))
    assert wire.session.idle_cause == "due_group"
    wire.get(group=make_group(1))
    assert wire.session.idle_cause == "no_samples"


def test_the_first_ending_counts():
    wire = Wire()
    wire.session.end(StoppedError("first"))
    wire.session.end(RetryError("second"))
    with pytest.raises(StoppedError, match="first"):
        wire.session.wait_stop()


def test_held_out_rows_may_come_before_they_are_waited_for_and_after_a_break():
    wire = Wire()
    rows = [pb.Sample(group_id=number) for number in range(2)]
    welcome = pb.TrainerWelcome(attempt=1, batch_groups=2, held_out_samples=2)
    wire.get(welcome=welcome)
    wire.session.disconnected()
    wire.get(welcome=welcome)
    wire.get(held_out=pb.HeldOut(samples=rows))
    assert list(wire.session.wait_held_out()) == rows


def test_the_wait_for_held_out_rows_ends_with_the_session():
    wire = Wire()
    wire.get(welcome=pb.TrainerWelcome(attempt=1, batch_groups=2, held_out_samples=2))
    wire.session.terminate()
    with pytest.raises(TerminatedError):
        wire.session.wait_held_out()
    assert list(_no_rows().wait_held_out()) == []


def _no_rows() -> Session:
    wire = Wire()
    wire.connect()
    return wire.session
