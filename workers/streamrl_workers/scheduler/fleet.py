"""The generators that are connected, and what each holds.

Owns leases: which sample is with which generator, under which number. A lease ends once: the sample
finishes, or the lease is revoked (its generator left, fell silent, or came back as a new process).
Numbers are never used twice, also not by a later scheduler, so that late words about an old lease
can be told apart. Owns nothing of groups: what a lost lease means is decided by `groups/lifecycle.py`.
Owns what each generator's samples take of its memory (`kv_memory.py`), and how fast each pool's generators are, as their heartbeats tell (`dispatch/speeds.py`).
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from streamrl.latency import LatencyCurve
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.dispatch.speeds import Curves, Reading
from streamrl_workers.scheduler.kv_memory import KvBook, KvSize

Version = tuple[int, int]
"""Attempt, step."""

LOAD_PATIENCE, MOST_PATIENCE, LOAD_GRACE_S = 2.0, 4.0, 0.5
"""A generator is expected to have loaded a version after so many times what the quickest took, and so many seconds. More times
where the slowest took more for the version before, with a tenth on top; at most the second."""
IDLE_CAUSES = ("no_prompts", "staleness", "scoring", "back_pressure", "no_weights", "phase", "ended")
"""Why a generator with a free slot gets nothing."""


@dataclass(slots=True)
class Lease:
    """One sample with one generator."""

    number: int
    generator_id: str
    group_id: int
    sample_index: int
    version_step: int
    """Version that the generator had at issue: its tokens are of this one or a newer one."""
    evaluation: bool = False
    frozen: bool = False
    """The sample is finished: the frozen model's log-probs of it are asked for."""
    moves: int = 0
    """So often the sample was moved to another generator, since it was last issued from the queue."""


@dataclass(slots=True)
class Generator:
    """One connected generator."""

    generator_id: str
    pool: str
    slots: int
    version: Version | None
    heard_s: float
    kv: KvBook
    frozen: bool = False
    """It has the frozen model: it generates nothing, and no version is for it."""
    cluster: str = ""
    """Another one than the trainer's; empty: the trainer's."""
    lent: bool = False
    """It is paused now and then, and others are not: no order and no evaluation rests on it."""
    leases: dict[int, Lease] = field(default_factory=dict)
    told: Version | None = None
    """Version that it was last told to load."""
    told_s: float = 0.0
    """When that was."""
    told_address: str = ""
    """From where it was last told to load it."""
    highest_told: int = -1
    """Highest number among those that it may still load."""
    failed: bool = False
    """It could not load that version; it is told again at the next tick."""
    silent: bool = False
    """Not heard for a lease: it holds nothing and gets nothing until it speaks."""
    leaving: bool = False
    """It has said that it finishes what it holds and takes nothing more."""
    paused: bool = False
    """The trainer computes on its devices: it keeps what it holds, and makes and gets nothing."""
    drained: bool = False
    idle_cause: str = ""
    """The cause last told; empty: it has work."""
    held_back: bool = False
    """At the last look it had a free slot, and no room for the keys and values of the sample that was next."""
    told_waiting: bool | None = None
    reading: Reading | None = None
    """Of its last heartbeat."""
    counted: bool = False
    """Whether it served when `Fleet.changes` last rose for it."""

    @property
    def step(self) -> int | None:
        """Its weight version, if it has weights."""
        return None if self.version is None else self.version[1]

    @property
    def highest_step(self) -> int:
        """Highest number of a version that it has or may come to have without another word from us."""
        return self.highest_told if self.version is None else max(self.version[1], self.highest_told)

    @property
    def is_loading(self) -> bool:
        """Whether it will be at a newer version without another word from us."""
        return self.version is not None and self.highest_told > self.version[1]

    @property
    def serves(self) -> bool:
        """Whether it takes samples, now or when a slot frees."""
        return not (self.silent or self.leaving or self.drained)

    @property
    def free(self) -> int:
        """Slots without a lease that can be filled."""
        return self.slots - len(self.leases) if self.serves and not self.paused else 0


class Fleet:
    """All connected generators, and all leases."""

    def __init__(
        self,
        *,
        first_lease: int,
        curves: Curves | None = None,
        frozen_pool: str = "",
        lent_pools: Collection[str] = (),
    ) -> None:
        """`curves`: what is known of the pools' speed; None: nothing yet. `frozen_pool`: whose generators generate nothing. `lent_pools`: some of all."""
        self._frozen_pool, self._lent_pools = frozen_pool, lent_pools
        self._next_lease = first_lease
        self._curves = Curves() if curves is None else curves
        self._generators: dict[str, Generator] = {}
        self._leases: dict[int, Lease] = {}
        self.free: dict[str, Generator] = {}
        """Generators with free slots."""
        self.free_frozen: dict[str, Generator] = {}
        """The same of those with the frozen model."""
        self._frozen: set[str] = set()
        """Names of all those."""
        self._touched: dict[str, None] = {}
        self.reissued = 0
        """Samples that were lent again, since their generator was lost."""
        self.changes = 0
        """Rises when a generator begins or ceases to serve."""
        self.now_s = 0.0
        """Of the newest event that came with a time."""
        self.epoch_s = 0.0
        """Unix time at which `now_s` is 0."""
        self._loading: dict[str, Generator] = {}
        """Told of a version that they do not have yet."""
        self._quickest: tuple[Version, float] | None = None
        """The newest version that one has loaded, and the seconds that the quickest of them took."""
        self._slowest_s = 0.0
        """Seconds that the slowest took for it."""
        self._patience = LOAD_PATIENCE
        """So many times the quickest the others are waited for."""

    def __iter__(self) -> Iterator[Generator]:
        """Those that generate."""
        return (generator for generator in self._generators.values() if not generator.frozen)

    def __len__(self) -> int:
        return len(self._generators) - len(self._frozen)

    @property
    def connected(self) -> Iterator[Generator]:
        """All."""
        return iter(self._generators.values())

    @property
    def leases(self) -> int:
        """Samples that are out."""
        return len(self._leases)

    def get(self, generator_id: str) -> Generator | None:
        """The generator, if it is connected."""
        return self._generators.get(generator_id)

    def join(self, hello: pb.GeneratorHello, *, now_s: float) -> Generator:
        """A generator has said hello; it holds nothing."""
        self.now_s = now_s
        assert hello.generator_id not in self._generators, f"{hello.generator_id} is here already"
        version = (hello.version.attempt, hello.version.step) if hello.HasField("version") else None
        capacity = hello.kv_capacity_tokens if hello.HasField("kv_capacity_tokens") else None
        kv = KvBook(capacity_tokens=capacity, shares_prompts=hello.shares_prompts)
        frozen = hello.pool == self._frozen_pool
        generator = Generator(hello.generator_id, hello.pool, hello.slots, version, now_s, kv, frozen, hello.cluster)
        generator.lent = hello.pool in self._lent_pools
        self._generators[hello.generator_id] = generator
        self._frozen |= {hello.generator_id} if frozen else set()
        self.settle(generator)
        return generator

    def remove(self, generator_id: str) -> None:
        """The generator is gone; its leases were revoked before."""
        self.changes += self._generators.pop(generator_id).counted
        self._loading.pop(generator_id, None)
        self.free.pop(generator_id, None)
        self.free_frozen.pop(generator_id, None)
        self._frozen.discard(generator_id)

    def settle(self, generator: Generator) -> None:
        """Its slots or its version may have changed."""
        if generator.frozen:
            free, is_ready = self.free_frozen, generator.step is not None
        else:
            free, is_ready = self.free, True
            self._touched[generator.generator_id] = None
            self.changes += generator.counted != generator.serves
            generator.counted = generator.serves
        if generator.free > 0 and is_ready:
            free[generator.generator_id] = generator
        else:
            free.pop(generator.generator_id, None)

    def loaded(self, generator: Generator, version: Version) -> None:
        """It has the version now."""
        if generator.told == version:
            self._took(self.now_s - generator.told_s, version=version)
        generator.version = version
        if generator.told == version:
            self._loading.pop(generator.generator_id, None)
        self.settle(generator)

    def tell(self, generator: Generator, version: Version) -> None:
        """It is told to load the version."""
        generator.told, generator.told_s = version, self.now_s
        generator.highest_told = version[1]
        self._loading[generator.generator_id] = generator

    def coming(self) -> dict[str, Generator]:
        """Those with free slots that still load what others have loaded, and not for much longer than the quickest took."""
        if self._quickest is None or not self._loading:
            return {}
        version, took_s = self._quickest
        since_s = self.now_s - self._patience * took_s - LOAD_GRACE_S
        return {
            name: generator
            for name, generator in min(self._loading, self.free, key=len).items()
            if generator.free > 0
            and generator.told == version != generator.version
            and not generator.failed
            and generator.told_s >= since_s
        }

    def beat(self, generator: Generator, reading: Reading) -> None:
        """Its heartbeat says how much it has made."""
        if generator.reading is not None:
            self._curves.observe(generator.pool, before=generator.reading, now=reading)
        generator.reading = reading

    @property
    def curve_kinds(self) -> int:
        """Rises when other pools' curves are guesses than before."""
        return self._curves.kinds

    def curve(self, generator: Generator) -> LatencyCurve:
        """Seconds of its decoding step by active samples, as far as known."""
        return self._curves.curve(generator.pool, slots=generator.slots)

    def measured(self, generator: Generator) -> bool:
        """Whether that is known from enough heartbeats of its pool."""
        return self._curves.measured(generator.pool)

    def offer(self, generator: Generator, *, more: int = 0) -> tuple[float, float, str]:
        """How fast one more sample would run there, with so many `more` besides its own; the smallest is served first, of equal ones the emptier."""
        active = len(generator.leases) + more
        return self.curve(generator).at(active + 1), active / generator.slots, generator.generator_id

    def _took(self, seconds: float, *, version: Version) -> None:
        """One has loaded the version. With the first of them it is known how far apart those of the version before were."""
        if self._quickest is None or self._quickest[0] != version:
            if self._quickest is not None:
                self._patience = _patience(quickest_s=self._quickest[1], slowest_s=self._slowest_s)
            self._quickest, self._slowest_s = (version, seconds), seconds
        self._quickest = (version, min(seconds, self._quickest[1]))
        self._slowest_s = max(seconds, self._slowest_s)

    def take_touched(self) -> dict[str, None]:
        """Names of the generators whose slots or versions changed since the last call, in the order in which they did."""
        touched, self._touched = self._touched, {}
        return touched

    def lend(
        self,
        generator: Generator,
        *,
        group_id: int,
        sample_index: int,
        size: KvSize,
        evaluation: bool = False,
        moves: int = 0,
    ) -> Lease:
        """A new lease for a sample that goes to the generator; `size`: what it takes of its memory, `moves`: as in `Lease`."""
        assert generator.step is not None, "a generator without weights gets no samples"
        lease = Lease(
            self._next_lease,
            generator.generator_id,
            group_id,
            sample_index,
            generator.step,
            evaluation,
            generator.frozen,
            moves,
        )
        self._next_lease += 1
        generator.leases[lease.number] = lease
        generator.kv.put(lease.number, group_id, size)
        self._leases[lease.number] = lease
        generator.idle_cause = ""
        self.settle(generator)
        return lease

    def lease(self, number: int) -> Lease | None:
        """The lease, if it is not over."""
        return self._leases.get(number)

    def resize(self, lease: Lease, size: KvSize) -> None:
        """The sample takes so much now."""
        generator = self._generators[lease.generator_id]
        before = generator.kv.tokens
        generator.kv.put(lease.number, lease.group_id, size)
        if generator.held_back and generator.kv.tokens < before:
            self._touched[generator.generator_id] = None

    def find(self, number: int, *, generator_id: str) -> Lease | None:
        """The lease, if this generator holds it."""
        lease = self._leases.get(number)
        return lease if lease is not None and lease.generator_id == generator_id else None

    def end(self, number: int) -> Lease | None:
        """The lease is over."""
        lease = self._leases.pop(number, None)
        if lease is not None:
            generator = self._generators[lease.generator_id]
            del generator.leases[number]
            generator.kv.remove(number, lease.group_id)
            self.settle(generator)
        return lease


def _patience(*, quickest_s: float, slowest_s: float) -> float:
    """So many times the quickest the next version's are waited for."""
    if slowest_s <= LOAD_PATIENCE * quickest_s:
        return LOAD_PATIENCE
    return min(1.1 * slowest_s / quickest_s, MOST_PATIENCE) if quickest_s else MOST_PATIENCE
