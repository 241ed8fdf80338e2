"""What the scheduler needs to know: of the job (`SchedulerSettings`), and of its process (`SchedulerEnvironment`).

Owns no behaviour beyond reading them out of specification and environment variables.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.errors import UserError
from streamrl.keys import ENV_CODE_DIR, ENV_GRPC_PORT, ENV_PROCESS, ENV_RUN_DIR, ENV_SIGNALS_PORT, FILE_JOB
from streamrl.mixture import Mixture
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.base import SpecModel, parse_bytes
from streamrl.spec.rljob import RLJobSpec
from streamrl.spec.task import Sampling, SingleTask
from streamrl.spec.training import Mode
from streamrl_workers.plugins.load import LoadedPlugin
from streamrl_workers.process.environment_variables import (
    WorkerVariables,
    job_file,
    port,
    required,
    store_dir,
    worker_variables,
)
from streamrl_workers.scheduler.extension_settings import ExtensionSettings

MAX_ISSUES = 20
"""Maximum issues of a sample (its generators died, or refused it); after that its group is dropped."""
_WHOLE_BATCH_MODES: tuple[Mode, ...] = ("Colocated", "Batch")
"""Modes that deliver whole batches at a barrier."""
MIN_LOOK_AHEAD = 64
MAX_LOOK_AHEAD = 8192
"""Prompts held ready: two batches within these bounds; texts are small, but the bound is not the user's."""
ROW_BYTES = 8
"""Bytes of a token of a data set's own answer, about: its number, and its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """One task of the job."""

    sampling: pb.Sampling
    max_turns: int | None = None
    """Turns of the model with the environment; None: the task has no environment."""
    name: str = ""
    """Empty: the job has one task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTasks:
    """All tasks of the job, and which prompt belongs to which."""

    of_job: tuple[TaskSettings, ...]
    shares: Mixture = field(default_factory=lambda: Mixture([1]))
    max_tokens: int
    """Maximum tokens of a completion, or of a turn, over all tasks."""

    def of(self, prompt_index: int) -> TaskSettings:
        """Return the task of the prompt; the same for either split."""
        return self.of_job[self.shares.task_of(prompt_index)] if len(self.of_job) > 1 else self.of_job[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tasks of a mixture; empty: the job has one task."""
        return tuple(task.name for task in self.of_job if task.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """Held-out evaluation."""

    prompts: int
    sampled: int = 0
    """Sampled answers to each held-out prompt, beside the greedy one."""
    interval: int
    """Steps between evaluations."""
    enabled: bool = True
    """Whether the job has generators that answer held-out prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """In which order samples are given to generators."""

    policy: str
    """Key of the dispatch registry."""
    options: SpecModel | LoadedPlugin | None = None
    """Options of the policy, or a loaded plug-in; None: its defaults."""
    length_signals: tuple[str, ...]
    """What predicts lengths, cheapest first (`scheduling.lengthSignals`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverySettings:
    """In which order groups are given to the trainer."""

    by_number: bool = False
    """Whether groups are delivered by their numbers, not in the order in which they are scored."""
    whole_batches: bool = False
    """Whether groups are delivered only when a whole batch can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """The job as the scheduler's core sees it."""

    batch_groups: int
    """B: groups of one step."""
    staleness: int
    """S of the staleness rule, in steps."""
    steps: int
    group_size: int
    """G: samples of one group."""
    seed: int
    lease_s: float
    max_buffer_bytes: int
    prompt_look_ahead: int
    """Maximum prompts that are held ready."""
    max_issues: int = MAX_ISSUES
    partial_rollouts: bool = True
    """Whether a running sample may continue under another version."""
    archived_percent: int = 0
    """Share of the groups whose texts are stored with their samples, for the archive."""
    copies_url: str | None = None
    """Object store that the trainer's checkpoint may come from."""
    tasks: JobTasks
    evaluation: EvaluationSettings
    dispatch: DispatchSettings
    delivery: DeliverySettings = field(default_factory=DeliverySettings)
    extensions: ExtensionSettings = field(default_factory=ExtensionSettings)

    @classmethod
    def from_job(cls, spec: RLJobSpec) -> "SchedulerSettings":
        """Read the settings from a validated specification."""
        pipeline, scheduling = spec.pipeline, spec.scheduling
        by_number = pipeline.delivery == "Logical"
        partial_rollouts = pipeline.partial_rollouts and not by_number
        look_ahead = min(max(2 * pipeline.batch_groups, MIN_LOOK_AHEAD), MAX_LOOK_AHEAD)
        buffer_bytes, supervised = parse_bytes(scheduling.max_buffer_bytes), spec.algorithm.supervised is not None
        if supervised:  # prompts come with their answers
            look_ahead = min(look_ahead, max(1, buffer_bytes // (ROW_BYTES * spec.task.sampling.max_tokens)))
        return cls(
            batch_groups=pipeline.batch_groups,
            staleness=pipeline.staleness,
            steps=pipeline.steps,
            group_size=spec.task.group_size,
            seed=spec.seed,
            lease_s=scheduling.lease_seconds,
            max_buffer_bytes=buffer_bytes,
            prompt_look_ahead=look_ahead,
            partial_rollouts=partial_rollouts,
            archived_percent=spec.storage.archive.share_percent,
            copies_url=spec.storage.checkpoints.url,
            tasks=JobTasks(
                of_job=tuple(map(_task, spec.task.tasks)),
                shares=spec.task.shares,
                max_tokens=spec.task.sampling.max_tokens,
            ),
            evaluation=EvaluationSettings(
                prompts=spec.task.evaluation.max_prompts,
                sampled=spec.task.evaluation.sampled_answers,
                interval=spec.task.evaluation.interval_steps,
                enabled=bool(spec.generators),
            ),
            dispatch=DispatchSettings(
                policy=scheduling.dispatch.key,
                options=scheduling.dispatch.value,
                length_signals=scheduling.length_signals,
            ),
            delivery=DeliverySettings(by_number=by_number, whole_batches=pipeline.mode in _WHOLE_BATCH_MODES),
            extensions=ExtensionSettings.from_job(spec, partial_rollouts=partial_rollouts),
        )


def _task(task: SingleTask) -> TaskSettings:
    max_turns = None if task.turns is None else task.turns.max_turns
    return TaskSettings(name=task.name, sampling=_sampling(task.sampling), max_turns=max_turns)


def _sampling(spec: Sampling) -> pb.Sampling:
    return pb.Sampling(
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        max_tokens=spec.max_tokens,
        stop=spec.stop,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerEnvironment:
    """The environment as `streamrl.keys` defines it."""

    run_dir: Path
    process: str
    grpc_port: int
    signals_port: int
    code_dir: Path
    """Paths of the job are relative to it, the user's modules lie in it."""
    job_file: Path
    store_dir: Path
    """What holds the checkpoints."""
    variables: WorkerVariables = field(default_factory=WorkerVariables)

    @property
    def plugin_dir(self) -> Path | None:
        """Where plug-ins lie beside what is installed; None, with certificates: nowhere."""
        return self.code_dir if self.variables.tls is None else None

    @property
    def job_is_elsewhere(self) -> bool:
        """Whether the run folder has no job of its own."""
        return self.job_file != self.run_dir / FILE_JOB

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "SchedulerEnvironment":
        """Read and check."""
        run_dir = Path(required(environ, ENV_RUN_DIR))
        if not run_dir.is_dir():
            raise UserError(field=ENV_RUN_DIR, rule="must be a directory", got=str(run_dir))
        return cls(
            run_dir=run_dir,
            process=environ.get(ENV_PROCESS, "scheduler"),
            variables=worker_variables(environ),
            grpc_port=port(environ, ENV_GRPC_PORT),
            signals_port=port(environ, ENV_SIGNALS_PORT),
            code_dir=Path(environ.get(ENV_CODE_DIR) or run_dir),
            job_file=job_file(environ, run_dir=run_dir),
            store_dir=store_dir(environ, run_dir=run_dir),
        )
