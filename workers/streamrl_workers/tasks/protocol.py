"""What the task pool and its processes say to one another, in frames (`process/framing.py`).

```
  pool ──▶ fork server      a command of fixed size: spawn (with the process's socket) or kill, and the process's number
  pool ──▶ worker           a request of `values.py`: [name of its type, its fields]
  fork server ──▶ pool      once {"ready": {"held_out_size", "fingerprint"}} | {"user_error": parts}; {"exited", "code"} for each process that ended
  worker ──▶ pool           a stage that it enters (a number), any number of times, `first_stage` untold; then one row:
                            [text, reference, demonstration or null] | [values, body, raised] | [observation, reward, done, context] | {"kind", "error"}
  pool ──▶ endpoint client  [number, [task, body]] of a sample that endpoints score
  endpoint client ──▶ pool  [number, values] | [number, {"kind", "error"}]
  pool ──▶ agent host       [number, request] of one prompt or turn; with a pool of agents its item is a third part of it
  agent host ──▶ pool       [number, PLAYING] each time before a program is waited for; then [number, row]
  pool ──▶ item reader      [number, [split, index]]; with a pool of agents alone
  item reader ──▶ pool      [number, MAKING_ITEM] as it begins; then [number, item as JSON text] | [number, {"kind", "error"}]
```
Between a pool of agents and the scheduler the same requests and rows travel as bytes of JSON (`AgentsRequest`, `AgentsAnswer`).
User code can write anything: what does not fit is a `ForeignBytesError`, never a result.
"""

import json
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from streamrl.errors import UserError
from streamrl.spec.tasks.rewards import Reward
from streamrl_workers.process.framing import ForeignBytesError
from streamrl_workers.stream.messages import PROMPT_BYTES
from streamrl_workers.stream.packing import pack_int32, unpack_int32
from streamrl_workers.tasks.values import (
    Demonstration,
    FailureKind,
    NeedPrompts,
    OpenedData,
    PlayTurn,
    Prompt,
    Reference,
    Request,
    Result,
    Score,
    ScoreSample,
    SegmentKind,
    ShownSegment,
    TurnAnswer,
)

MAKING_ITEM = -1
"""Stage: the item is made; stages from 0 are the parts of the reward."""
PLAYING = -2
"""Stage: one call of the environment."""

SPAWN = b"S"
SPAWN_ENDPOINT_CLIENT = b"A"
SPAWN_AGENT_HOST = b"H"
SPAWN_ITEM_READER = b"I"
KILL = b"K"
COMMAND = struct.Struct("<cI")
"""To the fork server: what, and the number of the process."""

MAX_ITEM_BYTES = PROMPT_BYTES
"""Of an item as its agents read it."""
MAX_REFERENCE_CHARS = 16_384
"""Maximum characters of a reference answer, and of an item's metadata: groups in memory hold them until they are scored."""
MAX_FAILURE_CHARS = 1000
"""Maximum characters of a failure's text: each step's line and the status have the first one whole."""
MAX_ROW_BYTES = 2 * PROMPT_BYTES
"""Of a row as JSON: what a program asks has a bound far below it (`agents/endpoint.py`), also with each character escaped."""

_KINDS = frozenset(get_args(FailureKind))
_SEGMENT_KINDS = frozenset(get_args(SegmentKind))
_REQUESTS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Request)}


def opened_data(answer: Any) -> OpenedData:  # noqa: ANN401 - JSON
    """Read the fork server's first answer. Raises `UserError` if it says so, `ForeignBytesError` if it is none."""
    match answer:
        case {"ready": {"held_out_size": int() | None as size, "fingerprint": dict() as found}} if (
            size is None or size >= 0
        ) and all(isinstance(text, str) for text in found.values()):
            return OpenedData(size, found)
        case {"user_error": {"field": str(), "rule": str(), "got": _, "fix": str()} as parts} if len(parts) == _PARTS:
            raise UserError(**parts)
    raise ForeignBytesError("a message says neither that it is ready nor why not")


_PARTS = 4
"""Of a user error."""


def check_exit(notice: Any) -> tuple[int, int]:  # noqa: ANN401 - JSON
    """Number and exit code of a process that has ended. Raises `ForeignBytesError`."""
    match notice:
        case {"exited": int(number), "code": int(code)}:
            return number, code
    raise ForeignBytesError("a message names no process that ended")


_FOR_AGENTS = frozenset({"prompt", "observations", "contexts", "finish_reasons", "token_counts"})
"""Fields that an environment has no use for."""


def worker_message(request: Request) -> list[Any]:
    """One item of work for a worker; of a request for prompts the first is meant."""
    return request_message(request, without=_FOR_AGENTS)


def request_message(request: Request, *, without: Collection[str] = ()) -> list[Any]:
    """The name of its type, and its fields."""
    return [type(request).__name__, {name: getattr(request, name) for name in request.__slots__ if name not in without}]


def decode_request(message: Any) -> Request:  # noqa: ANN401 - JSON
    """The request that the pool sent."""
    name, fields = message
    return _REQUESTS[name](**fields)  # type: ignore[no-any-return]


def first_stage(request: Request) -> int:
    """Stage in which a worker begins without telling: items are mostly there already, and one message less is much for a cheap reward."""
    match request:
        case PlayTurn():
            return PLAYING
        case ScoreSample():
            return 0
    return MAKING_ITEM


def failure(kind: FailureKind, error: str) -> dict[str, str]:
    """The row of a failure."""
    return {"kind": kind, "error": error}


def check_row(request: Request, row: Any, *, rewards: Sequence[Reward]) -> None:  # noqa: ANN401 - JSON
    """Raises `ForeignBytesError` unless `row` answers `request`."""
    if _is_failure(row):
        return
    match row:
        case [str(text), [str() | None as answer, str(metadata)], parts] if isinstance(request, NeedPrompts):
            fits = max(len(answer or ""), len(metadata)) <= MAX_REFERENCE_CHARS
            if fits and all(map(_is_text, (text, answer or "", metadata))) and (parts is None or _is_shown(parts)):
                return
        case [list(values), str() | None as body, str() | None as raised] if isinstance(request, ScoreSample) and len(
            values
        ) == len(rewards):
            asked = [reward.http is not None for reward in rewards]
            if (
                (body is not None) == any(asked)
                and _is_text(body or "")
                and _is_text(raised or "")
                and all(value is None if ask else is_finite(value) for ask, value in zip(asked, values, strict=True))
            ):
                return
        case [str(text), reward, bool(), bool(context)] if isinstance(request, PlayTurn) and is_finite(reward):
            if _is_text(text) and not (context and len(text.encode()) > PROMPT_BYTES):
                return
    raise ForeignBytesError("a message is no answer to what was asked")


def agent_row(request: Request, row: Any) -> Any:  # noqa: ANN401 - JSON
    """What the agent host answered. One that does not fit is that item's failure: all others are with the same host."""
    try:
        check_row(request, row, rewards=())
    except ForeignBytesError:
        rule = f"a text in UTF-8, at most {PROMPT_BYTES} bytes where it begins a context, and a finite reward"
        return failure("bad_value", f"agent: what it made is no answer: {rule}")
    return row


def item_row(row: Any) -> Any:  # noqa: ANN401 - JSON
    """What the item reader answered. Raises `ForeignBytesError` for anything else."""
    if _is_failure(row) or (isinstance(row, str) and len(row) <= MAX_ITEM_BYTES):
        return row
    raise ForeignBytesError("a message is no item")


def _is_failure(row: Any) -> bool:  # noqa: ANN401 - JSON
    """Return whether this is the row of a failure."""
    match row:
        case {"kind": str(kind), "error": str(text), **rest}:
            return kind in _KINDS and len(text) <= MAX_FAILURE_CHARS and _is_text(text) and not rest
    return False


def prompt_row(
    text: str, *, answer: str | None, metadata: Mapping[str, Any], shown: Demonstration | None = None
) -> list[Any]:
    """The row of a prompt."""
    said = _shortened(json.dumps(dict(metadata), ensure_ascii=False, default=str)) if metadata else ""
    reference = [None if answer is None else _shortened(answer), said]
    return [text, reference, None if shown is None else demonstration_row(shown)]


def _shortened(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()  # no message carries surrogates
    return text if len(text) <= MAX_REFERENCE_CHARS else f"{text[: MAX_REFERENCE_CHARS - 1]}…"


def demonstration_row(shown: Demonstration) -> list[Any]:
    """As JSON carries it."""
    prompt, tokens = unpack_int32(shown.prompt_tokens).tolist(), unpack_int32(shown.tokens).tolist()
    return [prompt, tokens, shown.segments, shown.truncated, shown.reward, shown.weight]


def _is_shown(parts: Any) -> bool:  # noqa: ANN401 - JSON
    """Whether these are the parts of a demonstration."""
    match parts:
        case [list(prompt), list(tokens), list(segments), bool(), reward, weight]:
            return (
                is_finite(reward)
                and is_finite(weight)
                and all(
                    row and all(type(token) is int and 0 <= token < 2**31 for token in row) for row in (prompt, tokens)
                )
                and all(_is_segment(segment) for segment in segments)
                and sum(segment[1] for segment in segments) == len(tokens)
            )
    return False


def _is_segment(parts: Any) -> bool:  # noqa: ANN401 - JSON
    match parts:
        case [str(text), int(count), str(kind), reward]:
            known = kind in _SEGMENT_KINDS and (reward is None or is_finite(reward))
            return _is_text(text) and count >= 0 and known
    return False


def _demonstration(parts: Any) -> Demonstration:  # noqa: ANN401 - checked parts
    prompt, tokens, segments, truncated, reward, weight = parts
    return Demonstration(
        prompt_tokens=pack_int32(prompt),
        tokens=pack_int32(tokens),
        segments=tuple(ShownSegment(*segment) for segment in segments),
        truncated=truncated,
        reward=reward,
        weight=weight,
    )


def _is_text(text: str) -> bool:
    """Whether messages can carry it: frames can hold half of a surrogate pair, ours never do."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_finite(value: object) -> bool:
    """Whether it can be a reward."""
    return isinstance(value, float) and math.isfinite(value)


def result_of(request: Request, row: Any, *, rewards: Sequence[Reward]) -> Result:  # noqa: ANN401 - a checked row
    """What the scheduler hears. Raises `UserError` if a prompt cannot be made, or is too large."""
    match request:
        case ScoreSample():
            return _score(request, row, rewards=rewards)
        case PlayTurn():
            return _turn_answer(request, row)
        case NeedPrompts(split=split, first_index=index):
            if isinstance(row, dict):
                raise UserError(field="spec.task", rule=f"{split} prompt {index} cannot be made: {row['error']}")
            if (size_bytes := len(row[0].encode())) > PROMPT_BYTES:
                rule = f"{split} prompt {index} must have at most {PROMPT_BYTES} bytes"
                raise UserError(field="spec.task", rule=rule, got=size_bytes, fix="shorten it or leave it out")
            shown = None if row[2] is None else _demonstration(row[2])
            return Prompt(split=split, index=index, text=row[0], demonstration=shown, reference=Reference(*row[1]))


def _score(request: ScoreSample, row: Any, *, rewards: Sequence[Reward]) -> Score:  # noqa: ANN401
    group_id, sample_index = request.group_id, request.sample_index
    if isinstance(row, dict):
        return Score(group_id=group_id, sample_index=sample_index, reward=None, parts={}, **row)
    parts = {reward.name: value for reward, value in zip(rewards, row[0], strict=True)}
    total = sum((reward.weight_percent / 100 * parts[reward.name] for reward in rewards), start=0.0)
    score = Score(group_id=group_id, sample_index=sample_index, reward=total, parts=parts)
    return score if row[2] is None else replace(score, kind="verifier_raised", error=row[2])


def _turn_answer(request: PlayTurn, row: Any) -> TurnAnswer:  # noqa: ANN401
    answer = TurnAnswer(group_id=request.group_id, sample_index=request.sample_index, lease=request.lease)
    if isinstance(row, dict):
        return replace(answer, **row)
    observation, reward, done, context = row
    return replace(answer, observation=observation, reward=reward, done=done, context=context)
