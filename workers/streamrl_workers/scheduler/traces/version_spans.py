"""Spans of a weight version: published by the trainer, then pulled and loaded by each generator that is told of it.

    weights ─┬─ publish                     the step is done, until the trainer serves its weights
             └─ load ─┬─ pull               a generator is told, until it generates by them
                      ├─ wait               for the step under way, and for pinned samples
                      └─ swap

A version lasts until the next one is published and nobody loads it any more. Owns the versions that last: a few, with the generators of each.

Instants are the scheduler's. The seconds that a generator has measured (`fetch_s`, `waited_s`, `load_s`) are laid before its message `WeightsLoaded`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.records import StepTaken
from streamrl_workers.scheduler.traces.group_spans import TRAINER, Put, version_root
from streamrl_workers.tracing import attribute_names as names
from streamrl_workers.tracing.spans import NS, SpanTree, Value

Version = tuple[int, int]
"""Attempt, step."""


@dataclass(slots=True)
class _VersionTrace:
    tree: SpanTree
    attributes: dict[str, Value]
    superseded: bool = False
    told: dict[str, int] = field(default_factory=dict)
    """Generators that are to load it -> when they were told."""


class VersionSpans:
    """The weight versions that last."""

    def __init__(self, run: str, *, put: Put, clock: Callable[[], int]) -> None:
        self._run = run
        self._put = put
        self._clock = clock
        self._versions: dict[Version, _VersionTrace] = {}
        self._newest: Version | None = None
        self._stepped: tuple[Version, int] | None = None
        """The version that the newest step makes -> when it was done."""

    def stepped(self, taken: StepTaken) -> None:
        """A step is done."""
        self._stepped = ((taken.attempt, taken.step + 1), self._clock())

    def published(self, published: pb.Published) -> None:
        """The trainer serves a version; it says so again after each break of its connection."""
        version, now_ns = _key(published.version), self._clock()
        if self._newest is not None and version <= self._newest:
            return
        begin_ns = now_ns
        if self._stepped is not None and self._stepped[0] == version:
            begin_ns = self._stepped[1]
        attempt, step = version
        root = version_root(self._run, attempt=attempt, step=step)
        tree = SpanTree(root, name="weights", process=TRAINER, begin_ns=begin_ns)
        tree.add("publish", process=TRAINER, over=(begin_ns, now_ns))
        attributes: dict[str, Value] = {
            names.VERSION: step,
            names.ATTEMPT: attempt,
            names.SIZE_BYTES: published.size_bytes,
        }
        self._newest, self._versions[version] = version, _VersionTrace(tree, attributes)
        for other, trace in self._versions.items():
            trace.superseded = other != version
        self._settle()

    def told(self, generator_id: str, weights: pb.WeightsAvailable) -> None:
        """A generator is to load a version."""
        if (trace := self._versions.get(_key(weights.version))) is not None:
            trace.told.setdefault(generator_id, self._clock())

    def loaded(self, generator_id: str, loaded: pb.WeightsLoaded) -> None:
        """It has; versions before, which it was told to load, it has passed over."""
        version, now_ns = _key(loaded.version), self._clock()
        trace = self._versions.get(version)
        if trace is not None and generator_id in trace.told:
            self._load(trace, generator_id, loaded, now_ns=now_ns)
        for other, older in self._versions.items():
            if other <= version:
                older.told.pop(generator_id, None)
        self._settle()

    def _load(self, trace: _VersionTrace, generator_id: str, loaded: pb.WeightsLoaded, *, now_ns: int) -> None:
        told_ns, add = trace.told[generator_id], partial(trace.tree.add, process=generator_id)
        path, attributes = (generator_id, told_ns), {names.GENERATOR: generator_id}
        load = add("load", *path, over=(told_ns, now_ns), attributes=attributes)
        end_ns = now_ns
        for name, seconds in (("swap", loaded.load_s), ("wait", loaded.waited_s), ("pull", loaded.fetch_s)):
            begin_ns = max(told_ns, end_ns - round(seconds * NS))
            add(name, *path, parent=load, over=(begin_ns, end_ns))
            end_ns = begin_ns

    def failed(self, generator_id: str, version: pb.VersionName, *, error: str) -> None:
        """It has not; it may be told again."""
        trace = self._versions.get(_key(version))
        if trace is not None and (told_ns := trace.told.pop(generator_id, None)) is not None:
            over = told_ns, self._clock()
            trace.tree.add("load", generator_id, told_ns, process=generator_id, over=over, error=error)
        self._settle()

    def left(self, generator_id: str) -> None:
        """The generator is gone."""
        for version, trace in list(self._versions.items()):
            if generator_id in trace.told:
                name = pb.VersionName(attempt=version[0], step=version[1])
                self.failed(generator_id, name, error="the generator has left")

    def end_all(self) -> None:
        """The run is over."""
        for trace in self._versions.values():
            trace.superseded = True
            trace.told.clear()
        self._settle()

    def _settle(self) -> None:
        """Send those that have ended."""
        for version, trace in list(self._versions.items()):
            if trace.superseded and not trace.told:
                del self._versions[version]
                self._put(trace.tree.end(end_ns=self._clock(), attributes=trace.attributes))


def _key(version: pb.VersionName) -> Version:
    return version.attempt, version.step
