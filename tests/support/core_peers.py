"""A generator and a trainer of the world around the core: what they hold and what they were told."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler.evaluation import GROUP_BASE, group_number


@dataclass
class SimGenerator:
    """Holds leases; makes tokens when told to."""

    name: str
    instance: str
    slots: int
    version: tuple[int, int] | None = None
    inbox: deque = field(default_factory=deque)
    active: dict[int, pb.SampleRequest] = field(default_factory=dict)
    wanted: pb.VersionName | None = None
    source: str = ""  # of what is wanted: an address
    connected: bool = True
    idle: str = ""
    leaving: bool = False
    cluster: str = ""
    pool: str = "p"
    paused: bool = False
    told_paused: bool = False  # by what it may not have read yet
    drain: bool = False  # was told to drain, behind every issue


@dataclass
class SimTrainer:
    """Collects groups, takes steps."""

    instance: str
    step: int
    attempt: int = 0
    welcomed: bool = False
    inbox: deque = field(default_factory=deque)
    held: dict[int, pb.Group] = field(default_factory=dict)
    unrecorded: pb.StepDone | None = None
    connected: bool = True
    credit: int = 1_000_000
    idle: str = ""
    held_out: Sequence[pb.Sample] = ()
    owed: int = 0
    """Bytes of groups that it has taken and not yet paid for."""
    said: tuple[int, int] | None = None
    """Step, and groups of it, with which it has said over this connection that it has nothing to compute."""

    @property
    def has_nothing(self) -> bool:
        """Whether it has said so, and nothing is on its way to it."""
        return self.connected and self.welcomed and self.said == (self.step, len(self.held) + self.coming)

    @property
    def coming(self) -> int:
        """Groups on their way to it."""
        return sum(command.HasField("group") for command in self.inbox)


def hello_of(generator: SimGenerator, *, kv: int | None) -> pb.GeneratorHello:
    hello = pb.GeneratorHello(
        generator_id=generator.name,
        instance=generator.instance,
        pool=generator.pool,
        slots=generator.slots,
        kv_capacity_tokens=kv,
        cluster=generator.cluster,
        shares_prompts=generator.slots % 2 == 0,
        weights_address=f"{generator.name}:1" if generator.slots % 2 == 0 else "",
    )
    if generator.version is not None:
        hello.version.attempt, hello.version.step = generator.version
    return hello


def group_command(effect: fx.DeliverGroup, samples: Sequence[bytes]) -> pb.TrainerCommand:
    trajectories = [pb.Sample.FromString(data) for data in samples]
    group = pb.Group(group_id=effect.group_id, step=effect.step, samples=trajectories, size_bytes=effect.size_bytes)
    return pb.TrainerCommand(group=group)


def is_evaluation(request: pb.SampleRequest) -> bool:
    return request.group_id >= GROUP_BASE


def check_request(request: pb.SampleRequest, *, version: tuple[int, int], pinned: bool) -> None:
    """An evaluation is of the generator's version; what is generated is `pinned`, or free, as the job asks."""
    if is_evaluation(request):
        number = group_number(version[1], request.group_id & 0xFFFFF)
        assert request.group_id == number, "evaluation of another version"
    assert request.HasField("finished") or request.pinned == (is_evaluation(request) or pinned)
