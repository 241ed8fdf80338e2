"""How many samples a task's judges may be sent in a whole run: the one number, in a file of the run folder.

Owns that file, one for each task with a bound. It is written before a sample is sent: a scheduler that is killed has counted what it sent, so a run never sends more.
It is not forced to the disk: a power cut may forget the newest ones.
"""

import os
from pathlib import Path

from streamrl.errors import UserError
from streamrl.keys import FILE_JUDGED
from streamrl.spec.task import SingleTask


class SampleBudget:
    """Of all `http` rewards of a task together: each sample is sent to all of them."""

    def __init__(self, *, most: int, field: str, file: Path) -> None:
        """`field`: whose bound it is. Raises `UserError`: the file holds no number."""
        self._most, self._field = most, field
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        text = os.pread(self._file, 64, 0)
        if text and not text.strip().isdigit():
            fix = "write the number into it, or delete it to count from 0"
            raise UserError(field=str(file), rule="must hold the number of samples sent", got=text, fix=fix)
        self._sent = int(text or 0)

    def take(self) -> None:
        """One more is sent. Raises `UserError`: none may be."""
        if self._sent >= self._most:
            raise UserError(
                field=self._field,
                rule=f"is spent: this run has sent {self._sent} samples, {self._most} may be",
                fix="raise it in the run folder's job.json and resume, or go on from the checkpoint by a new job",
            )
        self._sent += 1
        os.pwrite(self._file, b"%d\n" % self._sent, 0)

    def close(self) -> None:
        """No sample comes any more."""
        os.close(self._file)


def sample_budget(task: SingleTask, *, run_dir: Path | None) -> SampleBudget | None:
    """That of a task; None: it has no bound, or no run folder."""
    bounds = [
        (reward.http.max_samples, f"{task.field}.rewards.{number}.http.maxSamples")
        for number, reward in enumerate(task.rewards)
        if reward.http is not None and reward.http.max_samples is not None
    ]
    if not bounds or run_dir is None:
        return None
    most, field = min(bounds)
    return SampleBudget(most=most, field=field, file=run_dir / "-".join(filter(None, (FILE_JUDGED, task.name))))
