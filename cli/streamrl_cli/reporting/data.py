"""Reads the metrics of a run folder: the door between foreign files and the page. Owns no presentation.

Owns names, types and bounds of what a report shows. Fields that it does not show are left out, and may be anything.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from streamrl import keys
from streamrl.errors import UserError
from streamrl.spec import RLJob
from streamrl_cli.jobfile import hub_dir
from streamrl_cli.reporting.samples import ShownSample, of_step
from streamrl_cli.reporting.walls import WALL, Seconds, Timeline, WallRecord, checked, timelines
from streamrl_cli.runner.folder import RunFolder, open_folder
from streamrl_cli.runner.scaling import FILE_SCALING
from streamrl_operator.planning.estimate import estimate, find_config
from streamrl_operator.planning.weight_times import WeightTimes, weight_times
from streamrl_workers.metrics.bubbles import ProcessWall, bubble_ratios
from streamrl_workers.metrics.jsonl import read_jsonl
from streamrl_workers.scheduler.journal.adoption import read_adopted
from streamrl_workers.stream.sample_choice import KINDS

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
Number = Annotated[float, Field(ge=-1e100, le=1e100)]
Count = Annotated[int, Field(ge=0, le=2**53)]
ResizeRecord = TypedDict("ResizeRecord", {"time_s": Seconds, "pool": str, "from": Count, "to": Count, "reason": str})
"""A line of `scaling.jsonl`."""
_MOST_STEPS = 2**53
MOST_PROCESSES = 1000
_NO_PROCESSES = frozenset(("steps.jsonl", "evaluations.jsonl", FILE_SCALING))
_SAMPLES_OF_A_KIND = 2
RESIZE: TypeAdapter[ResizeRecord] = TypeAdapter(with_config(_STRICT)(ResizeRecord))
Record = TypeVar("Record")


@with_config(_STRICT)
class StepRecord(TypedDict):
    """A line of `steps.jsonl`."""

    step: Count
    reward_mean: Number
    elapsed_s: Seconds
    tokens: Count
    samples: NotRequired[Count]
    attempt: NotRequired[Count]
    time_s: NotRequired[Seconds]
    length_mean: NotRequired[Number | None]
    length_max: NotRequired[Number | None]
    tokens_per_s: NotRequired[Number | None]
    staleness_mean: NotRequired[Number | None]
    staleness_max: NotRequired[Number | None]
    queue: NotRequired[Count | None]
    reward_parts: NotRequired[dict[str, Number | None]]
    tasks: NotRequired[dict[str, dict[str, Number | None]]]
    trainer: NotRequired[dict[str, Number | None]]
    weights: NotRequired[dict[str, Number | None]]
    score_failures: NotRequired[dict[str, Count]]
    score_errors: NotRequired[dict[str, str]]
    dropped: NotRequired[dict[str, Count]]


@with_config(_STRICT)
class EvaluationRecord(TypedDict):
    """A line of `evaluations.jsonl`."""

    step: Count
    mean_reward: Number | None
    sampled_reward: NotRequired[Number | None]
    time_s: NotRequired[Seconds]
    prompts: NotRequired[Count]
    tasks: NotRequired[dict[str, dict[str, Number | None]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Everything that a report shows."""

    folder: RunFolder
    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]
    timelines: tuple[Timeline, ...]
    result: dict[str, Any] | None
    scaling: tuple[ResizeRecord, ...] = ()
    """Lines of `scaling.jsonl` (`runner/scaling.py`), in the order in which they happened."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> groups, over all lines of `steps.jsonl`: a step that is trained again does not undo what was lost before."""
    score_failures: Mapping[str, int] = field(default_factory=dict)
    """Kind -> samples that got no reward, held-out ones too, over the same lines."""
    score_errors: Mapping[str, str] = field(default_factory=dict)
    """Kind -> text of its first failure."""
    samples: tuple[ShownSample, ...] = ()
    """Some of the newest step."""
    no_samples: str = ""
    """Why there are none to show; "": there are, or the folder has no journal."""
    weight_times: WeightTimes | None = None
    """The estimate for the job's model; None: its size is not known here, or there is no model."""
    first_step: int = 0
    """Step with which the run began: that of the checkpoint that it took over."""

    @property
    def taken(self) -> int:
        """Number of steps that the run has taken: by its result, which follows from the journal; until then by its newest line."""
        said = (self.result or {}).get("steps")
        newest = self.steps[-1]["step"] + 1 if self.steps else 0
        return max(said if isinstance(said, int) and said <= _MOST_STEPS else 0, newest) - self.first_step

    @property
    def lost_lines(self) -> str:
        """A sentence about steps without a line in `steps.jsonl`, whose numbers are lost; "": there are none."""
        lost = self.taken - len(self.steps)
        return (
            f"{keys.DIR_METRICS}/steps.jsonl has no line of {lost} of the {self.taken} steps: it was damaged"
            if lost > 0
            else ""
        )


def read_run(path: Path, *, with_samples: bool = True) -> RunData:
    """Read a run folder, with some samples of the newest step or without.

    Raises `UserError`: it is not one, one of its files cannot be read, or nothing has been measured yet.
    """
    folder = open_folder(path)
    metrics = folder.file(keys.DIR_METRICS)
    lines = list(records(metrics / "steps.jsonl", STEP, beneath=folder.path))
    steps = {line["step"]: line for line in lines}
    held_out = records(metrics / "evaluations.jsonl", EVALUATION, beneath=folder.path)
    evaluations = {line["step"]: line for line in held_out}
    if not steps and not evaluations:
        raise UserError(field=str(path), rule="has no steps to report yet", fix="wait for the first step, or see logs/")
    samples, no_samples = _samples(folder) if with_samples else ((), "")
    return RunData(
        folder=folder,
        steps=tuple(steps[step] for step in sorted(steps)),
        evaluations=tuple(evaluations[step] for step in sorted(evaluations)),
        timelines=timelines(process_files(folder), beneath=folder.path),
        result=folder.result(),
        scaling=tuple(records(metrics / FILE_SCALING, RESIZE, beneath=folder.path)),
        dropped=sum((Counter(line.get("dropped", {})) for line in lines), Counter()),
        score_failures=sum((Counter(line.get("score_failures", {})) for line in lines), Counter()),
        score_errors={kind: text for line in reversed(lines) for kind, text in line.get("score_errors", {}).items()},
        samples=samples,
        no_samples=no_samples,
        weight_times=_weight_times(folder.job),
        first_step=_first_step(folder),
    )


def _weight_times(job: RLJob) -> WeightTimes | None:
    """Estimate the seconds of a version. The folder may be foreign, so no file is read of a path in its job."""
    model = job.spec.model
    config = None if model.path is not None else find_config(model, base_dir=Path(), hub_dir=hub_dir())
    return weight_times(job, known=estimate(job, config=config)) if job.spec.generators else None


def _first_step(folder: RunFolder) -> int:
    """0 where what it took over cannot be read: the folder may be a part of one."""
    with suppress(UserError):
        if (adopted := read_adopted(folder.path)) is not None:
            return adopted.step
    return 0


def _samples(folder: RunFolder) -> tuple[tuple[ShownSample, ...], str]:
    """Of the newest step; a journal that cannot be believed costs the page its samples alone."""
    if not folder.file(keys.FILE_JOURNAL).exists():
        return (), ""
    try:
        return of_step(folder.path, step=None, kinds=tuple(KINDS), count=_SAMPLES_OF_A_KIND).samples, ""
    except UserError as error:
        return (), str(error)


def process_files(folder: RunFolder) -> dict[str, Path]:
    """Process -> where its bubbles are. Raises `UserError`: there are too many."""
    files = sorted(path for path in folder.file(keys.DIR_METRICS).glob("*.jsonl") if path.name not in _NO_PROCESSES)
    if len(files) > MOST_PROCESSES:
        raise UserError(field=str(folder.file(keys.DIR_METRICS)), rule=f"must hold at most {MOST_PROCESSES} processes")
    return {path.stem: path for path in files}


def wall_lines(folder: RunFolder) -> dict[str, list[WallRecord]]:
    """Process -> all of its lines, of those that have some."""
    found = {name: list(records(path, WALL, beneath=folder.path)) for name, path in process_files(folder).items()}
    return {name: lines for name, lines in found.items() if lines}


def weighted_bubbles(run: RunData) -> dict[str, float]:
    """Share of each part in the wall of all processes together, weighted by what a process costs an hour."""
    return bubble_ratios(_walls(run))


def cost(run: RunData) -> float:
    """What all processes have cost, by their wall time and `costPerHour`."""
    return sum(wall.wall_s * wall.cost_per_hour for wall in _walls(run)) / 3600


def _walls(run: RunData) -> Iterator[ProcessWall]:
    spec = run.folder.job.spec
    costs = {f"generator-{pool.name}": float(pool.cost_per_hour) for pool in spec.generators}
    rank_cost = float(spec.trainer.cost_per_hour) / spec.trainer.ranks
    for line in run.timelines:
        price = costs.get(line.process.rpartition("-")[0], rank_cost)
        yield ProcessWall(wall_s=line.wall_s, parts=line.totals_s, cost_per_hour=price)


STEP, EVALUATION = TypeAdapter(StepRecord), TypeAdapter(EvaluationRecord)


def records(path: Path, shape: TypeAdapter[Record], *, beneath: Path) -> Iterator[Record]:
    """The lines of a file of the run folder `beneath`.

    Raises `UserError`: the file cannot be read, or a line is not of this shape.
    """
    for line in read_jsonl(path, beneath=beneath):
        yield checked(line, shape, path=path)
