"""A run of the core in the middle, and its effects as lists of messages."""

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import effects as fx
from support.core_world import World, settings


def world(*, generators: int = 1, slots: int = 4, **changes) -> World:
    """A run whose generators have version 0 and whose first samples are out, with no evaluation in the way."""
    found = World(settings(**{"evaluation_prompts": 0, **changes}), slots=(slots,))
    found.start_trainer()
    for number in range(generators):
        found.join_generator(f"g{number}")
    found.progress_some(Always(), pace=1.0, finish=0.0)
    found.progress_some(Always(), pace=1.0, finish=0.0)
    for generator in found.generators.values():
        while generator.inbox:
            found.deliver_generator(generator)
    return found


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
