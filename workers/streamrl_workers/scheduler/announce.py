"""Which weight version the generators are told to use.

Owns the versions that the trainer has published and which of them is announced. A version is announced
only
  - when the step that made it is recorded: so no token is ever of a version that history may not have;
  - when no evaluation of the announced version is unfinished; versions that are to be evaluated are
    announced one after the other, all others give way to the newest;
  - to a generator that is not at a higher number, nor was told to load one that it has not said it cannot. After a trainer's restart the generators are at
    versions of a history that is being repeated with the same groups; they go on with those until
    the repetition has caught up. Hence the number of a generator's version never falls.
"""

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.evaluation import Evaluator
from streamrl_workers.scheduler.fleet import Fleet, Generator, Version
from streamrl_workers.scheduler.outbox import Outbox


class Announcer:
    """Tells generators about weights."""

    def __init__(self, outbox: Outbox, *, fleet: Fleet, evaluator: Evaluator) -> None:
        self._outbox = outbox
        self._fleet = fleet
        self._evaluator = evaluator
        self._published: dict[int, tuple[pb.VersionName, str]] = {}
        """Step -> name and address, of the current attempt, not older than the announced one."""
        self.announced: Version | None = None
        self._changes = 0
        self._last: tuple[object, ...] = ()

    def changed(self) -> None:
        """A generator has come, or its version is another: look again."""
        self._changes += 1

    def clear(self) -> None:
        """A new attempt: nothing is published yet."""
        self.changed()
        self._published.clear()
        self.announced = None
        self._evaluator.abandon()
        for generator in self._fleet:
            generator.told = None

    def published(self, name: pb.VersionName, *, address: str) -> None:
        """The trainer serves this version."""
        self.changed()
        if self.announced is None or name.step >= self.announced[1]:
            self._published[name.step] = (name, address)
        for generator in self._fleet:
            if generator.told == (name.attempt, name.step) != generator.version:
                generator.told = None  # the trainer may be somewhere else now

    def advance(self, *, recorded_steps: int) -> None:
        """Announce the next version, if there is one and nothing is in the way."""
        situation = (recorded_steps, self._evaluator.version, self._changes)
        if situation == self._last:
            return
        if self._evaluator.version is not None and self._outrun(self._evaluator.version[1]):
            self._evaluator.abandon()
        if self._evaluator.version is None:
            self._choose(recorded_steps)
        if self.announced is not None:
            self._tell(self.announced)
        self._last = (recorded_steps, self._evaluator.version, self._changes)

    def _choose(self, recorded_steps: int) -> None:
        current = -1 if self.announced is None else self.announced[1]
        coming = [step for step in self._published if current < step <= recorded_steps]
        if not coming:
            return
        step = min((step for step in coming if self._due(step)), default=max(coming))
        self.announced = (self._published[step][0].attempt, step)
        self._published = {kept: entry for kept, entry in self._published.items() if kept >= step}
        if self._due(step):
            self._evaluator.begin(self.announced)

    def _due(self, step: int) -> bool:
        return self._evaluator.due(step) and not self._outrun(step)

    def _outrun(self, step: int) -> bool:
        """Whether a generator is at a higher number: a repeated step, its evaluation can no longer be made."""
        return any(generator.step is not None and generator.step > step for generator in self._fleet)

    def _tell(self, version: Version) -> None:
        name, address = self._published[version[1]]
        for generator in self._fleet:
            if generator.told != version and not generator.failed and _may_load(generator, version):
                self._fleet.tell(generator, version)
                command = pb.WeightsAvailable(version=name, address=address)
                self._outbox.to_generator(generator.generator_id, pb.GeneratorCommand(weights=command))


def _may_load(generator: Generator, version: Version) -> bool:
    return generator.version != version and generator.highest_step <= version[1]
