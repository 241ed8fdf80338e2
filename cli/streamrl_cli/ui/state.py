"""What happened in a run, and what its scheduler says while it goes on: events, dispatch and why, versions and who holds them."""

import time
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from streamrl import keys
from streamrl.errors import UserError
from streamrl_cli.reporting.data import Count, EvaluationRecord, Number, RunData
from streamrl_cli.runner.folder import RunFolder
from streamrl_cli.runner.progress import (
    bubble_shares,
    fetch_from,
    format_count,
    format_number,
    held_out_text,
    signals_address,
    warning_texts,
)
from streamrl_workers.metrics.bubbles import Part

Row = tuple[str, ...]
_LAX = ConfigDict(strict=True, allow_inf_nan=False)
_MOST_EVENTS = 500
MOST_ROWS = 200
_MOST_CELL_CHARS = 2000
Text = Annotated[str, Field(max_length=500)]
Sentence = Annotated[str, Field(max_length=4000)]


@with_config(_LAX)
class ProcessStatus(TypedDict):
    """A generator or the trainer."""

    id: Text
    bubbles: dict[Part, Number]
    wall_s: Number
    pool: NotRequired[Text]
    slots: NotRequired[Count]
    active: NotRequired[Count]
    version: NotRequired[int | None]


@with_config(_LAX)
class DispatchStatus(TypedDict):
    """The order in force."""

    why: Text
    longest_first: bool
    long_generators: list[Text]
    pools: dict[Text, dict[str, Any]]


@with_config(_LAX)
class WarningStatus(TypedDict):
    """What a person should look at."""

    type: NotRequired[Text]
    message: Sentence


@with_config(_LAX)
class RunStatus(TypedDict):
    """What is shown of the scheduler's status."""

    attempt: Count
    step: Count
    steps: Count
    queue: Count
    running: Count
    announced_step: int | None
    checkpoint_step: int | None
    groups: dict[Text, Count]
    generators: list[ProcessStatus]
    trainer: ProcessStatus | None
    dispatch: NotRequired[DispatchStatus]
    lengths: NotRequired[dict[str, Any]]
    cost: NotRequired[Number]
    warnings: NotRequired[list[WarningStatus]]
    score_failures: NotRequired[dict[Text, Count]]
    score_errors: NotRequired[dict[Text, Sentence]]
    last_evaluation: NotRequired[EvaluationRecord | None]


@with_config(_LAX)
class CurvePoint(TypedDict):
    """A step of a curve."""

    step: Count
    reward_mean: Number | None
    tasks: NotRequired[dict[Text, dict[Text, Number | None]]]
    tokens_per_s: NotRequired[Number | None]
    bubbles: NotRequired[dict[Literal["generators", "trainer"], dict[Part, Number] | None]]


@with_config(_LAX)
class RunCurves(TypedDict):
    """The course of a run, as its scheduler tells it."""

    steps: list[CurvePoint]
    evaluations: list[EvaluationRecord]


_STATUS = TypeAdapter(RunStatus)
_CURVES = TypeAdapter(RunCurves)


def read_status(folder: RunFolder) -> RunStatus | None:
    """What the scheduler says now; None: it says nothing, or nothing that can be believed."""
    try:
        address = None if folder.result() is not None else signals_address(folder)
        return None if address is None else checked_status(fetch_from(address))
    except UserError:
        return None


def run_warnings(folder: RunFolder, status: RunStatus | None) -> list[str]:
    """Return the messages of the warnings of a run that hold."""
    try:
        silent = {} if folder.result() is not None else folder.silences()
    except UserError:
        silent = {}
    return list(islice(warning_texts(dict(status or {}), silent=silent), MOST_ROWS))


def checked_status(page: object) -> RunStatus | None:
    """What a scheduler's page says; None: it is none."""
    try:
        return None if page is None else _STATUS.validate_python(page)
    except ValidationError:
        return None


def checked_curves(page: object) -> RunCurves | None:
    """The same, of its curves."""
    try:
        return None if page is None else _CURVES.validate_python(page)
    except ValidationError:
        return None


def holders(status: RunStatus) -> Iterator[Row]:
    """(process, pool, version, versions behind, active of slots, busy) of each that holds a version."""
    newest = status["announced_step"]
    for one in status["generators"]:
        version = one.get("version")
        behind = "–" if version is None or newest is None else str(newest - version)
        held, slots = "–" if version is None else str(version), f"{one.get('active', 0)} / {one.get('slots', 0)}"
        yield one["id"], one.get("pool", ""), held, behind, slots, _busy(one)
    if (trainer := status["trainer"]) is not None:
        yield trainer["id"], "trainer", str(status["step"]), "–", "–", _busy(trainer)


def status_tables(status: RunStatus) -> dict[str, Any]:
    """What pages show of it beside its numbers."""
    return {
        "dispatch": status.get("dispatch"),
        "delivery": status.get("delivery"),
        "holders": cut(holders(status)),
        "speeds": cut(pool_speeds(status)),
        "signals": cut(signals(status)),
        "groups": dict(islice(((name, count) for name, count in status["groups"].items() if count), MOST_ROWS)),
    }


def cut(rows: Iterable[Row]) -> list[Row]:
    """As much of them as a page shows."""
    return [tuple(cell[:_MOST_CELL_CHARS] for cell in row) for row in islice(rows, MOST_ROWS)]


def _busy(one: ProcessStatus) -> str:
    shares = bubble_shares({str(part): s for part, s in one["bubbles"].items()}, wall_s=one["wall_s"])
    return f"{shares['busy']:.0%}"


def pool_speeds(status: RunStatus) -> Iterator[Row]:
    """(pool, how its speed is known, milliseconds of a decoding step by batch)."""
    for pool, found in status.get("dispatch", {"pools": {}})["pools"].items():
        steps = found.get("step_s")
        known = steps.items() if isinstance(steps, dict) else ()
        times = ", ".join(f"{batch}: {1000 * s:.3g} ms" for batch, s in known if isinstance(s, float | int))
        yield pool, str(found.get("speed", "")), times or "–"


def signals(status: RunStatus) -> Iterator[Row]:
    """(signal of length, whether it is trusted, pairs, recall of the longest, rank correlation)."""
    found = status.get("lengths", {}).get("signals")
    for name, one in found.items() if isinstance(found, dict) else ():
        if isinstance(one, dict):
            numbers = (one.get(key) for key in ("pairs", "recall", "rank_correlation"))
            yield name, "yes" if one.get("trusted") is True else "no", *map(_number, numbers)


def _number(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–"
    return format_count(value) if isinstance(value, int) else format_number(value, digits=2)


def checkpoints(folder: RunFolder) -> list[str]:
    """Names of those that are there, newest first."""
    try:
        return sorted((path.name for path in folder.file(keys.DIR_CHECKPOINTS).glob("step-*")), reverse=True)[:20]
    except OSError:
        return []


def events(run: RunData) -> list[tuple[str, str, str]]:
    """(when, what, text), newest first."""
    found: list[tuple[float, str, str]] = [
        (line["time_s"], "scaling", f"{line['pool']}: {line['from']} → {line['to']}: {line['reason']}")
        for line in run.scaling
    ]
    for before, after in pairwise(run.steps):
        attempts = before.get("attempt"), after.get("attempt")
        if None not in attempts and attempts[0] != attempts[1]:
            found.append(
                (after.get("time_s", 0.0), "attempt", f"attempt {attempts[1]} goes on with step {after['step'] + 1}")
            )
    for evaluation in run.evaluations:
        text = evaluation_text(evaluation)
        found.append((evaluation.get("time_s", 0.0), "evaluation", text))
    for line in run.timelines:
        for number, (at_s, _) in enumerate(line.instances):
            found.append((at_s, "process", f"{line.process} {'started again' if number else 'started'}"))
    if run.result is not None:
        reason = run.result.get("reason")
        said = f": {reason}" if isinstance(reason, str) and reason else ""
        found.append((max((at_s for at_s, _, _ in found), default=0.0), "end", run.result["status"] + said))
    found.sort(key=lambda event: event[0])
    return [(_instant(at_s), kind, text) for at_s, kind, text in reversed(found[-_MOST_EVENTS:])]


def evaluation_text(line: EvaluationRecord) -> str:
    """An evaluation as a sentence."""
    return held_out_text(line | {"prompts": line.get("prompts", "?")})


def _instant(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s)) if 0 < at_s < 1e10 else "–"  # noqa: PLR2004 - the year 2286
