"""A run of the core in the middle, and its effects as lists of messages."""

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import effects as fx
from support.core_world import World, settings


def world(*, generators: int = 1, slots: int = 4, **changes) -> World:
    """A run whose generators have version 0 and whose first samples are out, with no evaluation in the way."""
    found = joined(generators=generators, slots=slots, **changes)
    found.progress_some(Always(), pace=1.0, finish=0.0)
    found.progress_some(Always(), pace=1.0, finish=0.0)
    for name in found.generators:
        read_inbox(found, name)
    return found


def joined(*, generators: int = 1, slots: int = 4, credit: int | None = None, **changes) -> World:
    """A run whose trainer and generators `g0`, `g1` .. have said hello, with no evaluation unless it is asked for."""
    found = World(settings(**{"evaluation_prompts": 0, **changes}), slots=(slots,))
    found.start_trainer(**({} if credit is None else {"credit": credit}))
    for number in range(generators):
        found.join_generator(f"g{number}")
    return found


def read_inbox(run: World, name: str = "g0") -> None:
    """The generator reads everything that it was told."""
    while run.generators[name].inbox:
        run.deliver_generator(run.generators[name])


def end_samples(run: World, name: str = "g0", *, group: int | None = None) -> None:
    """What the generator holds (of one group) ends and is scored; the records wait."""
    for lease, request in list(run.generators[name].active.items()):
        if group in (None, request.group_id):
            run.make_token(run.generators[name], lease, finish="stop")
    while run.scores:
        run.score(fail=False)


class Always:
    """Chance that always says yes."""

    def random(self) -> float:
        return 0.0


def commands(effects: list[fx.Effect], name: str) -> list:
    found = [e.command for e in effects if isinstance(e, fx.ToGenerator | fx.ToTrainer)]
    return [getattr(command, name) for command in found if command.WhichOneof("command") == name]


def issued(effects: list[fx.Effect]) -> list[pb.SampleRequest]:
    return [item for batch in commands(effects, "issue") for item in batch.items]


def token(lease: int, *, step: int = 0, count: int = 1, **more) -> pb.Progress:
    span = pb.VersionSpan(tokens=count, step=step, attempt=1)
    return pb.Progress(lease=lease, tokens=b"\1\0\0\0" * count, logprobs=bytes(4 * count), spans=[span], **more)
