"""Protocol messages put together from parts that are serialized already.

A group's samples lie in memory as the bytes that the journal holds. A message field that holds
messages is nothing but tag, length and those bytes, so they are joined as they are: parsing them
into a `Group` and serializing it again would be most of what the scheduler does for each byte.
"""

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.effects import HandGroup

_LENGTH_DELIMITED = 2
"""Wire type of strings, bytes and messages."""
_GROUP_TAG = bytes([pb.TrainerCommand.GROUP_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])
_TRAJECTORY_TAG = bytes([pb.Group.TRAJECTORIES_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])


def group_command(effect: HandGroup) -> bytes:
    """The serialized `TrainerCommand` that hands a group over."""
    head = pb.Group(group_id=effect.group_id, step=effect.step, size_bytes=effect.size_bytes).SerializeToString()
    parts = [head]
    for data in effect.trajectories:
        parts += (_TRAJECTORY_TAG, _varint(len(data)), data)
    return b"".join((_GROUP_TAG, _varint(sum(map(len, parts))), *parts))


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - seven bits a byte
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)
