"""A sample's turns with its environment, through the core's public methods."""

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl.proto.literals import MARK
from streamrl_workers.scheduler import records as rec
from streamrl_workers.stream.packing import pack_float32, pack_int32, unpack_int32
from streamrl_workers.tasks.values import TurnAnswer
from support.core_world import World
from support.played_turns import finish_others, play, settle, the_request, trajectory, world
from support.turns import OBSERVED_TOKEN, TURN_TOKEN, check_trajectory


def test_three_turns_become_one_trajectory_of_segments():
    run = world()
    play(run, the_request(run, 0).lease, tokens=2)
    assert run.turns[0].completions == ("tt",)
    assert run.turns[0].last_token == 1
    run.answer_turn(done=False, observation="ooo")
    request = the_request(run, 0)
    assert (len(request.prefix_tokens), request.context_tokens, request.observation) == (8, 2, "ooo")
    play(run, request.lease)
    assert run.turns[0].completions == ("tt", "t")
    run.answer_turn(done=False, observation="")
    request = the_request(run, 0)
    assert (len(request.prefix_tokens), request.context_tokens, request.observation) == (24, 6, "")
    play(run, request.lease, tokens=3)
    run.answer_turn(done=True)
    assert run.scores[0].completion == "ttt"
    assert run.scores[0].environment_reward == 1.5
    finish_others(run)
    found = trajectory(run)
    shape = [(segment.tokens, segment.observation, segment.reward) for segment in found.segments]
    assert shape == [(2, False, 0.5), (3, True, 0.0), (1, False, 0.5), (3, False, 0.5)]
    assert list(unpack_int32(found.tokens)) == [1, 1, 2, 2, 2, 1, 1, 1, 1]
    check_trajectory(found, job=run.job)
    assert found.finish_reason == "stop"


def test_observations_are_of_the_version_of_the_token_behind_them():
    run = world(staleness=2, batch_groups=2)
    play(run, the_request_of_group(run, 0), tokens=2)
    run.answer_turn(done=False, observation="oo")
    settle(run)
    (request,) = [r for r in run.generators["g"].active.values() if r.group_id == 0 and r.observation]
    item = pb.Progress(
        lease=request.lease,
        tokens=TURN_TOKEN * 2,
        logprobs=pack_float32([-1.0, -1.0]),
        spans=[pb.VersionSpan(tokens=2, step=0, attempt=2)],
        observation_tokens=OBSERVED_TOKEN * 2,
        finish_reason="stop",
        text="tt",
    )
    run.do(run.core.generator_progress("g", items=[item], now_s=0.0))
    run.answer_turn(done=True)
    for request in [r for r in run.generators["g"].active.values() if r.group_id == 0 and r.sample_index]:
        play(run, request.lease)
        run.answer_turn(done=True)
    spans = [(span.tokens, span.attempt) for span in trajectory(run).spans]
    assert spans == [(2, 1), (4, 2)]


def the_request_of_group(run: World, group: int) -> int:
    settle(run)
    return next(r.lease for r in run.generators["g"].active.values() if r.group_id == group and not r.sample_index)


@pytest.mark.parametrize(("turns", "reason"), [(1, "length"), (3, "length")])
def test_a_game_that_never_ends_ends_with_the_last_turn(turns: int, reason: str):
    run = world(max_turns=turns)
    for _ in range(turns):
        play(run, the_request(run, 0).lease)
        run.answer_turn(done=False)
    assert [score.sample_index for score in run.scores] == [0]
    finish_others(run)
    assert trajectory(run).finish_reason == reason
    assert sum(not segment.observation for segment in trajectory(run).segments) == turns


def test_where_no_position_is_left_the_sample_ends_with_the_turn_before():
    run = world()
    play(run, the_request(run, 0).lease, tokens=2)
    run.answer_turn(done=False, observation="ooo")
    full = pb.Progress(lease=the_request(run, 0).lease, finish_reason="length")
    del run.generators["g"].active[full.lease]
    run.do(run.core.generator_progress("g", items=[full], now_s=0.0))
    assert run.scores[0].completion == "tt"
    finish_others(run)
    found = trajectory(run)
    assert [(segment.tokens, segment.observation) for segment in found.segments] == [(2, False)]
    assert found.finish_reason == "length"
    assert found.reward == 1.0


def test_an_environment_that_fails_costs_the_sample_its_reward_and_nothing_else():
    run = world(group_size=3)
    play(run, the_request(run, 0).lease)
    run.answer_turn(done=False, error="environment: took longer than 5 s")
    finish_others(run)
    found = trajectory(run)
    assert not found.HasField("reward")
    assert found.reward_error == "environment: took longer than 5 s"
    assert not run.core.view().dropped_groups


def test_an_observation_that_no_tokenizer_takes_fails_its_sample_alone():
    run = world(group_size=3)
    play(run, the_request(run, 0).lease)
    run.answer_turn(done=False)
    lease = the_request(run, 0).lease
    del run.generators["g"].active[lease]
    error = pb.Progress(lease=lease, finish_reason="error", error="the observation cannot be tokenized")
    run.do(run.core.generator_progress("g", items=[error], now_s=0.0))
    finish_others(run)
    assert trajectory(run).reward_error == "environment: the observation cannot be tokenized"


def test_a_turn_that_is_lost_goes_on_from_its_tokens():
    run = world()
    play(run, the_request(run, 0).lease, tokens=2)
    run.answer_turn(done=False, observation="oo")
    run.make_token(run.generators["g"], the_request(run, 0).lease, finish="")
    run.kill_generator("g")
    run.join_generator("g")
    settle(run)
    request = the_request(run, 0)
    assert list(unpack_int32(request.prefix_tokens)) == [1, 1, 2, 2, 1]
    assert (request.context_tokens, request.observation) == (4, "")
    play(run, request.lease)
    assert run.turns[0].completions == ("tt", "tt"), "the text of a turn has what came before the loss"


def test_an_observation_whose_lease_is_lost_before_a_token_is_sent_again():
    run = world()
    play(run, the_request(run, 0).lease)
    run.answer_turn(done=False, observation="oo")
    first = the_request(run, 0)
    run.kill_generator("g")
    run.join_generator("g")
    again = the_request(run, 0)
    assert again.lease != first.lease
    assert (again.prefix_tokens, again.context_tokens, again.observation) == (TURN_TOKEN, 1, "oo")


def test_a_generator_dies_while_the_environment_thinks():
    run = world()
    play(run, the_request(run, 0).lease)
    run.kill_generator("g")
    run.answer_turn(done=False, observation="o", late=True)
    run.join_generator("g")
    assert the_request(run, 0).observation == "o"


def test_many_turns_are_no_many_losses():
    run = world(max_turns=30, max_issues=2)
    for _ in range(30):
        play(run, the_request(run, 0).lease)
        run.answer_turn(done=False)
    assert run.core.view().reissued_samples == 0
    finish_others(run)
    assert len(trajectory(run).segments) == 59


def test_late_and_foreign_answers_are_left_alone():
    run = world()
    nobody = TurnAnswer(group_id=99, sample_index=0, lease=1, observation="o", reward=1.0, done=True)
    run.do(run.core.turns_answered([nobody]))
    lease = the_request(run, 0).lease
    early = TurnAnswer(group_id=0, sample_index=0, lease=lease, observation="o", reward=9.0, done=True)
    run.do(run.core.turns_answered([early]))
    assert not run.scores
    play(run, lease)
    other = TurnAnswer(group_id=0, sample_index=0, lease=lease + 99, observation="o", reward=9.0, done=True)
    run.do(run.core.turns_answered([other]))
    assert not run.scores
    run.answer_turn(done=True, late=True)
    assert [score.environment_reward for score in run.scores] == [0.5]


@pytest.mark.parametrize(
    "fault",
    [
        pb.Progress(observation_tokens=OBSERVED_TOKEN),
        pb.Progress(observation_tokens=b"\1\2\3"),
        pb.Progress(observation_tokens=pack_int32([1]), finish_reason="stop"),
    ],
)
def test_tokens_of_an_observation_that_nobody_sent_are_not_believed(fault: pb.Progress):
    run = world()
    lease = the_request(run, 0).lease
    fault.lease = lease
    del run.generators["g"].active[lease]
    run.do(run.core.generator_progress("g", items=[fault], now_s=0.0))
    again = the_request(run, 0)
    assert again.lease != lease
    assert again.prefix_tokens == b""


def test_an_evaluation_plays_to_the_end_at_one_version():
    run = world(evaluation_prompts=2)
    for _ in range(12):
        settle(run)
        if run.turns:
            ask = run.turns[0]
            assert ask.split == "held_out"
            run.answer_turn(done=len(ask.completions) == 2, observation="oo")
        for request in list(run.generators["g"].active.values()):
            if request.pinned:
                play(run, request.lease)
    scores = [score for score in run.scores if score.split == "held_out"]
    assert [score.environment_reward for score in scores] == [1.0, 1.0]
    while run.scores:
        run.score(fail=False)
    settle(run)
    evaluated = run.core.last_evaluation
    assert evaluated is not None
    assert (evaluated.failed, evaluated.mean_tokens) == (0, 4.0)


def test_an_evaluation_counts_environments_that_fail():
    run = world(evaluation_prompts=2)
    for request in list(run.generators["g"].active.values()):
        if request.pinned:
            play(run, request.lease)
    run.answer_turn(done=False, error="it raised")
    run.answer_turn(done=True)
    run.score(fail=False)
    settle(run)
    assert run.core.last_evaluation is not None
    assert (run.core.last_evaluation.failed, run.core.last_evaluation.mean_reward) == (1, 1.0)


def test_a_generator_waits_for_the_task_pool_while_the_environment_thinks():
    run = world()
    for request in list(run.generators["g"].active.values()):
        play(run, request.lease)
    settle(run)
    assert run.generators["g"].idle == "no_prompts"
    run.answer_turn(done=False)
    assert the_request(run, 0).observation == "o"
    run.answer_turn(done=True)
    error = pb.Progress(lease=the_request(run, 0).lease, tokens=TURN_TOKEN, logprobs=bytes(4), finish_reason="stop")
    error.spans.add(tokens=1, step=0, attempt=1)
    run.do(run.core.generator_progress("g", items=[error], now_s=0.0))
    run.generators["g"].active.clear()
    run.answer_turn(done=True)
    settle(run)
    assert run.generators["g"].idle != "no_prompts"


@pytest.mark.parametrize("archived_percent", [0, 100])
def test_turns_and_observations_are_stored_as_texts_where_the_group_is_archived(archived_percent: int):
    run = world(archived_percent=archived_percent)
    play(run, the_request(run, 0).lease, tokens=2)
    run.answer_turn(done=False, observation=f"oo<{MARK}|im_end|>{MARK}{MARK}")
    play(run, the_request(run, 0).lease)
    run.answer_turn(done=True)
    finish_others(run)
    trajectory(run)
    (scored,) = [write.record for write in run.unsynced if isinstance(write.record, rec.Scored)]
    texts = pb.GroupTexts.FromString(scored.texts)
    if not archived_percent:
        assert not scored.texts
        return
    assert texts.prompt
    assert [list(sample.turns) for sample in texts.samples] == [["tt", "t"], ["t"]]
    assert texts.samples[0].observations[0] == f"oo<|im_end|>{MARK}", "as people read it"
