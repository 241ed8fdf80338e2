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
from streamrl.spec.algorithm import AlgorithmSpec, DynamicSamplingSpec
from streamrl.spec.base import SpecModel, parse_bytes
from streamrl.spec.rljob import RLJobSpec
from streamrl.spec.scheduling import Rebalance
from streamrl.spec.task import Sampling, SingleTask
from streamrl.spec.training import Mode
from streamrl_workers.process.environment_variables import (
    WorkerVariables,
    job_file,
    port,
    required,
    store_dir,
    worker_variables,
)

MAX_ISSUES = 20
"""A sample issued so often (its generators died, or refused it) gives its group up."""
_WHOLE_BATCH_MODES: tuple[Mode, ...] = ("Colocated", "Batch")
"""Modes that deliver whole batches at a barrier."""
MIN_LOOK_AHEAD = 64
MAX_LOOK_AHEAD = 8192
"""Prompts held ready: two batches within these bounds; texts are small, but the bound is not the user's."""
ROW_BYTES = 8
"""Of a token of a data set's own answer, about: its number, and its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """A task of a mixture."""

    name: str
    sampling: pb.Sampling
    max_turns: int | None = None
    """As `SchedulerSettings` has them."""


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
    sampling: pb.Sampling
    """With a mixture: what is one for all tasks, and bounds the others."""
    seed: int
    evaluation_prompts: int
    evaluation_sampled: int = 0
    """Sampled answers to each held-out prompt, beside the greedy one."""
    evaluation_interval: int
    """Steps between evaluations."""
    lease_s: float
    max_buffer_bytes: int
    dispatch: str
    """Key of the dispatch registry."""
    dispatch_options: SpecModel | None = None
    """Its member of the contract; None: the defaults."""
    rebalance: Rebalance | None = None
    """When running samples move; None: they never do."""
    length_signals: tuple[str, ...]
    """What predicts lengths, cheapest first (`scheduling.lengthSignals`)."""
    prompt_look_ahead: int
    partial_rollouts: bool = True
    """Whether a sample that runs may go on under another version."""
    in_order: bool = False
    """Whether groups are delivered by their numbers, not as they are scored."""
    whole_batches: bool = False
    """Whether groups are delivered only when a whole batch can be."""
    waits_are_phases: bool = False
    """Whether all pools are on the trainer's devices: each then waits for its turn."""
    lent_pools: frozenset[str] = frozenset()
    """Pools on the trainer's devices."""
    draws_per_step: int = 1
    """Batches that may be scored for one step; above 1, groups with equal rewards are dropped."""
    max_issues: int = MAX_ISSUES
    archived_percent: int = 0
    """Share of the groups whose texts are stored with their samples, for the archive."""
    max_turns: int | None = None
    """Turns of the model with the environment; None: there is none."""
    supervised: bool = False
    """Whether samples are the data set's own answers: generators evaluate only."""
    evaluates: bool = True
    """Whether there are generators to answer held-out prompts."""
    mixture: tuple[TaskSettings, ...] = ()
    """Empty: there is one task."""
    shares: Mixture = field(default_factory=lambda: Mixture([1]))
    """Which prompt is of which task, of either split."""
    frozen_pool: str = ""
    """The pool that says the frozen model's log-probs of finished samples; empty: there is none."""
    shares_uplink: bool = False
    """Whether other clusters take versions over one uplink, in turn."""
    resampled_percent: int = 0
    """Share of the groups that are turns at states of earlier samples."""
    copies_url: str | None = None
    """Object store that the trainer's checkpoint may be from."""

    def sampling_of(self, prompt_index: int) -> pb.Sampling:
        """How answers to this prompt are sampled."""
        return self.mixture[self.shares.task_of(prompt_index)].sampling if self.mixture else self.sampling

    def max_turns_of(self, prompt_index: int) -> int | None:
        """Turns of the model from this prompt on; None: there is no environment."""
        return self.mixture[self.shares.task_of(prompt_index)].max_turns if self.mixture else self.max_turns

    def task_name(self, prompt_index: int) -> str:
        """Of the task that this prompt is of; empty: there is one."""
        return self.mixture[self.shares.task_of(prompt_index)].name if self.mixture else ""

    @classmethod
    def from_job(cls, spec: RLJobSpec) -> "SchedulerSettings":
        """Read the settings out of a validated specification."""
        pipeline, scheduling = spec.pipeline, spec.scheduling
        in_order = pipeline.delivery == "Logical"
        partial_rollouts = pipeline.partial_rollouts and not in_order
        look_ahead = min(max(2 * pipeline.batch_groups, MIN_LOOK_AHEAD), MAX_LOOK_AHEAD)
        buffer_bytes, supervised = parse_bytes(scheduling.max_buffer_bytes), spec.algorithm.supervised is not None
        if supervised:  # prompts come with their answers
            look_ahead = min(look_ahead, max(1, buffer_bytes // (ROW_BYTES * spec.task.sampling.max_tokens)))
        return cls(
            batch_groups=pipeline.batch_groups,
            staleness=pipeline.staleness,
            steps=pipeline.steps,
            group_size=spec.task.group_size,
            sampling=_sampling(spec.task.sampling),
            seed=spec.seed,
            evaluation_prompts=spec.task.evaluation.max_prompts,
            evaluation_sampled=spec.task.evaluation.sampled_answers,
            evaluation_interval=spec.task.evaluation.interval_steps,
            lease_s=scheduling.lease_seconds,
            max_buffer_bytes=buffer_bytes,
            dispatch=scheduling.dispatch.key,
            dispatch_options=scheduling.dispatch.value,
            rebalance=scheduling.rebalance,
            length_signals=scheduling.length_signals,
            prompt_look_ahead=look_ahead,
            partial_rollouts=partial_rollouts,
            in_order=in_order,
            whole_batches=pipeline.mode in _WHOLE_BATCH_MODES,
            waits_are_phases=len(spec.lent_pools) == len(spec.generators) > 0,
            lent_pools=frozenset(
                one.name for one in spec.generators if one.name in spec.lent_pools and one.engine.common.pauses
            ),
            draws_per_step=_draws_per_step(spec.algorithm),
            archived_percent=spec.storage.archive.share_percent,
            max_turns=None if spec.task.mixture else _max_turns(spec.task.tasks[0]),
            mixture=tuple(_task(task) for task in spec.task.tasks if task.name),
            shares=spec.task.shares,
            supervised=supervised,
            evaluates=bool(spec.generators),
            frozen_pool="" if spec.frozen_pool is None else spec.frozen_pool.name,
            shares_uplink=spec.weights.has_uplink and partial_rollouts,
            resampled_percent=_resampled_percent(spec.algorithm),
            copies_url=spec.storage.checkpoints.url,
        )


def _draws_per_step(algorithm: AlgorithmSpec) -> int:
    """An algorithm wants dynamic sampling if it has the field."""
    sampling = getattr(algorithm.value, "dynamic_sampling", None)
    return sampling.max_draws_per_step if isinstance(sampling, DynamicSamplingSpec) else 1


def _resampled_percent(algorithm: AlgorithmSpec) -> int:
    resample = None if algorithm.archer is None else algorithm.archer.resample
    return 0 if resample is None else resample.share_percent


def _task(task: SingleTask) -> TaskSettings:
    return TaskSettings(name=task.name, sampling=_sampling(task.sampling), max_turns=_max_turns(task))


def _max_turns(task: SingleTask) -> int | None:
    return None if task.turns is None else task.turns.max_turns


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
