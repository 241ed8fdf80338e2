"""What a peer may say, and what it is told in bytes: bounds of each event before it reaches the core, groups as they lie in memory.

Owns the bounds of fields, by their kind, and of whole messages. Does not own what only the core can know: whether tokens
fit the request that they are for (`scheduler/sample.py`), whether a step fits the trainer's history (`history.py`).

Invariant: what passes raises nowhere behind this door, for its size, its encoding or its numbers.
"""

import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.process.silences import MOST_CHARS, MOST_NOTICES
from streamrl_workers.scheduler.effects import DeliverGroup
from streamrl_workers.stream.messages import MESSAGE_BYTES, PROMPT_BYTES, STATES_BYTES, Joiner, ProtocolError
from streamrl_workers.stream.packing import BATCH_BYTES, batches
from streamrl_workers.tasks.protocol import MAX_ROW_BYTES

Frames = AsyncIterator[bytes]
"""Serialized, as a server reads them."""

LIMIT_BYTES = 128 * 2**20
"""Commands that wait for a peer, beside the requests that its slots may hold."""
HELLO_BYTES = 64 * 2**10
"""First message of a generator."""
MAX_SLOTS = 65_536
"""As the specification has it."""
_TEXT_BYTES = 64 * 2**10
"""An error, an address, a path."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
"""Process names, instances, pools: they stand in logs, metrics and pages."""
_NAMES = frozenset({"generator_id", "trainer_id", "host_id", "instance", "pool"})
_FREE_NUMBERS = frozenset({"metrics"})
"""What an optimiser gives may be infinite."""
_HASHES = frozenset({"hash", "engine_hash", "version_hash", "prompt_hash"})
_HASH_BYTES = 64
_ITEMS = 2**17
"""In a list: groups of a step, spans of a sample, samples in a message."""
_ENTRIES = 512
"""In a map: parts of the wall, buckets of batches, metrics."""
_KEY_CHARS = 128
_NUMBER = 1e12
"""Seconds, mostly: sums of them are still numbers."""
_INTEGER = 2**63 - 1
"""Steps and groups go into the journal, whose integers are signed."""
_TOKEN_BYTES = 4
_BYTES_PER_TOKEN = 512
"""Of a finished completion: id, log-prob, span and text."""
_BYTES_PER_GROUP = 64
"""Of what the trainer says of the groups of a step, in its hello twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Of one job."""

    max_tokens: int
    batch_groups: int
    resamples: bool = False
    """Whether the trainer names states of turns."""
    newest_step: Callable[[], int]
    """Newest weight version that a generator can have."""

    async def generator_events(self, frames: Frames) -> AsyncIterator[pb.GeneratorEvent | None]:
        """What a generator says; None: a part of it, which counts as a sign of life.

        Raises:
            ProtocolError: it may not say that.
        """
        joiner = Joiner(pb.GeneratorEvent, limit_bytes=HELLO_BYTES)
        async for event in joiner.messages(frames):
            if event is not None:
                check_generator(event, newest_step=self.newest_step())
                joiner.limit_bytes = self.generator_limit_bytes
            yield event

    async def trainer_events(self, frames: Frames) -> AsyncIterator[pb.TrainerEvent]:
        """What the trainer says. Raises as `generator_events`."""
        async for event in Joiner(pb.TrainerEvent, limit_bytes=self.trainer_limit_bytes).messages(frames):
            if event is not None:
                check_trainer(event)
                yield event

    async def agents_events(self, frames: Frames) -> AsyncIterator[pb.AgentsEvent]:
        """What the link of an agent host says. Raises as `generator_events`."""
        joiner = Joiner(pb.AgentsEvent, limit_bytes=HELLO_BYTES)
        async for event in joiner.messages(frames):
            if event is not None:
                _check(event)
                if event.HasField("hello"):
                    _require(event.hello.host_id and event.hello.instance, "a hello must name its host_id and instance")
                messages = event.silences.messages
                bounded = len(messages) <= MOST_NOTICES and all(len(one) <= MOST_CHARS for one in messages)
                _require(bounded, f"at most {MOST_NOTICES} silences of {MOST_CHARS} characters may be named")
                joiner.limit_bytes = MAX_ROW_BYTES + HELLO_BYTES
                yield event

    @property
    def generator_limit_bytes(self) -> int:
        """Largest message of a generator: a batch, or one completion with its prompt's tokens."""
        return min(MESSAGE_BYTES, 2 * BATCH_BYTES + _TOKEN_BYTES * PROMPT_BYTES + _BYTES_PER_TOKEN * self.max_tokens)

    @property
    def trainer_limit_bytes(self) -> int:
        """Largest message of the trainer: its hello with the groups that it has, and the states of a step without a record."""
        return BATCH_BYTES + _BYTES_PER_GROUP * self.batch_groups + STATES_BYTES * self.resamples

    def waiting_bytes(self, *, slots: int) -> int:
        """Commands that may wait for a generator: one request for each slot, and what else there is to say."""
        return LIMIT_BYTES + slots * (PROMPT_BYTES + _TOKEN_BYTES * self.max_tokens)


def check_generator(event: pb.GeneratorEvent, *, newest_step: int) -> None:
    """Raises ProtocolError where the event may not pass."""
    if event.HasField("progress"):
        _check_progress(event.progress)
        return
    _check(event)
    if event.HasField("hello"):
        hello = event.hello
        _require(hello.generator_id and hello.instance, "a hello must name its generator_id and instance")
        _require(hello.slots >= 1, "a generator must have at least one slot")
        _require(hello.slots <= MAX_SLOTS, f"a generator may have at most {MAX_SLOTS} slots")
        _require(
            not hello.HasField("kv_capacity_tokens") or hello.kv_capacity_tokens, "keys and values of no token fit"
        )
        _check_version(hello.version.step, newest_step=newest_step)
    elif event.HasField("weights_loaded"):
        _check_version(event.weights_loaded.version.step, newest_step=newest_step)


def check_trainer(event: pb.TrainerEvent) -> None:
    """Raises ProtocolError where the event may not pass."""
    _check(event)
    if event.HasField("hello"):
        _require(event.hello.trainer_id and event.hello.instance, "a hello must name its trainer_id and instance")
    elif event.HasField("checkpointed"):
        oldest, newest = event.checkpointed.oldest_step, event.checkpointed.step
        _require(oldest <= newest, f"oldest checkpoint of step {oldest}, newest of step {newest}")


def _check_progress(batch: pb.ProgressBatch) -> None:
    """Most of all events, so quickly; the rest of it is held against its request (`sample.py`)."""
    for item in batch.items:
        if item.error:
            _check_value("error", item.error)
        if len(item.spans) > _ITEMS or not abs(item.generate_s) <= _NUMBER:
            raise ProtocolError(f"progress of {len(item.spans)} versions in {item.generate_s} s")


def _check_version(step: int, *, newest_step: int) -> None:
    _require(step <= newest_step, f"weights of version {step}, the newest is {newest_step}")


def _check(message: Message) -> None:
    """Every field that is there."""
    for field, value in message.ListFields():
        if _is_map(field):
            _check_map(field, value)
        elif isinstance(value, str | bytes | int | float):
            _check_value(field.name, value)
        elif isinstance(value, Message):
            _check(value)
        else:
            _check_list(field, value)


def _check_list(field: FieldDescriptor, values: Any) -> None:  # noqa: ANN401 - protobuf's containers have no common type
    _require(len(values) <= _ITEMS, f"{field.name} of {len(values)} items, at most {_ITEMS} may be")
    if field.message_type is not None:
        for value in values:
            _check(value)
    else:
        for value in values:
            _check_value(field.name, value)


def _check_map(field: FieldDescriptor, values: Any) -> None:  # noqa: ANN401 - as above
    _require(len(values) <= _ENTRIES, f"{field.name} of {len(values)} entries, at most {_ENTRIES} may be")
    for key, value in values.items():
        _require(len(str(key)) <= _KEY_CHARS, f"{field.name} with a key of {len(str(key))} characters")
        if isinstance(value, Message):
            _check(value)
        elif field.name not in _FREE_NUMBERS:
            _check_value(field.name, value)


def _check_value(name: str, value: str | bytes | float) -> None:
    if isinstance(value, str):
        if name in _NAMES:
            _require(_NAME.fullmatch(value), f"{name} of {len(value)} characters, it must match {_NAME.pattern}")
        else:
            size_bytes = len(value.encode())
            _require(size_bytes <= _TEXT_BYTES, f"{name} of {size_bytes} bytes, at most {_TEXT_BYTES} may be")
    elif isinstance(value, bytes):
        _require(name not in _HASHES or len(value) <= _HASH_BYTES, f"{name} of {len(value)} bytes")
    elif isinstance(value, float):
        _require(abs(value) <= _NUMBER, f"{name} of {value:g}, at most {_NUMBER:g} may be")  # nor is NaN
    else:
        _require(value <= _INTEGER, f"{name} of {value}, at most {_INTEGER} may be")


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _require(holds: object, otherwise: str) -> None:
    if not holds:
        raise ProtocolError(otherwise)


_LENGTH_DELIMITED = 2
"""Wire type of strings, bytes and messages."""
_GROUP_TAG = bytes([pb.TrainerCommand.GROUP_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])
_SAMPLE_TAG = bytes([pb.Group.SAMPLES_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])


def group_commands(effect: DeliverGroup) -> Iterator[bytes]:
    """The serialized `TrainerCommand`s that hand a group over, in parts of some samples each."""
    parts = list(batches(effect.trajectories, size_bytes=len)) or [[]]
    for number, part in enumerate(parts, start=1):
        yield _part(effect, part, more=number < len(parts))


def _part(effect: DeliverGroup, trajectories: Iterable[bytes], *, more: bool) -> bytes:
    head = pb.Group(group_id=effect.group_id, step=effect.step, size_bytes=effect.size_bytes, more=more)
    parts = [head.SerializeToString()]
    for data in trajectories:
        parts += (_SAMPLE_TAG, _varint(len(data)), data)
    return b"".join((_GROUP_TAG, _varint(sum(map(len, parts))), *parts))


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - seven bits a byte
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)
