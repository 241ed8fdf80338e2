"""Trackio: its local database, in `TRACKIO_DIR` or in `trackers/trackio/` of the run folder.

    TRACKIO_DIR=RUN/trackers/trackio trackio show --project PROJECT

Rows are written to the database itself: the client of `trackio.init` keeps them in a thread, and only warns of what it cannot write. Each row has an
id that follows from the run and its step; one that is there already is left as it is, so nothing is told twice.
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from streamrl.spec.trackers import TrackioTracker
from streamrl_workers.trackers.registry import SAMPLE_COLUMNS, Outcome, SampleRow, ScalarPoint, TrackedRun

_TABLE = "trackio.table"


class TrackioRun:
    """A run in Trackio's database."""

    def __init__(self, options: TrackioTracker, *, run: TrackedRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.folder))
        from trackio.sqlite_storage import SQLiteStorage  # reads the variable

        self._storage = SQLiteStorage
        self._project = options.project
        self._run = run

    def scalars(self, points: Sequence[ScalarPoint]) -> None:
        """A row a point."""
        self._store(
            [dict(point.values) for point in points],
            steps=[point.step for point in points],
            times=[datetime.fromtimestamp(point.time_s, UTC) for point in points],
            ids=[f"{point.kind}-{point.step}" for point in points],
        )

    def samples(self, rows: Sequence[SampleRow], *, step: int) -> None:
        """A row with a table."""
        table = {"_type": _TABLE, "_value": [dict(zip(SAMPLE_COLUMNS, row, strict=True)) for row in rows]}
        self._store([{"samples": table}], steps=[step], times=[datetime.now(UTC)], ids=[f"samples-{step}"])

    def _store(self, values: list[dict[str, Any]], *, steps: list[int], times: list[datetime], ids: list[str]) -> None:
        self._storage.bulk_log(
            project=self._project,
            run=self._run.name,
            run_id=self._run.id,
            metrics_list=values,
            steps=steps,
            timestamps=[time.isoformat() for time in times],
            config=dict(self._run.config),
            log_ids=[f"{self._run.id}-{one}" for one in ids],
        )

    def flush(self) -> None:
        """Every call has committed."""

    def close(self, outcome: Outcome | None) -> None:
        """The database does not say how a run ended."""


def open_run(options: TrackioTracker, *, run: TrackedRun) -> TrackioRun:
    """Begin the run, or go on with it."""
    return TrackioRun(options, run=run)
