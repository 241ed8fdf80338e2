"""Weights & Biases, online or as files in `trackers/wandb/` of the run folder.

    wandb sync RUN/trackers/wandb/wandb/offline-run-*

The x axis of every chart is `step`, a value of its own: W&B's counter of calls only grows, and an evaluation may come late. Every process of a
run has its id, so W&B appends to one run. What a process told in its last moments before it was killed may be told again, with the same values.
"""

import os
import time
from collections.abc import Sequence

import wandb

from streamrl.spec.trackers import WandbTracker
from streamrl_workers.trackers.registry import SAMPLE_COLUMNS, Outcome, SampleRow, ScalarPoint, TrackedRun

FLUSH_S = 0.25
"""W&B's own process writes what it was given to the run's file so often; a kill takes the rest away."""
_SETTINGS = wandb.Settings(
    console="off",
    silent=True,
    disable_code=True,
    disable_git=True,
    x_disable_stats=True,  # of this process: they say nothing of the run
    x_disable_meta=True,
    x_disable_machine_info=True,
    x_save_requirements=False,
    x_transaction_log_flush_interval=FLUSH_S,
)


class WandbRun:
    """A run in W&B."""

    def __init__(self, options: WandbTracker, *, run: TrackedRun) -> None:
        for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"):  # of tables, which are staged as files
            os.environ.setdefault(name, str(run.folder))
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            id=run.id,
            name=run.name,
            resume="allow",
            mode="offline" if options.mode == "Offline" else "online",
            dir=str(run.folder),
            config=dict(run.config),
            settings=_SETTINGS,
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def scalars(self, points: Sequence[ScalarPoint]) -> None:
        """A row of its history for each."""
        for point in points:
            self._run.log({"step": point.step, **point.values})

    def samples(self, rows: Sequence[SampleRow], *, step: int) -> None:
        """A table."""
        table = wandb.Table(columns=list(SAMPLE_COLUMNS), data=[list(row) for row in rows])
        self._run.log({"step": step, "samples": table})

    def flush(self) -> None:
        """There is no call for it: wait until W&B's own process has written."""
        time.sleep(2 * FLUSH_S)

    def close(self, outcome: Outcome | None) -> None:
        """Mark it as ended, also where a later process goes on; waits for what is uploaded."""
        self._run.finish(exit_code=1 if outcome == "failed" else 0)


def open_run(options: WandbTracker, *, run: TrackedRun) -> WandbRun:
    """Begin the run, or go on with the one of that id."""
    return WandbRun(options, run=run)
