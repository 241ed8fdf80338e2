"""Modes, dynamic sampling and generators that leave, by the core's answers."""

import pytest

from streamrl_workers.scheduler import records as rec
from support.core_events import Always, end_samples, joined, read_inbox, token, world
from support.core_world import World


def finish_one_by_one(run: World) -> list[int]:
    """Samples end one after the other; groups with the trainer after each."""
    delivered = []
    generator = run.generators["g0"]
    for lease in list(generator.active):
        run.make_token(generator, lease, finish="stop")
        while run.scores:
            run.score(fail=False)
        run.commit(100)
        delivered.append(run.core.view().delivered_groups)
    return delivered


@pytest.mark.parametrize(("whole_batches", "delivered"), [(False, [0, 1, 1, 2, 2, 3]), (True, [0, 0, 0, 0, 0, 3])])
def test_whole_batches_are_delivered_at_once(whole_batches, delivered):
    run = world(slots=12, staleness=0, whole_batches=whole_batches)
    assert finish_one_by_one(run) == delivered


@pytest.mark.parametrize(
    ("demands", "trainer", "generator"),
    [
        ({"whole_batches": True, "colocated": True}, "phase", "phase"),
        ({"whole_batches": True}, "no_samples", "staleness"),
        ({}, "no_samples", "staleness"),
    ],
)
def test_who_takes_turns_waits_for_its_turn(demands, trainer, generator):
    run = joined(slots=12, staleness=0, **demands)
    for _ in range(6):
        run.progress_some(Always(), pace=1.0, finish=0.0)
    assert run.trainer.idle == trainer
    assert run.core.view().fleet.idle[generator] == 1
    assert run.generators["g0"].idle == generator


@pytest.mark.parametrize("whole_batches", [True, False])
def test_what_only_lacks_its_rewards_is_waited_for_under_scoring(whole_batches):
    run = world(slots=12, staleness=0, whole_batches=whole_batches)
    generator, causes = run.generators["g0"], []
    for lease in list(generator.active):
        causes.append(run.trainer.idle)
        run.make_token(generator, lease, finish="stop")
        while run.trainer.inbox:
            run.deliver_trainer()
    read_inbox(run)
    assert "no_samples" in causes
    assert (run.trainer.idle, generator.idle) == ("scoring", "scoring")
    while run.scores:
        run.score(fail=False)
    run.commit(100)
    while run.trainer.inbox:
        run.deliver_trainer()
    read_inbox(run)
    assert generator.idle == "staleness", "the trainer has its batch: it computes"


def test_a_generator_with_slots_left_is_told_why_behind_what_it_gets():
    run = joined(slots=12, staleness=0)
    told = []
    while not told or told[-1][0] != "idle" or told[-1][1] != "staleness":
        generator = run.generators["g0"]
        for command in generator.inbox:
            kind = command.WhichOneof("command")
            told.append((kind, command.idle.cause if kind == "idle" else ""))
        assert run.progress_once(), told
    kinds = [kind for kind, _ in told if kind in ("issue", "idle")]
    assert kinds[-2:] == ["issue", "idle"], "the generator forgets a cause when it gets something"


def test_a_batch_larger_than_the_credit_goes_on_once_it_has_begun():
    run = world(slots=12, staleness=0, whole_batches=True)
    run.start_trainer(credit=150)
    run.commit(10)
    run.pay = lambda: None
    for _ in range(6):
        run.progress_some(Always(), pace=1.0, finish=1.0)
    assert run.core.view().delivered_groups == 1
    del run.pay
    run.run_out()


def test_groups_with_equal_rewards_are_dropped_until_the_draws_are_used_up():
    run = world(slots=12, staleness=0, draws_per_step=3)
    run.reward = lambda group_id, sample_index: 0.0
    run.run_out()
    run.commit(1000)
    assert not run.failed, "16 drops in a row of other groups would end the run"
    dropped = [record.reason for record in run.durable if isinstance(record, rec.Dropped)]
    assert dropped == ["zero_variance"] * (2 * run.job.batch_groups * run.job.steps)
    assert run.core.last_step.dropped_groups == {"zero_variance": 2 * run.job.batch_groups}


def test_a_dropped_group_makes_room_for_another():
    run = world(slots=4, draws_per_step=2, staleness=0, batch_groups=2)
    planned = sum(isinstance(record, rec.Planned) for record in run.durable)
    run.reward = lambda group_id, sample_index: 0.0
    end_samples(run)
    run.commit(100)
    assert planned == 2
    assert sum(isinstance(record, rec.Planned) for record in run.durable) == 4
    assert run.core.view().dropped_groups == {"zero_variance": 2}


def test_a_generator_that_leaves_gets_nothing_more_and_is_not_free():
    run = world(generators=2, slots=4)
    leases = list(run.generators["g0"].active)
    run.leave_generator("g0")
    view = run.core.view()
    assert (view.fleet.generators, view.fleet.leaving, view.fleet.slots, view.fleet.active) == (2, 1, 4, 8)
    for lease in leases:
        run.make_token(run.generators["g0"], lease, finish="stop")
    assert run.core.view().fleet.active == 4
    assert not any(command.HasField("issue") for command in run.generators["g0"].inbox)
    assert not run.finish_leaving("g0"), "the scheduler's last issue may still be on its way"
    read_inbox(run)
    assert run.finish_leaving("g0")
    assert run.core.view().reissued_samples == 0


def test_what_a_leaving_generator_still_holds_is_issued_again():
    run = world(generators=2, slots=4)
    lease = next(iter(run.generators["g0"].active))
    run.do(run.core.generator_progress("g0", items=[token(lease, count=2)], now_s=0.0))
    run.leave_generator("g0")
    run.kill_generator("g0")
    for held in list(run.generators["g1"].active):
        run.make_token(run.generators["g1"], held, finish="stop")
    again = [r for command in run.generators["g1"].inbox for r in command.issue.items]
    assert b"\1\0\0\0" * 2 in {request.prefix_tokens for request in again}
    assert run.core.view().reissued_samples == len(again) == 4
