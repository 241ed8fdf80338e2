"""A sample whose environment begins new contexts, through the core's public methods."""

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.lengths import LengthHistory, Lengths
from streamrl_workers.stream.packing import pack_float32, pack_int32
from support.core_world import World
from support.played_turns import finish_others, play, the_request, trajectory, world
from support.turns import CONTEXT_TOKEN, TURN_TOKEN, check_trajectory, tokens_of


def begin_context(run: World, *, chars: int = 3) -> pb.SampleRequest:
    """The first sample's turn of two tokens, and a context behind it."""
    play(run, the_request(run, 0).lease, tokens=2)
    run.answer_turn(done=False, observation="o" * chars, context=True)
    return the_request(run, 0)


def shape(found: pb.Sample) -> list[tuple[int, bool, bool]]:
    return [(segment.tokens, segment.observation, segment.context) for segment in found.segments]


def test_a_context_is_asked_for_as_a_prompt_and_stored_where_it_began() -> None:
    run = world(max_turns=4)
    first = the_request(run, 0)
    request = begin_context(run)
    assert (request.prompt, request.prefix_tokens, request.context_tokens, request.observation) == ("ccc", b"", 0, "")
    assert (first.has_turns, request.has_turns) == (False, True)
    assert request.seed != first.seed, "the same prompt again is another draw"
    play(run, request.lease, tokens=2)
    run.answer_turn(done=False, observation="oo")
    request = the_request(run, 0)
    assert (request.prompt, len(request.prefix_tokens) >> 2, request.context_tokens) == ("ccc", 2, 2)
    assert request.observation == "oo"
    play(run, request.lease)
    assert run.turns[0].contexts == (0,)
    assert run.turns[0].observations == ("ccc", "oo")
    assert run.turns[0].token_counts == ((2, 2), (3, 2), (7, 1)), "tokens before a turn are those of its context"
    run.answer_turn(done=True)
    finish_others(run)
    found = trajectory(run)
    assert shape(found) == [
        (2, False, False),
        (3, True, True),
        (2, False, False),
        (2, True, False),
        (1, False, False),
    ]
    check_trajectory(found, job=run.job)
    assert found.prompt_tokens == tokens_of(first.prompt), "the sample's prompt is that of its first context"


def test_each_further_context_is_another_draw_and_sees_nothing_of_the_others() -> None:
    run = world(max_turns=4)
    seeds = {the_request(run, 0).seed}
    for _ in range(3):
        request = begin_context(run)
        assert (request.prompt, request.prefix_tokens) == ("ccc", b"")
        seeds.add(request.seed)
    assert len(seeds) == 4
    play(run, request.lease)
    run.answer_turn(done=True)
    finish_others(run)
    check_trajectory(trajectory(run), job=run.job)
    assert sum(context for *_, context in shape(trajectory(run))) == 3


def test_a_context_that_is_lost_before_a_token_is_asked_for_again() -> None:
    run = world()
    first = begin_context(run)
    run.kill_generator("g")
    run.join_generator("g")
    again = the_request(run, 0)
    assert again.lease != first.lease
    assert (again.prompt, again.prefix_tokens, again.context_tokens) == ("ccc", b"", 0)
    assert again.seed == first.seed


def test_a_turn_of_a_context_that_is_lost_goes_on_from_its_tokens() -> None:
    run = world()
    run.make_token(run.generators["g"], begin_context(run).lease, finish="")
    run.kill_generator("g")
    run.join_generator("g")
    request = the_request(run, 0)
    assert (request.prompt, request.prefix_tokens, request.context_tokens) == ("ccc", TURN_TOKEN, 0)
    play(run, request.lease, tokens=2)
    assert run.turns[0].completions == ("tt", "ttt")
    run.answer_turn(done=True)
    finish_others(run)
    assert shape(trajectory(run)) == [(2, False, False), (3, True, True), (3, False, False)]
    check_trajectory(trajectory(run), job=run.job)


def refused(run: World, item: pb.Progress) -> pb.SampleRequest:
    """What is asked for when this has come."""
    del run.generators["g"].active[item.lease]
    run.do(run.core.generator_progress("g", items=[item], now_s=0.0))
    again = the_request(run, 0)
    assert again.lease != item.lease
    return again


def tokens(lease: int, **more: bytes) -> pb.Progress:
    span = pb.VersionSpan(tokens=1, step=0, attempt=1)
    return pb.Progress(lease=lease, tokens=TURN_TOKEN, logprobs=pack_float32([-1.0]), spans=[span], **more)


@pytest.mark.parametrize(
    "wrong",
    [{}, {"prompt_tokens": b"\1\2\3"}, {"prompt_tokens": pack_int32([-1])}, {"observation_tokens": pack_int32([2])}],
)
def test_tokens_without_their_contexts_prompt_are_not_believed(wrong: dict[str, bytes]) -> None:
    run = world()
    again = refused(run, tokens(begin_context(run).lease, **wrong))
    assert (again.prompt, again.prefix_tokens) == ("ccc", b"")


def test_who_goes_on_behind_other_tokens_of_the_prompt_is_not_believed() -> None:
    run = world()
    run.make_token(run.generators["g"], begin_context(run).lease, finish="")
    run.kill_generator("g")
    run.join_generator("g")
    lease = the_request(run, 0).lease
    again = refused(run, tokens(lease, prompt_tokens=CONTEXT_TOKEN * 4))
    assert again.prefix_tokens == TURN_TOKEN


def test_a_context_without_room_for_a_token_ends_the_sample_with_the_turn_before() -> None:
    run = world()
    lease = begin_context(run).lease
    full = pb.Progress(lease=lease, finish_reason="length", prompt_tokens=CONTEXT_TOKEN * 3)
    del run.generators["g"].active[lease]
    run.do(run.core.generator_progress("g", items=[full], now_s=0.0))
    assert run.scores[0].completion == "tt"
    finish_others(run)
    found = trajectory(run)
    assert (shape(found), found.finish_reason, found.reward) == ([(2, False, False)], "length", 1.0)


def test_a_context_that_no_tokenizer_takes_fails_its_sample_alone() -> None:
    run = world(group_size=3)
    lease = begin_context(run).lease
    del run.generators["g"].active[lease]
    error = pb.Progress(lease=lease, finish_reason="error", error="the prompt cannot be tokenized")
    run.do(run.core.generator_progress("g", items=[error], now_s=0.0))
    finish_others(run)
    assert trajectory(run).reward_error == "environment: the prompt cannot be tokenized"


def test_prompts_of_contexts_are_no_length_of_a_completion() -> None:
    lengths = Lengths(LengthHistory(), signals=())
    run = world(group_size=2, lengths=lengths)
    play(run, begin_context(run, chars=50).lease)
    run.answer_turn(done=True)
    finish_others(run)
    trajectory(run)
    assert lengths.completions.at(0.99) <= 3


def test_the_texts_say_which_answers_began_a_context() -> None:
    run = world(max_turns=4, archived_percent=100)
    play(run, begin_context(run).lease)
    run.answer_turn(done=False, observation="oo")
    play(run, the_request(run, 0).lease)
    run.answer_turn(done=True)
    finish_others(run)
    trajectory(run)
    (scored,) = [write.record for write in run.unsynced if isinstance(write.record, rec.Scored)]
    texts = pb.GroupTexts.FromString(scored.texts).samples[0]
    assert list(texts.observations)[:2] == ["ccc", "oo"]
    assert list(texts.contexts) == [0]
