"""`result.json`: how the run ended, for the runner and for people."""

from pathlib import Path
from typing import Any

from streamrl.keys import FILE_JOURNAL, FILE_RESULT
from streamrl_workers.scheduler.journal_store import open_for_reading
from streamrl_workers.stream.files import write_json_atomically


def write_success(run_dir: Path, *, steps: int) -> None:
    """The run is over; the journal is closed."""
    evaluations = _evaluations(run_dir / FILE_JOURNAL)
    document = {
        "status": "succeeded",
        "steps": steps,
        "evaluations": evaluations,
        "final_reward": evaluations[-1]["mean_reward"] if evaluations else None,
    }
    write_json_atomically(run_dir / FILE_RESULT, document)


def write_failure(run_dir: Path, *, reason: str) -> None:
    """The run cannot go on before the user changes something."""
    write_json_atomically(run_dir / FILE_RESULT, {"status": "failed", "reason": reason})


def remove_result(run_dir: Path) -> None:
    """A run that goes on has no result yet."""
    (run_dir / FILE_RESULT).unlink(missing_ok=True)


def _evaluations(path: Path) -> list[dict[str, Any]]:
    connection = open_for_reading(path)
    try:
        rows = connection.execute(
            "SELECT step, mean_reward, prompts, failed, mean_tokens FROM evaluations ORDER BY step"
        )
        names = [column[0] for column in rows.description]
        return [dict(zip(names, row, strict=True)) for row in rows]
    finally:
        connection.close()
