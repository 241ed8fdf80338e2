"""The trackers by the key that users write, and what each must be able to do. Looked at without any of their packages."""

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from streamrl.errors import UserError
from streamrl.spec.base import PluginOptions, PythonClass, SpecModel
from streamrl.spec.trackers import Trackers
from streamrl_workers.plugins.kinds import Plugin, kind_named
from streamrl_workers.plugins.load import load_plugin

MODULE = "streamrl_workers.trackers"
"""What the scheduler starts."""
TRACKERS: dict[str, tuple[str, str]] = {
    "wandb": ("wandb", "wandb"),
    "tensorBoard": ("tensorboard", "tensorboard"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "trackio": ("trackio", "trackio"),
}
"""Key -> module of this package and of the tracker's own, which are called the same; name of the package."""
FIELD = "spec.trackers"

Outcome = Literal["succeeded", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run as a tracker knows it."""

    id: str
    """The same for every process that tells of this run."""
    name: str
    """For people."""
    folder: Path
    """The tracker's own, in the run folder."""
    config: Mapping[str, Any]
    """The job."""
    next_step: int
    """What was told for steps from here on may not count: the process that told it died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarPoint:
    """Values at one step."""

    kind: Literal["train", "eval"]
    step: int
    """Training steps behind the weights that they are about."""
    time_s: float
    values: Mapping[str, float]


SAMPLE_COLUMNS = ("step", "kind", "reward", "tokens", "ended by", "prompt", "completion")
SampleRow = tuple[int, str, float | None, int, str, str, str]
"""What stands under `SAMPLE_COLUMNS`."""


class TrackerRun(Protocol):
    """One run in a tracker; any method may raise whatever its package raises."""

    def scalars(self, points: Sequence[ScalarPoint]) -> None:
        """Tell values."""

    def samples(self, rows: Sequence[SampleRow], *, step: int) -> None:
        """Tell a table of samples, all of one step."""

    def flush(self) -> None:
        """Bring all that was told to where a kill of this process does not take it away."""

    def close(self, outcome: Outcome | None) -> None:
        """The run has ended; None: this process ends, and another may go on."""


class Tracker(ABC):
    """Base of plug-ins that track a run, in a process of their own that no run waits for. Methods are those of `TrackerRun`."""

    def __init__(self, options: PluginOptions, run: TrackedRun) -> None:
        self.options: Any = options
        self.run = run

    @abstractmethod
    def scalars(self, points: Sequence[ScalarPoint]) -> None:
        """Take values."""

    def samples(self, rows: Sequence[SampleRow], *, step: int) -> None:  # noqa: B027 - a tracker need not have tables
        """Take a table of samples, all of one step."""

    def flush(self) -> None:  # noqa: B027 - one that writes at once has nothing to bring
        """Bring all that was given to where a kill of this process does not take it away."""

    def close(self, outcome: Outcome | None) -> None:  # noqa: B027 - as `flush`
        """Take the end of the run; None: this process ends, and another may continue."""


def open_run(key: str, options: SpecModel, *, run: TrackedRun, plugin_dir: Path | None = None) -> TrackerRun:
    """Begin the run in its tracker, or go on with it. `plugin_dir`: as `directory` of `load_plugin`."""
    if isinstance(options, PythonClass):
        plugin = load_plugin(Plugin(kind=kind_named("tracker"), named=options), directory=plugin_dir)
        own: TrackerRun = plugin.made_by(plugin.options, run)
        return own
    module, _ = TRACKERS[key]
    made: TrackerRun = importlib.import_module(f"{MODULE}.{module}").open_run(options, run=run)
    return made


def missing_packages(trackers: Trackers) -> Iterator[UserError]:
    """Find the trackers of a job whose packages are not installed."""
    for key in [key for key in trackers.named() if key in TRACKERS]:
        module, package = TRACKERS[key]
        if importlib.util.find_spec(module) is None:
            rule = f"needs the package {package}, which is not installed"
            yield UserError(field=f"{FIELD}.{key}", rule=rule, fix="install streamrl[trackers]")


def check_trackers(trackers: Trackers) -> None:
    """Refuse a job with such a tracker. Raises `UserError`."""
    for error in missing_packages(trackers):
        raise error
