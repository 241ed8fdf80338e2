"""MLflow: a server, or files in `trackers/mlflow/` of the run folder.

    MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri RUN/trackers/mlflow

A run is found again by a tag. What the store has of it already is not told twice: so it asks once, when a process begins.
"""

import os
from collections.abc import Sequence

from mlflow import MlflowClient
from mlflow.entities import Metric, Run
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NAME

from streamrl.spec.trackers import MlflowTracker
from streamrl_workers.trackers.registry import SAMPLE_COLUMNS, Outcome, SampleRow, ScalarPoint, TrackedRun

TAG = "streamrl.run"
"""Holds the run's id."""
_MOST_METRICS = 1000
"""Of one request, as the server has it."""
_ENDS: dict[Outcome, str] = {"succeeded": "FINISHED", "failed": "FAILED"}


class MlflowRun:
    """A run in MLflow."""

    def __init__(self, options: MlflowTracker, *, run: TrackedRun) -> None:
        if options.tracking_uri is None:
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # what mlflow-skinny can keep without a server
        uri = options.tracking_uri or run.folder.as_uri()
        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        self._id = self._opened(options.experiment, run=run).info.run_id
        self._told = {
            kind: max((metric.step for metric in self._client.get_metric_history(self._id, name)), default=-1)
            for kind, name in _MARKS.items()
        }

    def _opened(self, experiment: str, *, run: TrackedRun) -> Run:
        known = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if known is None else known.experiment_id
        found = self._client.search_runs([number], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        if found:
            self._client.set_terminated(found[0].info.run_id, "RUNNING")
            return found[0]
        made = self._client.create_run(number, run_name=run.name, tags={TAG: run.id, MLFLOW_RUN_NAME: run.name})
        self._client.log_dict(made.info.run_id, dict(run.config), "job.json")
        return made

    def scalars(self, points: Sequence[ScalarPoint]) -> None:
        """Metrics, many in a request and all of a point in the same: what was told is known by one of them."""
        waiting: list[Metric] = []
        for point in points:
            if point.step <= self._told[point.kind]:
                continue
            if len(waiting) + len(point.values) > _MOST_METRICS:
                self._client.log_batch(self._id, metrics=waiting)
                waiting = []
            time_ms = round(1000 * point.time_s)
            waiting += [Metric(name, value, time_ms, point.step) for name, value in point.values.items()]
        if waiting:
            self._client.log_batch(self._id, metrics=waiting)

    def samples(self, rows: Sequence[SampleRow], *, step: int) -> None:
        """A file of its own for each step: MLflow's own tables are listed in one tag, which a server cuts off."""
        table = {"columns": list(SAMPLE_COLUMNS), "data": [list(row) for row in rows]}
        self._client.log_dict(self._id, table, f"samples/step-{step:08d}.json")

    def flush(self) -> None:
        """Every call has already brought what it was given to the store."""

    def close(self, outcome: Outcome | None) -> None:
        """Say how it ended."""
        if outcome is not None:
            self._client.set_terminated(self._id, _ENDS[outcome])


_MARKS = {"train": "train/reward_mean", "eval": "eval/prompts"}
"""Kind of point -> a value that each such point has."""


def open_run(options: MlflowTracker, *, run: TrackedRun) -> MlflowRun:
    """Begin the run, or go on with the one that has its id as a tag."""
    return MlflowRun(options, run=run)
