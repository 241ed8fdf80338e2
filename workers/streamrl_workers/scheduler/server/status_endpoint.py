"""What the scheduler tells people and machines: step and evaluation lines, the signals' pages.

Owns `metrics/steps.jsonl`, `metrics/evaluations.jsonl` and `/status`; what Prometheus is told has a file of its own (`metrics_endpoint.py`).
Decides nothing and computes only rates and means. Some parts of `/status`, whose key set is stable, zeros and nulls included:

    delivery.undelivered     why no further group is given to the trainer (`scheduler/delivery.py`, `Why`), and `reason`: the same as a sentence
    dispatch                 how waiting groups are ordered (`scheduler/dispatch/status.py`)

What not every job uses adds its own parts (`StatusPart`, `guests.py`).
"""

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamrl.keys import DIR_METRICS
from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJob
from streamrl_workers.metrics import logprob_diff
from streamrl_workers.metrics.jsonl import JsonlFile
from streamrl_workers.process.silences import read_silences, silence_warnings
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.dispatch.status import dispatch_status
from streamrl_workers.scheduler.records import Evaluated
from streamrl_workers.scheduler.server import cost
from streamrl_workers.scheduler.server.connections import Connections, GeneratorEntry, TrainerEntry
from streamrl_workers.scheduler.server.curves import curves
from streamrl_workers.scheduler.server.metrics_endpoint import SchedulerMetrics
from streamrl_workers.scheduler.server.rates import BeatWindow, StepClock, mean_shares, tokens_per_s
from streamrl_workers.scheduler.views import (
    DROP_REASONS,
    FAILURE_KINDS,
    CoreView,
    PoolView,
    StepSummary,
    TaskSummary,
)

STEPS_FILE = "steps.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
_TAIL_BYTES = 65_536
"""The last line of a file is looked for in so many bytes at its end."""
_COST_DIGITS = 9
_MOST_LISTED = 2048
"""Generators on the page one by one: more would be more than the operator reads. Sums, rates and pools are of all."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusPart:
    """What a part of the process adds to the pages."""

    status: Callable[[CoreView], Mapping[str, Any]] = lambda _: {}
    """Its keys of `/status`."""
    warnings: Callable[[], Sequence[dict[str, str]]] = tuple
    metrics: Callable[[SchedulerMetrics, CoreView], None] = lambda metrics, view: None
    """Sets its values of `/metrics`."""


class StatusEndpoint:
    """The scheduler's numbers."""

    def __init__(
        self,
        core: Core,
        *,
        job: RLJob,
        connections: Connections,
        run_dir: Path,
        process: str = "scheduler",
        heartbeats: Sequence[Path] = (),
    ) -> None:
        """`heartbeats`: folders in which silent processes have notices."""
        directory = self._directory = run_dir / DIR_METRICS
        last = last_line(directory / STEPS_FILE)
        self._core = core
        self._heartbeats = heartbeats
        self._connections = connections
        self._bound = job.spec.trainer.train_infer_logprob_diff
        self._frozen_pool = "" if job.spec.frozen_pool is None else job.spec.frozen_pool.name
        self._begun_s = time.monotonic() - float(last.get("elapsed_s", 0.0))
        self._steps = JsonlFile(directory / STEPS_FILE)
        self._evaluations = JsonlFile(directory / EVALUATIONS_FILE)
        self._seen_step: StepSummary | None = core.last_step
        self._seen_evaluation: Evaluated | None = core.last_evaluation
        self._last_line: dict[str, Any] = last
        self._told: set[str] = set()
        """Kinds of failure of which a line has the first error."""
        self._step_cost: float | None = None
        self._first_evaluation: dict[str, Any] = first_line(directory / EVALUATIONS_FILE)
        self._last_evaluation: dict[str, Any] = last_line(directory / EVALUATIONS_FILE)
        self._cost = cost.CostMeter(cost.rates(job.spec), spent=last.get("cost", {}), now_s=time.monotonic())
        self._step_clock = StepClock(now_s=time.monotonic())
        connections.count(cost.rates(job.spec))
        connections.on_change = self._look_at_cost
        self._metrics = SchedulerMetrics(job, process=process)
        self.reward_took = self._metrics.reward_took
        self.parts: Sequence[StatusPart] = ()
        """What parts of the process add that not every job uses."""

    @property
    def elapsed_s(self) -> float:
        """Seconds that the run has had a scheduler."""
        return time.monotonic() - self._begun_s

    def observe(self) -> None:
        """Look at the core after a commit: write what is new."""
        step = self._core.last_step
        if step is not None and step is not self._seen_step:
            self._seen_step = step
            self._write_step(step)
        evaluation = self._core.last_evaluation
        if evaluation is not None and evaluation is not self._seen_evaluation:
            self._seen_evaluation = evaluation
            self._write_evaluation(evaluation)

    def _write_step(self, step: StepSummary) -> None:
        now_s = time.monotonic()
        interval_s = max(self._step_clock.since_s(now_s=now_s), 1e-9)
        self._step_clock.recorded(now_s=now_s)
        before = self._last_line.get("above_bound", {})
        truncated = step.stats.truncated / max(step.stats.samples, 1)
        above = logprob_diff.steps_above(step.trainer_metrics, truncated=truncated, bound=self._bound, before=before)
        view = self._core.view()
        line = step_line(step, view=view, instants=self._instants(), interval_s=interval_s)
        line |= {"score_errors": {kind: text for kind, text in view.score_errors.items() if kind not in self._told}}
        self._told.update(view.score_errors)
        before_cost = cost.total(self._last_line) or 0.0
        weights = self._connections.take_loads()
        self._last_line = line | {"above_bound": above, "bubbles": self._bubbles(), "weights": weights}
        self._step_cost = (cost.total(line) or 0.0) - before_cost
        self._metrics.step_recorded(step)
        self._steps.append(self._last_line)
        for warning in logprob_diff.new_warnings(self._last_line, bound=self._bound):
            log.warning("step %d: %s", step.step, warning.message)

    def _bubbles(self) -> dict[str, dict[str, float] | None]:
        """Shares of the wall by part, over the last heartbeats."""
        trainer = self._connections.trainer
        return {
            "generators": mean_shares(entry.beats for entry in self._generating()),
            "trainer": None if trainer is None else trainer.beats.shares(),
        }

    def _write_evaluation(self, evaluation: Evaluated) -> None:
        self._last_evaluation = asdict(evaluation) | self._instants()
        self._first_evaluation = self._first_evaluation or self._last_evaluation
        self._evaluations.append(self._last_evaluation)

    def _instants(self) -> dict[str, Any]:
        self._look_at_cost()
        spent = {pool: round(value, _COST_DIGITS) for pool, value in self._cost.spent.items()}
        return {"time_s": round(time.time(), 3), "elapsed_s": round(self.elapsed_s, 3), "cost": spent}

    def _look_at_cost(self) -> None:
        self._cost.look(self._connections.pools(), now_s=time.monotonic())

    def _warnings(self) -> list[dict[str, str]]:
        silent = silence_warnings(read_silences(self._heartbeats).values())
        more = (warning for part in self.parts for warning in part.warnings())
        training = (asdict(one) for one in logprob_diff.warnings(self._last_line, bound=self._bound))
        return [*training, *silent, *more]

    def metrics(self) -> bytes:
        """`/metrics`"""
        metrics, view = self._metrics, self._core.view()
        self._look_at_cost()
        metrics.core(view)
        metrics.links(self._connections, announced_step=view.announced_step)
        warnings = {one["type"] for one in self._warnings()}
        metrics.last_step(self._last_line, warnings=warnings, cost_per_step=self._step_cost)
        metrics.evaluations(self._first_evaluation, self._last_evaluation)
        metrics.costs(self._cost)
        for part in self.parts:
            part.metrics(metrics, view)
        return metrics.render()

    def status(self) -> Mapping[str, Any]:
        """What `/status` shows (also at `/numbers`)."""
        view = self._core.view()
        self._look_at_cost()
        entries, trainer = list(self._connections.generators.values()), self._connections.trainer
        return {
            "attempt": view.attempt,
            "step": view.step,
            "steps": view.steps,
            "ended": view.ended,
            "elapsed_s": round(self.elapsed_s, 3),
            "cost": round(self._cost.total, _COST_DIGITS),
            "queue": view.waiting_samples,
            "running": view.active_leases,
            "buffered_bytes": view.buffered_bytes,
            "groups": dict(view.groups_by_state),
            "dropped": whole(view.dropped_groups, DROP_REASONS),
            "score_failures": whole(view.score_failures, FAILURE_KINDS),
            "score_errors": dict(view.score_errors),
            "reissued": view.reissued_samples,
            "moved": view.moved_samples,
            "idle": dict(view.fleet.idle),
            "dispatch": dispatch_status(view.order, view.speeds),
            "delivery": delivery_status(view),
            "announced_step": view.announced_step,
            "clusters": {name: asdict(turn) for name, turn in view.cluster_turns.items()},
            "evaluating_step": view.evaluating_step,
            "checkpoint": _checkpoint(view),
            "checkpoint_step": None if view.checkpoint is None else view.checkpoint[0],
            "reward": self._last_evaluation.get("mean_reward"),
            "tokens_per_s": tokens_per_s([entry.beats for entry in self._generating()]),
            "bubbles": {
                "generators": _walls([entry.heartbeat for entry in entries]),
                "trainer": _walls([] if trainer is None else [trainer.heartbeat]),
            },
            "generators": [_generator(entry) for entry in entries[:_MOST_LISTED]],
            "trainer": _trainer(trainer),
            "scaling": scaling(
                view,
                generators=entries,
                frozen_pool=self._frozen_pool,
                trainer=trainer,
                clock=self._step_clock,
                now_s=time.monotonic(),
            ),
            **{key: value for part in self.parts for key, value in part.status(view).items()},
            "warnings": self._warnings(),
            "last_step": self._last_line or None,
            "last_evaluation": self._last_evaluation or None,
        }

    def _generating(self) -> list[GeneratorEntry]:
        return [entry for entry in self._connections.generators.values() if entry.hello.pool != self._frozen_pool]

    def curves(self) -> Mapping[str, Any]:
        """What `/curves` shows."""
        return curves(self._directory / STEPS_FILE, self._directory / EVALUATIONS_FILE)

    def close(self) -> None:
        """Close the files."""
        self._steps.close()
        self._evaluations.close()


def step_line(step: StepSummary, *, view: CoreView, instants: Mapping[str, float], interval_s: float) -> dict[str, Any]:
    """The line of one recorded step."""
    stats = step.stats
    return {
        "step": step.step,
        "attempt": step.attempt,
        **instants,
        "reward_mean": _mean(stats.reward_sum, stats.reward_count),
        "reward_std": step.trainer_metrics.get("reward_std", 0.0),
        "reward_failed": stats.samples - stats.reward_count - stats.unrewarded,
        "reward_parts": _reward_parts(step),
        "tasks": {name: _task(task) for name, task in step.tasks.items()},
        "score_failures": whole(step.score_failures, FAILURE_KINDS),
        "groups": step.groups,
        "samples": stats.samples,
        "tokens": stats.tokens_sum,
        "length_mean": _mean(stats.tokens_sum, stats.samples),
        "length_max": stats.tokens_max,
        "truncated": stats.truncated,
        "turns_mean": _mean(stats.turns_sum, stats.samples),
        "staleness_mean": step.staleness_mean,
        "staleness_max": step.staleness_max,
        "staleness": {str(age): count for age, count in step.staleness_histogram.items()},
        "queue": view.waiting_samples,
        "running": view.active_leases,
        "buffered_bytes": view.buffered_bytes,
        "dropped": whole(step.dropped_groups, DROP_REASONS),
        "reissued": step.reissued_samples,
        "samples_per_s": stats.samples / interval_s,
        "tokens_per_s": stats.tokens_sum / interval_s,
        "trainer": dict(step.trainer_metrics),
    }


def _reward_parts(step: StepSummary) -> dict[str, float]:
    """Means by name; of the tasks of a mixture by task and name, as each has parts of its own."""
    of = {f"{name}/": task.stats for name, task in step.tasks.items()} or {"": step.stats}
    return {
        f"{prefix}{name}": _mean(total, stats.reward_count)
        for prefix, stats in of.items()
        for name, total in stats.part_sums.items()
    }


def _task(task: TaskSummary) -> dict[str, Any]:
    """Without a mean where the step had none of it."""
    stats = task.stats
    return {
        "groups": task.groups,
        "dropped": task.dropped_groups,
        "reward_mean": stats.reward_sum / stats.reward_count if stats.reward_count else None,
        "length_mean": stats.tokens_sum / stats.samples if stats.samples else None,
    }


def _mean(total: float, count: int) -> float:
    """0 of nothing."""
    return total / count if count else 0.0


def whole(counts: Mapping[str, int], keys: Sequence[str]) -> dict[str, int]:
    """The counts with all keys, zeros included."""
    return dict.fromkeys(keys, 0) | dict(counts)


def first_line(path: Path) -> dict[str, Any]:
    """The first JSON line of a file; empty if there is none."""
    try:
        with path.open("rb") as file:
            document = json.loads(file.readline(_TAIL_BYTES))
    except (FileNotFoundError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def last_line(path: Path) -> dict[str, Any]:
    """The last whole JSON line of a file; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return {}
    for line in reversed(lines):
        try:
            document = json.loads(line)
        except ValueError:  # half a line that a killed scheduler left
            continue
        if isinstance(document, dict):
            return document
    return {}


def _checkpoint(view: CoreView) -> dict[str, Any] | None:
    """`path` is from the directory that holds checkpoints/: the run folder, or STREAMRL_STORE_DIR."""
    if view.checkpoint is None:
        return None
    step, path = view.checkpoint
    return {"step": step, "path": path}


def _walls(beats: Sequence[pb.Heartbeat | pb.TrainerHeartbeat]) -> dict[str, Any]:
    """Wall seconds of a role's connected processes, and the parts that they add up to."""
    parts: Counter[str] = Counter()
    for beat in beats:
        parts.update(dict(beat.bubble_seconds))
    return {"wall_s": sum(beat.wall_seconds for beat in beats), "parts": dict(parts)}


def _generator(entry: GeneratorEntry) -> dict[str, Any]:
    beat = entry.heartbeat
    return {
        "id": entry.hello.generator_id,
        "pool": entry.hello.pool,
        "slots": entry.hello.slots,
        "active": beat.active,
        "waiting": beat.waiting,
        "version": entry.version_step,
        "tokens": beat.tokens,
        "kv_capacity_tokens": entry.hello.kv_capacity_tokens if entry.hello.HasField("kv_capacity_tokens") else None,
        "kv_used_tokens": beat.kv_used_tokens if beat.HasField("kv_used_tokens") else None,
        "bubbles": dict(beat.bubble_seconds),
        "wall_s": beat.wall_seconds,
    }


def _trainer(entry: TrainerEntry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    beat = entry.heartbeat
    return {"id": entry.hello.trainer_id, "bubbles": dict(beat.bubble_seconds), "wall_s": beat.wall_seconds}


_GENERATING = ("busy", "skew")


def scaling(
    view: CoreView,
    *,
    generators: Sequence[GeneratorEntry],
    frozen_pool: str = "",
    trainer: TrainerEntry | None,
    clock: StepClock,
    now_s: float,
) -> dict[str, Any]:
    """The page's content. The pool of the frozen model is among `pools` alone: it generates nothing."""
    step_s = clock.step_s
    generating = [entry.beats for entry in generators if entry.hello.pool != frozen_pool]
    return {
        "waiting_samples": view.waiting_samples,
        "free_slots": view.fleet.free_slots,
        "buffered_groups": view.buffered_groups,
        "buffered_bytes": view.buffered_bytes,
        "step": view.step,
        "steps_left": view.steps - view.step,
        "step_s": step_s,
        "steps_per_s": 1 / step_s if step_s else None,
        "since_step_s": clock.since_s(now_s=now_s),
        **_times(step_s, generators=generating, trainer=trainer),
        "trainer": None if trainer is None else trainer.beats.shares(),
        "all": _pool(view.fleet, windows=generating),
        "pools": {
            name: _pool(pool, windows=[entry.beats for entry in generators if entry.hello.pool == name])
            for name, pool in view.pools.items()
        },
    }


def _times(
    step_s: float | None, *, generators: Sequence[BeatWindow], trainer: TrainerEntry | None
) -> dict[str, float | None]:
    generating = _share(mean_shares(generators), parts=_GENERATING)
    training = _share(None if trainer is None else trainer.beats.shares(), parts=("busy",))
    generation_s = None if step_s is None or generating is None else step_s * generating
    return {
        "generation_s": generation_s,
        "generator_seconds": None if generation_s is None else generation_s * len(generators),
        "training_s": None if step_s is None or training is None else step_s * training,
    }


def _share(shares: Mapping[str, float] | None, *, parts: Sequence[str]) -> float | None:
    return None if shares is None else sum(shares[part] for part in parts)


def _pool(pool: PoolView, *, windows: Sequence[BeatWindow]) -> dict[str, Any]:
    return {
        "generators": pool.generators,
        "leaving": pool.leaving,
        "silent": pool.silent,
        "slots": pool.slots,
        "active": pool.active,
        "tokens_per_s": tokens_per_s(windows),
        "idle": dict(pool.idle),
        "parts": mean_shares(windows),
    }


def delivery_status(view: CoreView) -> dict[str, str | None]:
    """Return the part `delivery`."""
    why = view.undelivered
    if why is None:
        return {"undelivered": None, "reason": None}
    states = view.groups_by_state
    in_work = sum(states[state] for state in ("planned", "issued", "running", "finished"))
    counts = f"step {view.step}: {view.delivered_groups} groups delivered, {states['scored']} scored, {in_work} in work"
    return {"undelivered": why.name.lower(), "reason": f"{why.value} ({counts})"}
