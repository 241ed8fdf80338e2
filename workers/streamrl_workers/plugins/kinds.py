"""The kinds of plug-ins, and those that a job names. A new kind is one line of `KINDS` and one call of `load_plugin` where it is used."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points

from streamrl.errors import UserError
from streamrl.spec import RLJobSpec
from streamrl.spec.base import PythonClass
from streamrl.spec.parse import suggest


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginKind:
    """A kind of plug-in."""

    name: str
    """For people."""
    at: str
    """Where a job names one: attributes below `spec`."""
    bases: tuple[str, ...]
    """`module:Class` of which its classes derive from one."""
    group: str
    """Entry points by which installed packages give classes names."""

    @property
    def field(self) -> str:
        """Path of the field."""
        return f"spec.{self.at}"


_ALGORITHMS = "streamrl_workers.trainer.algorithms"
KINDS = (
    PluginKind(
        name="algorithm",
        at="algorithm.python",
        bases=(f"{_ALGORITHMS}.algorithm:GroupAlgorithm", f"{_ALGORITHMS}.algorithm:BatchAlgorithm"),
        group="streamrl.algorithms",
    ),
    PluginKind(
        name="advantage",
        at="algorithm.advantage.python",
        bases=(f"{_ALGORITHMS}.algorithm:GroupAdvantage",),
        group="streamrl.advantages",
    ),
    PluginKind(
        name="correction",
        at="algorithm.correction.python",
        bases=(f"{_ALGORITHMS}.corrections:SampleCorrection",),
        group="streamrl.corrections",
    ),
    PluginKind(
        name="dispatch policy",
        at="scheduling.dispatch.python",
        bases=("streamrl_workers.scheduler.dispatch.order:DispatchPolicy",),
        group="streamrl.dispatch_policies",
    ),
    PluginKind(
        name="tracker",
        at="trackers.python",
        bases=("streamrl_workers.trackers.registry:Tracker",),
        group="streamrl.trackers",
    ),
)


def kind_named(name: str) -> PluginKind:
    """Find a kind by its name."""
    return next(kind for kind in KINDS if kind.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """A plug-in that a job names."""

    kind: PluginKind
    named: PythonClass

    @property
    def field(self) -> str:
        """Path of its class in the job."""
        return f"{self.kind.field}.class"

    @property
    def place(self) -> str:
        """`module:Class`. Raises `UserError`: no installed package gives a class of this kind that name."""
        if ":" in self.named.class_:
            return self.named.class_
        known = {point.name: point.value for point in entry_points(group=self.kind.group)}
        if self.named.class_ not in known:
            rule = f"must be `module:Class`, or a name in the entry points {self.kind.group} of an installed package"
            raise UserError(field=self.field, rule=rule, got=self.named.class_, fix=suggest(self.named.class_, known))
        return known[self.named.class_]

    @property
    def is_shipped(self) -> bool:
        """Whether it is a part of StreamRL."""
        return self.place.partition(".")[0] == __name__.partition(".")[0]


def plugins_of(spec: RLJobSpec) -> Iterator[Plugin]:
    """Find the plug-ins that a job names."""
    for kind in KINDS:
        part: object = spec
        for name in kind.at.split("."):
            part = getattr(part, name, None)
        if isinstance(part, PythonClass):
            yield Plugin(kind=kind, named=part)
