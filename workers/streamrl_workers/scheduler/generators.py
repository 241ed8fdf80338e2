"""The connected generators, what each holds, and what that takes of its memory.

Owns leases: which sample is with which generator, under which number. A lease ends once: the sample finishes, or the lease is revoked
(the generator left, did not answer for a lease, or came back as a new process). Numbers are never used twice, not even by a later
scheduler, so late messages about an old lease are recognized. Owns the estimate of memory for keys and values, and the measured speed of
each pool (`dispatch/speeds.py`). Owns nothing of groups: `rollout.py` decides what a lost lease means for its sample.

Memory, in tokens: a sample counts as its prompt and the larger of two values: the length that three of four completions of the run do not
exceed (a quarter of maxTokens before the first completion), and an eighth more than it has; never more than maxTokens allow. An engine
that shares prompts holds a group's prompt once. Tokens of a prompt that no generator has tokenized are estimated from its characters.

Invariant: a generator that holds nothing takes any sample. Only its engine knows whether the sample fits, and refuses one that never will;
so no sample waits for room that cannot come.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from streamrl.latency import LatencyCurve
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.dispatch.speeds import Curves, Reading
from streamrl_workers.scheduler.lengths import Lengths

Version = tuple[int, int]
"""Attempt, step."""

LOAD_PATIENCE, MOST_PATIENCE, LOAD_GRACE_S = 2.0, 4.0, 0.5
"""A generator is expected to have loaded a version after this multiple of the quickest generator's time, plus the seconds. The multiple
rises with the slowest generator's time for the version before, with a tenth on top, up to the second number."""
IDLE_CAUSES = ("no_prompts", "staleness", "scoring", "back_pressure", "no_weights", "phase", "ended")
"""Why a generator with a free slot gets nothing."""

_TYPICAL_PLACE = 0.75
"""In the distribution of completion lengths. Most samples are far from their end, so their sum stays below it."""
_TYPICAL_SHARE = 0.25
"""Share of maxTokens that is assumed before a completion has finished."""
_GROWTH = 8
"""A sample of n tokens counts as n + n/8, because it is not at its end."""


class KvSize(NamedTuple):
    """Tokens of one sample in a generator's memory."""

    prompt: int
    completion: int


@dataclass(slots=True, kw_only=True)
class KvBook:
    """Memory of one generator."""

    capacity_tokens: int | None
    """None: the engine has no bound."""
    shares_prompts: bool = False
    tokens: int = 0
    """Tokens that its samples are expected to take."""
    _sizes: dict[int, KvSize] = field(default_factory=dict)
    """By lease."""
    _prompts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Tokens of a prompt, and leases that hold it. By group if prompts are shared, else by lease."""

    def fits(self, group_id: int, size: KvSize) -> bool:
        """Return whether one more sample fits beside the others."""
        if self.capacity_tokens is None or not self._sizes:
            return True
        prompt = 0 if self.shares_prompts and group_id in self._prompts else size.prompt
        return self.tokens + prompt + size.completion <= self.capacity_tokens

    def put(self, lease: int, group_id: int, size: KvSize) -> None:
        """Add a sample, or change its size."""
        old = self._sizes.get(lease)
        key = group_id if self.shares_prompts else lease
        known, leases = self._prompts.get(key, (0, 0))
        self.tokens += size.completion - (0 if old is None else old.completion) + size.prompt - known
        self._sizes[lease] = size
        self._prompts[key] = size.prompt, leases + (old is None)

    def remove(self, lease: int, group_id: int) -> None:
        """Remove a sample."""
        self.tokens -= self._sizes.pop(lease).completion
        key = group_id if self.shares_prompts else lease
        known, leases = self._prompts.pop(key)
        if leases > 1:
            self._prompts[key] = known, leases - 1
        else:
            self.tokens -= known


class KvEstimate:
    """What a sample is expected to take."""

    def __init__(self, lengths: Lengths, *, max_tokens: int) -> None:
        self._completions = lengths.completions
        self._max_tokens = max_tokens
        self._typical: tuple[int, int] = 0, int(max_tokens * _TYPICAL_SHARE)
        """Completions that were known, and their typical tokens."""
        self._chars = self._tokens = 0
        """Of the prompts that have been tokenized."""

    def learn(self, prompt: str, *, tokens: int) -> None:
        """Note that a generator has tokenized a prompt."""
        self._chars += len(prompt)
        self._tokens += tokens

    def size(self, prompt: str, *, prompt_tokens: int | None, tokens: int, context: int, coming: str = "") -> KvSize:
        """Return the expected size of a sample.

        Args:
            prompt: text of the group's prompt.
            prompt_tokens: tokens of the prompt; None: unknown.
            tokens: tokens of the sample so far.
            context: tokens before the turn under way, included in `tokens`.
            coming: the prompt of a later context, which has no tokens yet.
        """
        if prompt_tokens is None:
            prompt_tokens = self._guess(prompt)
        if coming:
            tokens, context = tokens + self._guess(coming), context + self._guess(coming)
        most = max(tokens, context + self._max_tokens)
        return KvSize(prompt_tokens, min(max(self._typical_tokens(), tokens + tokens // _GROWTH + 1), most))

    def _typical_tokens(self) -> int:
        if self._completions.seen != self._typical[0]:
            self._typical = self._completions.seen, int(self._completions.at(_TYPICAL_PLACE))
        return self._typical[1]

    def _guess(self, text: str) -> int:
        return -(-len(text) * self._tokens // self._chars) if self._chars else len(text)


class WorkSource(Protocol):
    """What a slot can work for, such as training samples or evaluation."""

    def progress(self, lease: "Lease", item: pb.Progress) -> None:
        """Take what a generator reports about one lease."""

    def lost(self, lease: "Lease") -> None:
        """Take back the sample of a lease that is revoked."""


@dataclass(slots=True)
class Lease:
    """One sample with one generator."""

    number: int
    generator_id: str
    group_id: int
    sample_index: int
    version_step: int
    """Version of the generator at issue: the sample's new tokens are of this version or a newer one."""
    source: WorkSource
    moves: int = 0
    """How often the sample was moved to another generator since it was last taken from the queue."""


@dataclass(slots=True, kw_only=True)
class LoadState:
    """Weights of one generator: the version that it has, and the one that was announced to it."""

    version: Version | None
    announced: Version | None = None
    """Version that was last announced to it."""
    announced_s: float = 0.0
    address: str = ""
    """Where that version is, as announced."""
    highest_announced: int = -1
    """Highest step of a version that it may still load."""
    failed: bool = False
    """It could not load the announced version; the next tick announces it again."""

    @property
    def highest_step(self) -> int:
        """Highest step of a version that it has, or may still load without a new announcement."""
        return self.highest_announced if self.version is None else max(self.version[1], self.highest_announced)

    @property
    def is_loading(self) -> bool:
        """Whether it has weights and may still load newer ones without a new announcement."""
        return self.version is not None and self.highest_announced > self.version[1]


@dataclass(slots=True, kw_only=True)
class Reported:
    """The newest report to a generator about its work."""

    idle_cause: str = ""
    """Empty: it has work."""
    queue_waits: bool | None = None
    """Whether samples wait for its pool."""


PoolUse = Literal["any", "reserved", "shared"]
"""Any work; only the work of an extension; any work, but paused now and then, so that no order and no evaluation relies on it."""


@dataclass(slots=True, kw_only=True)
class Generator:
    """One connected generator."""

    generator_id: str
    pool: str
    slots: int
    cluster: str = ""
    """Empty: the trainer's cluster."""
    use: PoolUse = "any"
    kv: KvBook
    weights: LoadState
    leases: dict[int, Lease] = field(default_factory=dict)
    last_seen_s: float
    unresponsive: bool = False
    """It has sent nothing for a lease: it holds nothing and gets nothing until it does."""
    leaving: bool = False
    """It finishes what it holds and takes nothing more."""
    paused: bool = False
    """The trainer computes on its devices: it keeps what it holds, and gets nothing."""
    held_back: bool = False
    """At the last assignment it had a free slot, but no memory for the next sample."""
    reported: Reported = field(default_factory=Reported)

    @property
    def step(self) -> int | None:
        """Step of its weight version; None: it has no weights."""
        return None if self.weights.version is None else self.weights.version[1]

    @property
    def serves(self) -> bool:
        """Whether it takes samples, now or when a slot becomes free."""
        return not (self.unresponsive or self.leaving)

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
        reserved_pools: Collection[str] = (),
        shared_pools: Collection[str] = (),
        epoch_s: float = 0.0,
    ) -> None:
        """Make an empty fleet.

        Args:
            first_lease: number of the first lease.
            curves: what is known of the pools' speed; None: nothing.
            reserved_pools: pools that work for an extension alone.
            shared_pools: pools that are paused now and then, some of all.
            epoch_s: Unix time at which `now_s` is 0.
        """
        self._uses: dict[str, PoolUse] = {
            **dict.fromkeys(shared_pools, "shared"),
            **dict.fromkeys(reserved_pools, "reserved"),
        }
        self._next_lease = first_lease
        self.curves = Curves() if curves is None else curves
        """Measured speed of the pools."""
        self.connected: dict[str, Generator] = {}
        """All generators, by id."""
        self.leases: dict[int, Lease] = {}
        """Number -> lease."""
        self.free: dict[str, Generator] = {}
        """Generators for any work that have free slots."""
        self.free_reserved: dict[str, Generator] = {}
        """Generators of reserved pools that have free slots."""
        self._reserved = 0
        self._counted: set[str] = set()
        """Generators that served when `changes` last rose for them."""
        self.touched: dict[str, None] = {}
        """Generators whose slots or versions have changed since the last assignment, in order."""
        self.reissued = 0
        """Samples that were issued again because their generator was lost."""
        self.changes = 0
        """Rises when a generator starts or stops serving."""
        self.now_s = 0.0
        """Time of the newest event that came with a time."""
        self.epoch_s = epoch_s
        self._loading: dict[str, Generator] = {}
        """Generators that do not have the announced version yet."""
        self._quickest: tuple[Version, float] | None = None
        """The newest version that a generator has loaded, and the seconds of the quickest."""
        self._slowest_s = 0.0
        """Seconds of the slowest generator for that version."""
        self._patience = LOAD_PATIENCE
        self._readings: dict[str, Reading] = {}
        """Newest heartbeat by generator."""

    def __iter__(self) -> Iterator[Generator]:
        """Iterate over generators for any work."""
        return (generator for generator in self.connected.values() if generator.use != "reserved")

    def __len__(self) -> int:
        return len(self.connected) - self._reserved

    def join(self, hello: pb.GeneratorHello, *, now_s: float) -> Generator:
        """Add a generator that has said hello; it holds nothing."""
        self.now_s = now_s
        assert hello.generator_id not in self.connected, f"{hello.generator_id} is here already"
        capacity = hello.kv_capacity_tokens if hello.HasField("kv_capacity_tokens") else None
        version = (hello.version.attempt, hello.version.step) if hello.HasField("version") else None
        generator = Generator(
            generator_id=hello.generator_id,
            pool=hello.pool,
            slots=hello.slots,
            cluster=hello.cluster,
            use=self._uses.get(hello.pool, "any"),
            kv=KvBook(capacity_tokens=capacity, shares_prompts=hello.shares_prompts),
            weights=LoadState(version=version),
            last_seen_s=now_s,
        )
        self.connected[hello.generator_id] = generator
        self._reserved += generator.use == "reserved"
        self.settle(generator)
        return generator

    def remove(self, generator_id: str) -> None:
        """Remove a generator; its leases were revoked before."""
        generator = self.connected.pop(generator_id)
        self.changes += generator_id in self._counted
        self._reserved -= generator.use == "reserved"
        self._counted.discard(generator_id)
        for known in (self._loading, self.free, self.free_reserved, self._readings):
            known.pop(generator_id, None)

    def seen(self, generator_id: str, *, now_s: float) -> Generator | None:
        """Note that the generator has sent something; None: it is not connected."""
        self.now_s = now_s
        generator = self.connected.get(generator_id)
        if generator is not None:
            generator.last_seen_s = now_s
            if generator.unresponsive:
                generator.unresponsive = False
                self.settle(generator)
        return generator

    def settle(self, generator: Generator) -> None:
        """Update what depends on the generator's slots and version."""
        name = generator.generator_id
        if generator.use == "reserved":
            free, is_ready = self.free_reserved, generator.step is not None
        else:
            free, is_ready = self.free, True
            self.touched[name] = None
            if (name in self._counted) is not generator.serves:
                self.changes += 1
                (self._counted.add if generator.serves else self._counted.discard)(name)
        if generator.free > 0 and is_ready:
            free[name] = generator
        else:
            free.pop(name, None)

    # ---- weights

    def loaded(self, generator: Generator, version: Version) -> None:
        """Note that the generator has the version."""
        weights = generator.weights
        if weights.announced == version:
            self._measure_load(self.now_s - weights.announced_s, version=version)
            self._loading.pop(generator.generator_id, None)
        weights.version = version
        self.settle(generator)

    def announce(self, generator: Generator, version: Version) -> None:
        """Note that the version is announced to the generator."""
        weights = generator.weights
        weights.announced, weights.announced_s = version, self.now_s
        weights.highest_announced = version[1]
        self._loading[generator.generator_id] = generator

    def coming(self) -> dict[str, Generator]:
        """Return those with free slots that still load what others have loaded, for not much longer than the quickest took."""
        if self._quickest is None or not self._loading:
            return {}
        version, took_s = self._quickest
        since_s = self.now_s - self._patience * took_s - LOAD_GRACE_S
        return {
            name: generator
            for name, generator in min(self._loading, self.free, key=len).items()
            if generator.free > 0
            and generator.weights.announced == version != generator.weights.version
            and not generator.weights.failed
            and generator.weights.announced_s >= since_s
        }

    def _measure_load(self, seconds: float, *, version: Version) -> None:
        """Note the time of one load. The first of a version shows how far apart the loads of the version before were."""
        if self._quickest is None or self._quickest[0] != version:
            if self._quickest is not None:
                self._patience = _patience(quickest_s=self._quickest[1], slowest_s=self._slowest_s)
            self._quickest, self._slowest_s = (version, seconds), seconds
        self._quickest = (version, min(seconds, self._quickest[1]))
        self._slowest_s = max(seconds, self._slowest_s)

    # ---- speed

    def heartbeat(self, generator: Generator, reading: Reading) -> None:
        """Take the generator's speed from a heartbeat."""
        before = self._readings.get(generator.generator_id)
        if before is not None:
            self.curves.observe(generator.pool, before=before, now=reading)
        self._readings[generator.generator_id] = reading

    def curve(self, generator: Generator) -> LatencyCurve:
        """Return the seconds of its decoding step by active samples, as far as known."""
        return self.curves.curve(generator.pool, slots=generator.slots)

    def measured(self, generator: Generator) -> bool:
        """Return whether the curve comes from enough heartbeats of the pool."""
        return self.curves.measured(generator.pool)

    def offer(self, generator: Generator, *, more: int = 0) -> tuple[float, float, str]:
        """Return how fast one more sample would run there, beside `more` others; the smallest is served first, of equal ones the emptier."""
        active = len(generator.leases) + more
        return self.curve(generator).at(active + 1), active / generator.slots, generator.generator_id

    # ---- leases

    def lend(
        self,
        generator: Generator,
        *,
        group_id: int,
        sample_index: int,
        size: KvSize,
        source: WorkSource,
        moves: int = 0,
    ) -> Lease:
        """Make a lease for a sample that goes to the generator; `size`: what it takes of the memory, `moves`: as in `Lease`."""
        assert generator.step is not None, "a generator without weights gets no samples"
        lease = Lease(self._next_lease, generator.generator_id, group_id, sample_index, generator.step, source, moves)
        self._next_lease += 1
        generator.leases[lease.number] = lease
        generator.kv.put(lease.number, group_id, size)
        self.leases[lease.number] = lease
        generator.reported.idle_cause = ""
        self.settle(generator)
        return lease

    def resize(self, lease: Lease, size: KvSize) -> None:
        """Change what the sample takes of the memory."""
        generator = self.connected[lease.generator_id]
        before = generator.kv.tokens
        generator.kv.put(lease.number, lease.group_id, size)
        if generator.held_back and generator.kv.tokens < before:
            self.touched[generator.generator_id] = None

    def end(self, number: int) -> Lease | None:
        """End the lease; None: it is over already."""
        lease = self.leases.pop(number, None)
        if lease is not None:
            generator = self.connected[lease.generator_id]
            del generator.leases[number]
            generator.kv.remove(number, lease.group_id)
            self.settle(generator)
        return lease


def _patience(*, quickest_s: float, slowest_s: float) -> float:
    """Return for how many times the quickest load of a version the others are waited for."""
    if slowest_s <= LOAD_PATIENCE * quickest_s:
        return LOAD_PATIENCE
    return min(1.1 * slowest_s / quickest_s, MOST_PATIENCE) if quickest_s else MOST_PATIENCE
