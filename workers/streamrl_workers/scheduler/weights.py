"""Weight versions on their way to the generators: which one is announced, and to whom.

A version is announced only
  - when the step that made it is recorded: so no token is ever of a version that the history may not have;
  - when no evaluation of the announced version is unfinished; versions that are evaluated are announced one after the other, all others
    give way to the newest;
  - to a generator that is not at a higher step, and to which no higher one is announced that it has not reported as failed. After a trainer's restart the
    generators have versions of a history that is repeated with the same groups; they continue with those until the repetition has caught up.
    Hence the step of a generator's version never falls.
"""

from collections import Counter

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.effects import Outbox
from streamrl_workers.scheduler.evaluation import Evaluator
from streamrl_workers.scheduler.generators import Fleet, Generator, Version
from streamrl_workers.scheduler.versions.sources import WeightSources
from streamrl_workers.scheduler.versions.turns import WeightTurns


class WeightAnnouncer:
    """Announces weights to generators."""

    def __init__(
        self,
        outbox: Outbox,
        *,
        fleet: Fleet,
        evaluator: Evaluator,
        turns: WeightTurns | None = None,
        only_evaluated: bool = False,
    ) -> None:
        """`turns`: of other clusters; None: a version is announced to all at once. `only_evaluated`: announce only versions that are evaluated."""
        self._outbox = outbox
        self._fleet = fleet
        self._evaluator = evaluator
        self._only_evaluated = only_evaluated
        self._published: dict[int, tuple[pb.VersionName, str]] = {}
        """Step -> name and address, of the current attempt, not older than the announced one."""
        self.announced: Version | None = None
        self.sources = WeightSources()
        self.turns = turns
        self._changes = 0
        self._last: tuple[object, ...] = ()

    def changed(self) -> None:
        """Look at all generators at the next `advance`."""
        self._changes += 1

    def clear(self) -> None:
        """Begin an attempt, of which nothing is published."""
        self.changed()
        self._published.clear()
        self.announced = None
        self.turns = None if self.turns is None else WeightTurns()
        self._evaluator.abandon()
        for generator in self._fleet:
            generator.weights.announced = None

    def published(self, name: pb.VersionName, *, address: str) -> None:
        """Note that the trainer serves this version at `address`."""
        self.changed()
        if self._only_evaluated:
            self._published = {step: entry for step, entry in self._published.items() if self._is_wanted(step)}
        if self.announced is None or name.step >= self.announced[1]:
            self._published[name.step] = (name, address)
        for generator in self._fleet:
            if generator.weights.announced == (name.attempt, name.step) != generator.weights.version:
                generator.weights.announced = None  # the trainer may be somewhere else now

    def _is_wanted(self, step: int) -> bool:
        """Return whether this version may be announced, or was."""
        announced = [self.announced, *(generator.weights.announced for generator in self._fleet)]
        return self._evaluator.due(step) or any(version is not None and version[1] == step for version in announced)

    def hash_of(self, step: int) -> bytes:
        """Return the hash of the version that the trainer serves as `step`; empty: it serves no such version."""
        entry = self._published.get(step)
        return b"" if entry is None else entry[0].hash

    def advance(self, *, recorded_steps: int) -> None:
        """Announce the next version, if there is one and nothing is in the way."""
        if self._situation(recorded_steps) == self._last:
            return
        if self._evaluator.version is not None and self._is_superseded(self._evaluator.version[1]):
            self._evaluator.abandon()
        if self._evaluator.version is None:
            self._choose(recorded_steps)
        if self.announced is not None:
            self._announce(self.announced)
        self._last = self._situation(recorded_steps)

    def _situation(self, recorded_steps: int) -> tuple[object, ...]:
        now_s = self._fleet.now_s
        turns = None if self.turns is None else (self.turns.is_taken(now_s=now_s), self.turns.is_late(now_s=now_s))
        return recorded_steps, self._evaluator.version, self._changes, turns

    def _choose(self, recorded_steps: int) -> None:
        current = -1 if self.announced is None else self.announced[1]
        coming = [step for step in self._published if current < step <= recorded_steps]
        coming = [step for step in coming if self.is_due(step) or not self._only_evaluated]
        if not coming:
            return
        step = min((step for step in coming if self.is_due(step)), default=max(coming))
        self.announced = (self._published[step][0].attempt, step)
        loads = [one.weights for one in self._fleet]
        oldest = min(
            (one.announced[1] for one in loads if one.announced is not None and one.announced != one.version),
            default=step,
        )
        self._published = {kept: entry for kept, entry in self._published.items() if kept >= min(step, oldest)}
        if self.is_due(step):
            self._evaluator.begin(self.announced)

    def is_due(self, step: int) -> bool:
        """Return whether this version must be evaluated, and can be."""
        return self._evaluator.due(step) and not self._is_superseded(step)

    def _is_superseded(self, step: int) -> bool:
        """Return whether a generator is at a higher step: the step is repeated, and can no longer be evaluated."""
        return any(generator.step is not None and generator.step > step for generator in self._fleet)

    def _announce(self, version: Version) -> None:
        waits = self._waiting_clusters(version)
        for generator in self._fleet:
            is_new = (
                generator.weights.announced != version
                and generator.cluster not in waits
                and _may_load(generator, version)
            )
            wanted = version if is_new else generator.weights.announced
            if wanted is None or wanted == generator.weights.version or generator.weights.failed:
                continue
            entry = self._published.get(wanted[1])
            if entry is None or entry[0].attempt != wanted[0]:
                continue
            peer = self.sources.of(generator.generator_id)
            address = entry[1] if peer is None else peer.address
            if not is_new and generator.weights.address == address:
                continue
            if is_new:
                self._fleet.announce(generator, version)
            generator.weights.address = address
            command = pb.WeightsAvailable(version=entry[0], address=address, peer=peer is not None)
            self._outbox.to_generator(generator.generator_id, pb.GeneratorCommand(weights=command))

    def _waiting_clusters(self, version: Version) -> frozenset[str]:
        """Return the clusters whose turn has not come."""
        if self.turns is None:
            return frozenset()
        slots = Counter[str]()
        others = [one for one in self._fleet if one.cluster]
        for generator in others:
            slots[generator.cluster] += generator.slots * (generator.serves and _may_have(generator, version))
        holders = {one.cluster for one in others if version in (one.weights.version, one.weights.announced)}
        return frozenset(slots) - self.turns.look(version, slots, holders=holders, now_s=self._fleet.now_s)

    # ---- generators

    def joined(self, hello: pb.GeneratorHello) -> None:
        """Add a generator."""
        self.sources.joined(hello)
        self.changed()

    def left(self, generator_id: str) -> None:
        """Remove a generator."""
        self.sources.left(generator_id)

    def loaded(self, generator: Generator, version: Version) -> None:
        """Note that the generator has the version."""
        self._fleet.loaded(generator, version)
        if self.turns is not None:
            self.turns.loaded(generator.cluster, version, now_s=self._fleet.now_s)
        self.sources.advanced(generator.generator_id)
        self.changed()

    def failed(self, generator: Generator, version: Version) -> None:
        """Note that the generator could not load the version; the next tick announces it again."""
        weights = generator.weights
        weights.failed = weights.announced == version
        if version[1] == weights.highest_announced:
            weights.highest_announced = -1
            self.changed()
        if weights.failed:
            self._give_up_turn(generator)

    def stalled(self, generator: Generator, version: Version, *, address: str) -> None:
        """Choose another source for a generator that gets nothing from `address`."""
        if (generator.weights.announced, generator.weights.address) == (version, address):
            self._give_up_turn(generator)
            self.sources.stalled(generator.generator_id)
            self.changed()

    def retry(self, generator: Generator) -> None:
        """Repeat the announcement of a failed version."""
        if generator.weights.failed:
            generator.weights.failed, generator.weights.announced = False, None
            self.changed()

    def _give_up_turn(self, generator: Generator) -> None:
        if self.turns is not None and self.sources.of(generator.generator_id) is None:
            self.turns.failed(generator.cluster, now_s=self._fleet.now_s)


def _may_have(generator: Generator, version: Version) -> bool:
    """Return whether it has the version or may load it; a generator that is ahead of a restarted trainer may not."""
    return version in (generator.weights.version, generator.weights.announced) or _may_load(generator, version)


def _may_load(generator: Generator, version: Version) -> bool:
    return generator.weights.version != version and generator.weights.highest_step <= version[1]
