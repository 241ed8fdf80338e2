"""`result.json`: how the run ended, for the runner and for people; `numbers.json`: the last numbers, for a pod that stays; and what
the scheduler's container of a pod leaves as its last word, which the operator reads with the pod, whoever may reach whom.

Owns the verdict that a run gives on itself: what `streamrl journal check` would say of it at its end.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamrl.keys import ENV_HEARTBEAT_FILE, ENV_TERMINATION_FILE, FILE_JOURNAL, FILE_NUMBERS, FILE_RESULT
from streamrl_workers.scheduler.journal.check import Report
from streamrl_workers.scheduler.journal.store import open_for_reading
from streamrl_workers.stream.run_folder import write_json_atomically

_TERMINATION_FILE = "/dev/termination-log"
_TOLD = "end-is-told"
"""Beside the heartbeat file: on scratch space that outlives the pod's containers and ends with the pod, and where no job can mount anything."""
_MOST_REASON_CHARACTERS = 300
"""Of at most four bytes each; the file has all of it."""
_SHOWN_VIOLATIONS = 10
"""`streamrl journal check` shows all."""


def failure_of(report: Report) -> str:
    """Why the run is no success; "" if every group is accounted for exactly once."""
    found = report.violations
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"the run's own check fails: {found[0]}{more}; `streamrl journal check` tells all" if found else ""


def _document(report: Report) -> dict[str, Any]:
    """Numbers of groups, and the first violations."""
    return {
        "planned": report.planned,
        "consumed": report.consumed,
        "dropped": dict(report.dropped),
        "live": report.live,
        "violations": list(report.violations[:_SHOWN_VIOLATIONS]),
    }


def write_success(run_dir: Path, *, steps: int, report: Report, checkpoint: str | None = None) -> None:
    """The run is over; the journal is closed. `checkpoint`: path of the newest, from the directory that holds checkpoints/."""
    evaluations = _evaluations(run_dir / FILE_JOURNAL)
    document = {
        "status": "succeeded",
        "steps": steps,
        "evaluations": evaluations,
        "final_reward": evaluations[-1]["mean_reward"] if evaluations else None,
        "checkpoint": checkpoint,
        "check": _document(report),
    }
    write_json_atomically(run_dir / FILE_RESULT, document)


def write_failure(run_dir: Path, *, reason: str, report: Report | None = None) -> None:
    """The run cannot go on before the user changes something. `report` None: it ended before it began."""
    document = {"status": "failed", "reason": reason, "check": None if report is None else _document(report)}
    write_json_atomically(run_dir / FILE_RESULT, document)


def remove_result(run_dir: Path) -> None:
    """A run that goes on has no result yet."""
    (run_dir / FILE_RESULT).unlink(missing_ok=True)


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """How the run ended; None: it has not."""
    return _read(run_dir / FILE_RESULT)


def keep_numbers(run_dir: Path, numbers: Mapping[str, Any]) -> None:
    """What the page showed when the run ended."""
    write_json_atomically(run_dir / FILE_NUMBERS, dict(numbers))


def last_numbers(run_dir: Path) -> dict[str, Any]:
    """The page of a run that has ended."""
    numbers = _read(run_dir / FILE_NUMBERS) or {}
    return numbers | {"ended": True, "result": _read(run_dir / FILE_RESULT)}


def leave_line(line: str, environ: Mapping[str, str]) -> None:
    """Leave why this process ends where the kubelet takes it at this container's end, instead of the end of its log."""
    file = Path(environ.get(ENV_TERMINATION_FILE) or _TERMINATION_FILE)
    if file.is_file():
        file.write_text(line, encoding="utf-8")


def leave_last_word(run_dir: Path, environ: Mapping[str, str]) -> bool:
    """Leave how the run ended where the kubelet takes it at this container's end, however that comes: only the last two lives are seen.

    Returns:
        Whether the process is to end with 0 for it now: once in a pod's life. It finds that told when it is started again.
    """
    file, heartbeat = Path(environ.get(ENV_TERMINATION_FILE) or _TERMINATION_FILE), environ.get(ENV_HEARTBEAT_FILE)
    if heartbeat is None or not file.is_file():
        return False
    file.write_text(json.dumps(_last_word(last_numbers(run_dir)), ensure_ascii=False), encoding="utf-8")
    told = Path(heartbeat).with_name(_TOLD)
    is_news = not told.exists()
    told.touch()
    return is_news


def _last_word(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """What an end needs of the status. A kubelet takes 12 KiB of a pod, in equal parts of all its containers: 2 KiB of each of six."""
    result = numbers["result"] or {}
    kept = {key: result[key] for key in ("status", "steps", "final_reward", "checkpoint") if key in result}
    if "reason" in result:
        kept["reason"] = str(result["reason"])[:_MOST_REASON_CHARACTERS]
    return {key: numbers[key] for key in ("attempt", "step", "cost") if key in numbers} | {"result": kept}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return document if isinstance(document, dict) else None


def _evaluations(path: Path) -> list[dict[str, Any]]:
    connection = open_for_reading(path)
    try:
        rows = connection.execute(
            "SELECT step, mean_reward, sampled_reward, prompts, failed, mean_tokens FROM evaluations ORDER BY step"
        )
        names = [column[0] for column in rows.description]
        return [dict(zip(names, row, strict=True)) for row in rows]
    finally:
        connection.close()
