"""A run of the core in which a test plays the turns of a group's first sample."""

from typing import Any

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.lengths import Lengths
from support.core_world import World, settings


def world(*, max_turns: int = 3, lengths: Lengths | None = None, **changes: Any) -> World:
    """A run of one generator with all first samples out, and no evaluation in the way."""
    values = {"evaluation_prompts": 0, "max_turns": max_turns, "batch_groups": 1, "staleness": 0, **changes}
    run = World(settings(**values), slots=(20,), lengths=lengths)
    run.start_trainer()
    run.join_generator("g")
    for _ in range(2):
        settle(run)
    return run


def settle(run: World) -> None:
    """Everything but tokens, turns and scores."""
    for _ in range(3):
        run.commit(len(run.unsynced))
        while run.prompts:
            run.deliver_prompts()
        while run.trainer.inbox:
            run.deliver_trainer()
        for generator in run.generators.values():
            while generator.inbox:
                run.deliver_generator(generator)
            if generator.wanted is not None:
                run.load_weights(generator)


def play(run: World, lease: int, *, tokens: int = 1) -> None:
    """One turn of so many tokens."""
    for number in range(tokens):
        run.make_token(run.generators["g"], lease, finish="stop" if number == tokens - 1 else "")


def the_request(run: World, sample: int) -> pb.SampleRequest:
    """What the generator is asked about a sample of the first group."""
    settle(run)
    (found,) = [r for r in run.generators["g"].active.values() if r.sample_index == sample]
    return found


def finish_others(run: World) -> None:
    """All samples but the first end with their first turn."""
    for request in [r for r in run.generators["g"].active.values() if r.sample_index]:
        play(run, request.lease)
        run.answer_turn(done=True)


def trajectory(run: World, sample: int = 0) -> pb.Sample:
    """The scored sample, as the journal holds it."""
    while run.scores:
        run.score(fail=False)
    (scored,) = [write.record for write in run.unsynced if isinstance(write.record, rec.Scored)]
    return pb.Sample.FromString(scored.trajectories[sample])
