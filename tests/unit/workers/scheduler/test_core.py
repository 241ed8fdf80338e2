"""The core's answers to single events, through its public methods."""

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler import rollout
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.dispatch.order import IN_ORDER
from streamrl_workers.scheduler.lengths import LengthHistory, Lengths
from streamrl_workers.scheduler.model import Group, GroupPrompt, GroupState, GroupTable, ScoredGroup, Window
from streamrl_workers.scheduler.planning import PromptGroups, WaitingGroups
from streamrl_workers.scheduler.records import Recovered
from streamrl_workers.scheduler.settings import TaskSettings
from streamrl_workers.stream.packing import pack_int32
from streamrl_workers.tasks.values import Reference, Score
from support.core_events import Always, commands, end_samples, issued, joined, read_inbox, token, world
from support.core_peers import is_evaluation
from support.core_world import World, settings
from support.replayed import replay


def test_a_groups_samples_stay_together_and_load_is_even():
    run = world(generators=3, slots=4)
    groups = [[request.group_id for request in g.active.values()] for g in run.generators.values()]
    assert sorted(map(len, groups)) == [4, 4, 4]
    assert all(ids.count(group_id) == 2 for ids in groups for group_id in ids)


def test_a_dead_generators_samples_go_on_from_their_tokens():
    run = world(slots=12)
    lease, request = next(iter(run.generators["g0"].active.items()))
    had = run.core.generator_progress("g0", items=[token(lease, count=2)], now_s=0.0)
    assert issued(had) == []
    run.do(run.core.generator_left("g0"))
    info = pb.GeneratorHello(
        generator_id="g9", instance="x", pool="p", slots=12, version=pb.VersionName(step=0, attempt=1)
    )
    again = issued([*run.core.generator_joined(info, now_s=0.0), *run.core.resume()])
    (resumed,) = [r for r in again if (r.group_id, r.sample_index) == (request.group_id, request.sample_index)]
    assert resumed.lease != lease
    assert resumed.seed == request.seed
    assert resumed.prefix_tokens.endswith(b"\1\0\0\0" * 2)
    assert run.core.view().reissued_samples >= 1


def test_a_silent_generator_loses_its_samples_and_late_words_are_ignored():
    run = world(generators=2, slots=4)
    lease = next(iter(run.generators["g0"].active))
    late_s = run.job.lease_s + 1
    run.core.generator_alive("g1", now_s=late_s)
    effects = run.core.tick(late_s)
    (cancel,) = commands(effects, "cancel")
    assert set(cancel.leases) == set(run.generators["g0"].active)
    before = run.core.view().ignored_progress
    effects = run.core.generator_progress("g0", items=[token(lease)], now_s=late_s)
    assert run.core.view().ignored_progress == before + 1
    assert lease in {number for batch in commands(effects, "cancel") for number in batch.leases}
    assert lease not in {request.lease for request in issued(effects)}
    assert issued(effects), "it speaks again, so it gets samples again"


@pytest.mark.parametrize(
    "item",
    [
        pb.Progress(tokens=bytes(8), logprobs=bytes(4), spans=[pb.VersionSpan(tokens=2)]),
        pb.Progress(tokens=bytes(4), logprobs=bytes(4)),
        pb.Progress(tokens=bytes(4), logprobs=bytes(4), spans=[pb.VersionSpan(tokens=1, step=7)]),
        pb.Progress(
            tokens=bytes(8), logprobs=bytes(8), spans=[pb.VersionSpan(tokens=1), pb.VersionSpan(tokens=1, step=7)]
        ),
        pb.Progress(tokens=bytes(4), logprobs=bytes(4), spans=[pb.VersionSpan(tokens=1), pb.VersionSpan()]),
        pb.Progress(tokens=b"\xff" * 4, logprobs=bytes(4), spans=[pb.VersionSpan(tokens=1)]),
        pb.Progress(tokens=bytes(4), logprobs=b"\xff" * 4, spans=[pb.VersionSpan(tokens=1)]),
        pb.Progress(prompt_tokens=b"123"),
        pb.Progress(finish_reason="bored"),
        pb.Progress(tokens=bytes(1000), logprobs=bytes(1000), spans=[pb.VersionSpan(tokens=250)]),
    ],
    ids=[
        *(
            "log-prob missing",
            "version missing",
            "version unknown",
            "a later version unknown",
            "version without a token",
        ),
        *("negative token", "log-prob not a number", "odd prompt", "unknown end", "more than maxTokens"),
    ],
)
def test_unsound_progress_is_not_believed(item):
    run = joined(slots=12)
    requests = _first_requests(run)
    item.lease = requests[0].lease
    effects = run.core.generator_progress("g0", items=[item], now_s=0.0)
    assert requests[0].lease in commands(effects, "cancel")[0].leases
    assert any(r.sample_index == requests[0].sample_index for r in issued(effects))


def _first_requests(run: World) -> list[pb.SampleRequest]:
    run.commit(len(run.unsynced))
    while run.prompts:
        run.deliver_prompts()
    run.trainer.inbox.clear()
    name = pb.VersionName(attempt=1, step=0)
    run.core.published(pb.Published(version=name), address="h:1")
    return issued([*run.core.weights_loaded("g0", version=name, now_s=0.0), *run.core.resume()])


def test_a_group_is_handed_over_only_when_it_is_durable():
    run = world(slots=12)
    run.commit(len(run.unsynced))
    end_samples(run)
    assert run.core.view().groups_by_state["delivered"] == 0
    run.commit(1)
    assert run.core.view().groups_by_state["delivered"] == 1
    run.commit(100)
    assert run.core.view().groups_by_state["delivered"] == run.job.batch_groups


def test_credit_bounds_what_is_handed_over():
    run = joined(slots=12, credit=150)
    run.pay = lambda: None
    for _ in range(6):
        run.progress_some(Always(), pace=1.0, finish=1.0)
    assert run.core.view().delivered_groups == 1
    del run.pay
    run.run_out()


def test_weights_that_failed_are_announced_again_at_the_next_tick():
    run = joined(slots=4)
    run.commit(10)
    run.deliver_trainer()
    generator = run.generators["g0"]
    read_inbox(run)
    assert commands(run.core.tick(0.1), "weights") == []
    run.fail_weights(generator)
    (weights,) = commands(run.core.tick(0.2), "weights")
    assert (weights.version.step, weights.address) == (0, "h:1")


def test_no_generator_is_told_a_version_with_a_lower_number_than_it_may_still_load():
    run = world(slots=12)
    generator = run.generators["g0"]
    while run.core.view().announced_step != 1:
        end_samples(run)
        run.commit(100)
        while generator.inbox and run.core.view().announced_step != 1:
            run.deliver_generator(generator)
        while run.trainer.inbox:
            run.deliver_trainer()
        if run.can_take_step():
            run.take_step()
    run.start_trainer()
    run.commit(100)
    run.deliver_trainer()
    told = [command.weights.version for command in generator.inbox if command.WhichOneof("command") == "weights"]
    assert [(version.attempt, version.step) for version in told] == [(1, 1)]
    retold = run.core.weights_failed("g0", version=told[0], now_s=0.0)
    (again,) = commands(retold, "weights")
    assert (again.version.attempt, again.version.step) == (2, 0)


def test_an_evaluation_tells_greedy_and_sampled_answers_apart():
    """Greedy answers get 1, the first sampled ones 0 (one of them fails), the second 0.5."""
    run = World(settings(evaluation_prompts=2, evaluation_sampled=2), slots=(6,))
    run.reward = lambda _, sample_index: (1.0, 0.0, 0.5)[sample_index]
    run.start_trainer()
    run.join_generator("g0")
    while len(run.generators["g0"].active) < 6:
        run.progress_some(Always(), pace=1.0, finish=0.0)
    requests = list(run.generators["g0"].active.values())
    assert all(map(is_evaluation, requests))
    asked = [(request.sample_index, request.sampling.temperature) for request in requests]
    assert asked == [(0, 0.0)] * 2 + [(1, 1.0)] * 2 + [(2, 1.0)] * 2
    assert len({request.seed for request in requests}) == 6
    for request in requests:
        run.make_token(run.generators["g0"], request.lease, finish="stop")
    while run.scores:
        run.score(fail=run.scores[0].sample_index == 1 and run.scores[0].prompt_index == 1)
    run.commit(10)
    expected = rec.Evaluated(step=0, mean_reward=1.0, sampled_reward=1 / 3, prompts=2, failed=0, mean_tokens=2.0)
    assert run.core.last_evaluation == expected


def test_evaluation_goes_first_and_holds_the_next_version_back():
    run = joined(slots=8, evaluation_prompts=2)
    for _ in range(3):
        run.progress_some(Always(), pace=1.0, finish=0.0)
    requests = list(run.generators["g0"].active.values())
    assert [is_evaluation(request) for request in requests] == [True] * 2 + [False] * 6
    assert requests[0].sampling.temperature == 0.0
    for _ in range(20):
        held = [lease for lease, request in run.generators["g0"].active.items() if not is_evaluation(request)]
        for lease in held:
            run.make_token(run.generators["g0"], lease, finish="stop")
        if run.scores:
            run.score(fail=False)
        run.commit(10)
        while run.trainer.inbox:
            run.deliver_trainer()
        read_inbox(run)
        if run.can_take_step():
            run.take_step()
    view = run.core.view()
    assert (view.step, view.announced_step, view.evaluating_step) == (2, 0, 0)
    run.do(run.core.tick(0.0))
    run.do(run.core.tick(1.0))
    run.core.generator_alive("g0", now_s=1.0 + 10 * run.job.lease_s)
    run.do(run.core.tick(2.0 + 10 * run.job.lease_s))
    run.commit(10)
    assert run.core.last_evaluation == rec.Evaluated(step=0, mean_reward=None, prompts=2, failed=2, mean_tokens=0.0)
    assert run.core.view().announced_step == 2


def test_a_group_without_rewards_is_dropped_and_another_planned():
    run = world(slots=2)
    for lease in list(run.generators["g0"].active):
        run.make_token(run.generators["g0"], lease, finish="stop")
    planned = {r.group_id for r in [w.record for w in run.unsynced] + run.durable if isinstance(r, rec.Planned)}
    run.score(fail=True)
    run.score(fail=False)
    records = run.durable + [write.record for write in run.unsynced]
    assert [r.reason for r in records if isinstance(r, rec.Dropped)] == ["reward_failed"]
    assert {r.group_id for r in records if isinstance(r, rec.Planned)} - planned


def test_a_run_in_which_nothing_can_be_used_ends_with_the_reason():
    run = world(
        slots=12, draws_per_step=2
    )  # group 1 has equal rewards and is dropped for that: no reason to end the run
    for _ in range(20):
        for lease in list(run.generators["g0"].active):
            run.make_token(run.generators["g0"], lease, finish="stop")
        while run.scores:
            run.score(fail=run.scores[0].group_id != 1)
        run.commit(100)
        while run.prompts:
            run.deliver_prompts()
        read_inbox(run)
    assert run.core.view().dropped_groups["zero_variance"] == 1
    assert run.failed == "16 groups in a row could not be used (reward_failed): it hung"


@pytest.mark.parametrize(
    ("hello", "answer"),
    [
        ({"step": 3, "checkpoint_step": 3}, "checkpoint is of step 3"),
        ({"step": 1, "checkpoint_step": 0}, "begins at its checkpoint 0"),
    ],
)
def test_a_history_that_does_not_fit_is_refused(hello, answer):
    core = Core(settings(), Recovered())
    core.start(0.0)
    effects = core.trainer_joined(pb.TrainerHello(instance="t", **hello))
    reasons = [effect.reason for effect in effects if isinstance(effect, fx.Failed)]
    reasons += [restart.reason for restart in commands(effects, "restart")]
    assert len(reasons) == 1
    assert answer in reasons[0]


@pytest.mark.parametrize(("step", "told"), [(3, True), (1, False)], ids=["ahead", "behind"])
def test_a_checkpoint_ahead_of_the_journal_may_be_of_copies_of_an_earlier_run(step, told):
    core = Core(settings(copies_url="s3://runs/jobs"), Recovered(step=2, checkpoint_step=2))
    core.start(0.0)
    (failed,) = core.trainer_joined(pb.TrainerHello(instance="t", step=step, checkpoint_step=step))
    assert ("the copies in s3://runs/jobs may be of an earlier run" in failed.reason) == told


def test_a_step_with_other_groups_than_given_sends_the_trainer_back():
    run = world()
    (restart,) = commands(run.core.step_done(pb.StepDone(step=0, group_ids=[1, 2, 3])), "restart")
    assert restart.reason == "step 0 took 3 groups, not the 3 that it was given"


def _one_scored(run: World) -> int:
    """A group is scored, and its record is durable; its number."""
    run.commit(len(run.unsynced))
    group_id = next(iter(run.generators["g0"].active.values())).group_id
    end_samples(run, group=group_id)
    run.commit(len(run.unsynced))
    return group_id


def test_a_step_that_names_a_group_twice_sends_the_trainer_back():
    run = world(slots=12, batch_groups=2)
    group_id = _one_scored(run)
    done = pb.StepDone(step=0, group_ids=[group_id, group_id])
    assert len(commands(run.core.step_done(done), "restart")) == 1


@pytest.mark.parametrize("micro_steps", [[0], [2], [1, 1], [3]])
def test_a_step_with_micro_steps_that_cannot_be_sends_the_trainer_back(micro_steps: list[int]):
    """Behind no group, behind the last one, or twice behind one."""
    run = world(slots=12, batch_groups=2)
    groups = [_one_scored(run), _one_scored(run)]
    done = pb.StepDone(step=0, group_ids=groups, micro_steps=micro_steps)
    (restart,) = commands(run.core.step_done(done), "restart")
    assert restart.reason == f"step 0 of 2 groups had micro-steps that end at {micro_steps}"


def test_a_hello_that_names_a_group_twice_holds_it_once():
    run = world(slots=12, batch_groups=2)
    run.core.trainer_left()
    group_id = _one_scored(run)
    hello = pb.TrainerHello(trainer_id="t", instance=run.trainer.instance, held_groups=[group_id, group_id])
    assert len(commands(run.core.trainer_joined(hello), "welcome")) == 1
    assert run.core.view().delivered_groups == 1


def test_idle_generators_are_told_why_once():
    run = World(settings(evaluation_prompts=0, staleness=0, batch_groups=1), slots=(4,))
    run.join_generator("g0")
    run.generators["g0"].inbox.clear()
    assert run.core.view().fleet.idle["no_weights"] == 1
    run.start_trainer()
    causes = []
    for _ in range(4):
        run.progress_some(Always(), pace=1.0, finish=0.0)
        causes.append(run.generators["g0"].idle)
    assert causes[-1] == "staleness"
    assert commands(run.core.tick(0.1), "idle") == []


def test_a_full_buffer_holds_new_groups_back_but_not_the_step():
    run = joined(slots=4, max_buffer_bytes=1, batch_groups=2)
    seen = set()
    for _ in range(8):
        run.progress_once()
        seen |= {cause for cause, count in run.core.view().fleet.idle.items() if count}
    assert "back_pressure" in seen
    run.run_out()


@pytest.mark.parametrize("partial_rollouts", [True, False])
def test_running_tokens_are_in_the_buffer(partial_rollouts: bool):
    run = world(slots=12, partial_rollouts=partial_rollouts)
    before = run.core.view().buffered_bytes
    leases = list(run.generators["g0"].active)
    items = [token(lease, count=3, prompt_tokens=bytes(40)) for lease in leases]
    run.do(run.core.generator_progress("g0", items=items, now_s=0.0))
    arrived = run.core.view().buffered_bytes - before
    assert arrived >= len(leases) * (3 * 8 + 40 - 8), "each token with its log-prob, each sample with its prompt"
    run.kill_generator("g0")
    assert run.core.view().buffered_bytes == (before + arrived if partial_rollouts else len(leases) * (40 + 96))


def test_a_delivered_group_leaves_the_memory_and_comes_again_from_the_journal():
    run = world(slots=12)
    end_samples(run, group=0)
    run.commit(100)
    groups = run.core._groups
    delivered = [group for group in groups if group.state is GroupState.DELIVERED]
    assert delivered and not any(group.result.samples for group in delivered)
    running = sum(sample.size_bytes for group in groups for sample in group.samples)
    assert run.core.view().buffered_bytes == running + sum(
        group.result.size_bytes for group in groups if group.result and group.result.samples
    )
    run.start_trainer()
    run.run_out()


def test_a_groups_samples_share_their_prompts_tokens():
    run = world(slots=12)
    items = [token(lease, prompt_tokens=pack_int32([1, 2, 3])) for lease in run.generators["g0"].active]
    run.do(run.core.generator_progress("g0", items=items, now_s=0.0))
    for group in run.core._groups:
        assert len({id(sample.prompt_tokens) for sample in group.samples if sample.prompt_tokens}) <= 1


def test_the_end_and_everything_after_it():
    run = World(settings())
    run.run_out()
    run.commit(100)
    assert isinstance(run.durable[-1], rec.RunEnded)
    effects = run.core.trainer_joined(pb.TrainerHello(instance="late"))
    assert effects == [], "whoever ended the run tells everybody so, once the result is written"
    again = Core(run.job, replay(run.durable))
    assert again.start(0.0) == [fx.Finished(step=run.job.steps)]
    info = pb.GeneratorHello(generator_id="g", instance="x", pool="p", slots=1)
    (welcome,) = again.generator_joined(info, now_s=0.0)
    assert commands([welcome], "welcome")


@pytest.mark.parametrize("steps", [6, 3, 1])
def test_a_run_ends_with_the_steps_that_it_is_given_while_it_waits(steps: int) -> None:
    """Its last step may be farther away, or lie behind it; what is recorded behind the end is given up."""
    run = world(slots=12)
    while run.core.view().step < 2:
        run.progress_once()
    run.write_checkpoint()
    while run.core.view().step < 4:
        run.progress_once()
    run.job = settings(steps=steps)
    run.boot()
    run.start_trainer()
    run.run_out()
    run.commit(100)
    assert run.durable[-1] == rec.RunEnded(step=max(steps, 2), version_hash=b"h")
    recovered = replay(run.durable)
    assert (recovered.step, recovered.ended) == (max(steps, 2), True)


def test_recorded_steps_are_repeated_with_their_groups_after_everybody_died():
    run = world(slots=12)
    while run.core.view().step < 2:
        run.progress_once()
    taken = dict(run.history)
    run.boot()
    run.start_trainer()
    assert run.core.view().step == 0
    run.run_out()
    assert {step: run.history[step] for step in taken} == taken


def test_a_trainer_that_repeats_steps_is_given_the_cuts_of_their_passes():
    run = world(slots=12, batch_groups=2)
    cuts = pb.PassCuts(room_tokens=7, halved=[2])
    done = pb.StepDone(step=0, group_ids=[_one_scored(run), _one_scored(run)], cuts=cuts)
    run.do(run.core.step_done(done))
    run.commit(100)
    run.boot()
    run.start_trainer()
    run.commit(100)
    assert dict(run.trainer.inbox[0].welcome.cuts) == {0: cuts}


def test_smaller_staleness_on_resume_drops_what_no_longer_fits():
    run = world(slots=12, staleness=2, batch_groups=2)
    for _ in range(3):
        end_samples(run)
        run.commit(100)
        read_inbox(run)
    assert run.core.view().groups_by_state["scored"] + run.core.view().groups_by_state["delivered"] == 6
    core = Core(settings(evaluation_prompts=0, staleness=0, batch_groups=2), replay(run.durable))
    dropped = [e.record for e in core.start(0.0) if isinstance(e, fx.Write) and isinstance(e.record, rec.Dropped)]
    assert [record.reason for record in dropped] == ["too_stale"] * 4


def test_step_summary_counts_what_was_consumed():
    run = world(slots=12)
    run.progress_once()
    while run.core.last_step is None:
        run.progress_once()
    step = run.core.last_step
    assert (step.step, step.stats.samples, step.stats.reward_count, step.stats.reward_sum) == (0, 6, 6, 6.0)
    assert step.staleness_histogram == {0: 3}
    assert step.stats.tokens_sum >= 6


def test_a_restarted_scheduler_begins_nothing_before_the_trainer_has_spoken():
    run = world(slots=12)
    run.commit(100)
    run.boot()
    run.join_generator("g0")
    while run.prompts:
        run.deliver_prompts()
    assert run.core.view().waiting_samples > 0
    assert run.core.view().fleet.idle["no_weights"] == 1
    assert run.core.view().active_leases == 0
    run.join_trainer()
    assert run.core.view().active_leases > 0


@pytest.mark.parametrize(
    "item",
    [
        pb.Progress(observation_tokens=bytes(8)),
        pb.Progress(tokens=bytes(8), logprobs=bytes(8)),
        pb.Progress(tokens=bytes(8), logprobs=bytes(8), spans=[pb.VersionSpan(tokens=2, step=7)]),
        pb.Progress(tokens=bytes(1000), logprobs=bytes(1000), spans=[pb.VersionSpan(tokens=250)]),
    ],
    ids=["an observation without a version", "version missing", "another version", "more than maxTokens"],
)
@pytest.mark.parametrize("max_turns", [None, 3])
def test_unsound_progress_of_an_evaluation_is_made_again_but_not_for_ever(item: pb.Progress, max_turns: int | None):
    run = joined(slots=1, evaluation_prompts=1, max_turns=max_turns, max_issues=3)
    while not run.generators["g0"].active:
        run.progress_some(Always(), pace=1.0, finish=0.0)
    (request,) = run.generators["g0"].active.values()
    assert is_evaluation(request)
    for _ in range(run.job.max_issues):
        assert run.core.view().evaluating_step == 0
        item.lease = request.lease
        effects = run.core.generator_progress("g0", items=[item], now_s=0.0)
        assert [list(batch.leases) for batch in commands(effects, "cancel")] == [[request.lease]]
        (request,) = issued(effects)
    assert not is_evaluation(request)
    (result,) = [effect.record for effect in effects if isinstance(effect, fx.Write)]
    assert (result.mean_reward, result.failed) == (None, 1)


def test_scored_groups_become_trajectories_in_portions(monkeypatch: pytest.MonkeyPatch):
    """Copies of thousands of long samples at once would hold up everything else."""
    monkeypatch.setattr(rollout, "PORTION_BYTES", 1)
    run = world(slots=12)
    for lease in list(run.generators["g0"].active):
        run.make_token(run.generators["g0"], lease, finish="stop")
    asked = [run.scores.popleft() for _ in range(len(run.scores))]
    scores = [Score(group_id=a.group_id, sample_index=a.sample_index, reward=1.0, parts={}) for a in asked]
    effects = run.core.scores_arrived(scores)
    made = []
    while True:
        made.append(sum(isinstance(e, fx.Write) and isinstance(e.record, rec.Scored) for e in effects))
        if not run.core.has_more:
            break
        effects = run.core.resume()
    assert made == [1] * len({score.group_id for score in scores})


def test_a_scored_group_keeps_no_text_of_its_prompt():
    """Groups stay in memory until a checkpoint covers their step."""
    groups = GroupTable(Window(batch_groups=1, staleness=0, step=0))
    waiting = WaitingGroups(groups, order=IN_ORDER, lengths=Lengths(LengthHistory(), signals=()), batch_groups=1)
    source = PromptGroups(group_size=2, waiting=waiting)
    prompt = GroupPrompt(index=0, text="2+2=", tokens=b"tokens", reference=Reference("4", '{"level": 1}'))
    group = Group(group_id=0, prompt=prompt, source=source, task=TaskSettings(sampling=pb.Sampling()))
    groups.add(group)
    groups.store(group, ScoredGroup(samples=(), size_bytes=0, stats=None))
    assert (prompt.text, prompt.tokens, prompt.reference) == ("", b"", None)
