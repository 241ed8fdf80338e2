"""The scheduler's page for Prometheus: what is set when somebody asks, and what is counted as steps are recorded.

Owns which value stands under which name of `streamrl.metrics.SCHEDULER`. Does not own the values: they are the core's view, the last lines of
`steps.jsonl` and `evaluations.jsonl`, and what the connections have counted.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from streamrl.metrics import SCHEDULER, worker_labels
from streamrl.spec import RLJob
from streamrl_pages.metrics import Labels, MetricSet
from streamrl_workers.metrics import logprob_diff
from streamrl_workers.process.silences import PROCESS_FROZEN
from streamrl_workers.scheduler.dispatch.speeds import Guess
from streamrl_workers.scheduler.lengths import JUDGED, SOURCES, Lengths
from streamrl_workers.scheduler.lengths.trust import Quality
from streamrl_workers.scheduler.server import cost
from streamrl_workers.scheduler.server.connections import Connections
from streamrl_workers.scheduler.server.ranker_client import RankerStatus
from streamrl_workers.scheduler.views import DROP_REASONS, FAILURE_KINDS, CoreView, StepSummary
from streamrl_workers.tasks.agent_hosts import HOST_ENDS, AgentHosts

_ROLE = "scheduler"
_TRAINING = {
    "loss": "loss",
    "value_loss": "value_loss",
    "gradient_norm": "gradient_norm",
    "learning_rate": "learning_rate",
    "reward_std": "reward_std",
    "tokens_per_second": "trainer_tokens_per_second",
    "padding_share": "padding_ratio",
}
"""Of a step's line, in `trainer` -> metric."""
_PARTS = ("data", "forward", "backward", "collectives", "optimiser")
"""Of a step's time; in `trainer` with `_seconds`."""
_FORWARD = {
    "entropy": "entropy_nats",
    "behaviour_kl": "behaviour_kl_nats",
    "reference_kl": "reference_kl_nats",
    "clip_fraction": "clip_ratio",
    "masked_fraction": "masked_ratio",
}
"""The same, of what only a forward pass measures."""


def _amount(value: float | None) -> float | None:
    """What can be counted; a trainer may tell any number."""
    return value if value is not None and math.isfinite(value) and value >= 0 else None


class SchedulerMetrics:
    """Everything on the page."""

    def __init__(self, job: RLJob, *, process: str) -> None:
        self._metrics = MetricSet(SCHEDULER, common=worker_labels(job.metadata, role=_ROLE, process=process))
        self._pools = [pool.name for pool in job.spec.generators]
        self._clusters = job.spec.other_clusters
        self._metrics.set("staleness_bound_steps", job.spec.pipeline.staleness)
        for name in {reward.name for task in job.spec.task.tasks for reward in task.rewards}:
            self._metrics.begin("reward_duration_seconds", name)
        self._tasks = [task.name for task in job.spec.task.tasks if task.name]

    def step_recorded(self, step: StepSummary) -> None:
        """Count a step."""
        metrics = self._metrics
        metrics.add("trained_samples", step.stats.samples)
        metrics.add("trained_tokens", step.stats.tokens_sum)
        for tokens in step.stats.lengths:
            metrics.observe("sample_tokens", tokens)
        for staleness, groups in step.staleness_histogram.items():
            for _ in range(groups):
                metrics.observe("group_staleness_steps", staleness)
        if (seconds := _amount(step.trainer_metrics.get("step_seconds"))) is not None:
            metrics.observe("step_duration_seconds", seconds)
        for name, task in step.tasks.items():
            metrics.add("task_trained_groups", task.groups, name)
        metrics.add("skipped_nonfinite_updates", _amount(step.trainer_metrics.get("skipped_nonfinite_steps")) or 0.0)

    def reward_took(self, name: str, seconds: float) -> None:
        """Count how long a reward took."""
        self._metrics.observe("reward_duration_seconds", seconds, name)

    def core(self, view: CoreView) -> None:
        """Take over the core's state."""
        metrics = self._metrics
        metrics.set("step", view.step)
        metrics.set("planned_steps", view.steps)
        metrics.set("attempt", view.attempt)
        metrics.set("checkpoint_step", None if view.checkpoint is None else view.checkpoint[0])
        metrics.set("queue_samples", view.waiting_samples)
        metrics.set("running_samples", view.active_leases)
        metrics.set("buffered_bytes", view.buffered_bytes)
        metrics.set("announced_weights_step", view.announced_step)
        metrics.total("reissued_samples", view.reissued_samples)
        metrics.total("moved_samples", view.moved_samples)
        for state, groups in view.groups_by_state.items():
            metrics.set("groups", groups, state)
        for reason in DROP_REASONS:
            metrics.total("dropped_groups", view.dropped_groups.get(reason, 0), reason)
        for task in self._tasks:
            metrics.total("task_dropped_groups", view.dropped_groups_of.get(task, 0), task)
        for kind in FAILURE_KINDS:
            metrics.total("score_failures", view.score_failures.get(kind, 0), kind)
        for cluster in self._clusters:
            turn = view.cluster_turns.get(cluster)
            metrics.total("left_out_versions", turn.left_out_versions if turn else 0, cluster)
        self._speeds(view)
        self._generators(view)

    def _generators(self, view: CoreView) -> None:
        for name in self._pools:
            pool = view.pools.get(name)
            self._metrics.set("generators", pool.generators if pool else 0, name)
            self._metrics.set("generators_leaving", pool.leaving if pool else 0, name)
            self._metrics.set("generators_silent", pool.silent if pool else 0, name)
            self._metrics.set("slots", pool.slots if pool else 0, name)
            self._metrics.set("free_slots", pool.free_slots if pool else 0, name)

    def _speeds(self, view: CoreView) -> None:
        curves = view.speeds.items()
        known = {pool: curve for pool, curve in curves if pool in self._pools and not isinstance(curve, Guess)}
        points: dict[Labels, float] = {
            (pool, str(batch)): seconds
            for pool, curve in known.items()
            for batch, seconds in zip(curve.batches, curve.seconds, strict=True)
        }
        self._metrics.replace("decode_step_seconds", points)

    def links(self, connections: Connections, *, announced_step: int | None) -> None:
        """Take over what the connections have counted."""
        for pool in (cost.TRAINER_POOL, *self._pools):
            traffic = connections.traffic(pool)
            self._metrics.total("link_received_bytes", traffic.received_bytes, pool)
            self._metrics.total("link_sent_bytes", traffic.sent_bytes, pool)
        oldest: dict[str, int] = {}
        for entry in connections.generators.values():
            if entry.version_step is not None:
                oldest[entry.pool] = min(entry.version_step, oldest.get(entry.pool, entry.version_step))
        for pool in self._pools:
            lag = None if announced_step is None or pool not in oldest else announced_step - oldest[pool]
            self._metrics.set("weights_lag_steps", lag, pool)

    def agents(self, hosts: AgentHosts | None) -> None:
        """Take over the state of the pool of agents; None: there is none."""
        metrics, numbers = self._metrics, {} if hosts is None else hosts.numbers
        metrics.set("agent_hosts", numbers.get("hosts", 0))
        metrics.set("agent_sessions", numbers.get("sessions", 0))
        for state in ("asked", "waiting", "waiting_prompts"):
            metrics.set("agent_requests", numbers.get(state, 0), state)
        metrics.total("agent_waits", 0 if hosts is None else hosts.waits)
        metrics.total("agent_wait_seconds", 0.0 if hosts is None else hosts.waited_s)
        metrics.total("agent_requests_again", 0 if hosts is None else hosts.asked_again)
        for kind in HOST_ENDS:
            metrics.total("agent_hosts_ended", 0 if hosts is None else hosts.ended[kind], kind)

    def spans(self, sent: int, lost: int) -> None:
        """Take over what became of the spans of traces."""
        self._metrics.total("sent_spans", sent)
        self._metrics.total("lost_spans", lost)

    def last_step(self, line: Mapping[str, Any], *, warnings: Collection[str], cost_per_step: float | None) -> None:
        """Take over the last step's line; empty before the first."""
        metrics, trainer = self._metrics, line.get("trainer", {})
        metrics.set("reward_mean", line.get("reward_mean"))
        for name, task in line.get("tasks", {}).items():
            metrics.set("task_reward_mean", task.get("reward_mean"), name)
            metrics.set("task_length_mean_tokens", task.get("length_mean"), name)
        metrics.set("staleness_max_steps", line.get("staleness_max"))
        groups, equal = trainer.get("groups"), trainer.get("zero_variance_groups")
        metrics.set("zero_variance_groups_ratio", equal / groups if groups and equal is not None else None)
        for key, name in _TRAINING.items():
            metrics.set(name, trainer.get(key))
        metrics.set("mfu_ratio", trainer.get("mfu") or None)  # 0: no peak is known
        for part in _PARTS:
            metrics.set("pass_seconds", trainer.get(f"{part}_seconds"), part)
        for key, name in _FORWARD.items():  # without tokens nothing was measured
            metrics.set(name, trainer.get(key) if trainer.get("forward_tokens") else None)
        for measure, name in logprob_diff.MEASURES.items():
            values = logprob_diff.read(trainer, measure=measure)
            metrics.replace(name, {(at.pool, at.lag): value for at, value in values.items()})
        for name in (*logprob_diff.WARNINGS, PROCESS_FROZEN):
            metrics.set("warning", name in warnings, name)
        metrics.set("cost_per_step", cost_per_step)
        metrics.set("cost_per_million_tokens", cost.per_million_tokens(cost_per_step, tokens=line.get("tokens", 0)))

    def evaluations(self, first: Mapping[str, Any], last: Mapping[str, Any]) -> None:
        """Take over the first and the last line of the evaluations; empty before the first."""
        self._metrics.set("evaluation_reward_mean", last.get("mean_reward"))
        self._metrics.set("evaluation_sampled_reward_mean", last.get("sampled_reward"))
        for name, task in last.get("tasks", {}).items():
            self._metrics.set("task_evaluation_reward_mean", task.get("mean_reward"), name)
        self._metrics.set("cost_per_reward_point", cost.per_reward_point(first, last))

    def costs(self, meter: cost.CostMeter) -> None:
        """Take over what was spent."""
        for pool, spent in meter.spent.items():
            self._metrics.total("cost", spent, pool)
        for pool, rate in meter.per_hour.items():
            self._metrics.set("cost_per_hour", rate, pool)

    def lengths(self, lengths: Lengths, ranker: RankerStatus) -> None:
        """Take over what is predicted, and how well."""
        metrics = self._metrics
        metrics.set("length_trusted", lengths.trusted)
        for source in SOURCES:
            metrics.total("length_predictions", lengths.predictions.get(source, 0), source)
        for signal in JUDGED:
            quality = asdict(lengths.quality.get(signal, Quality()))
            metrics.set("length_signal_trusted", signal in lengths.trusted_signals, signal)
            metrics.set("length_pairs", quality["pairs"], signal)
            metrics.set("length_recall_ratio", quality["recall"], signal)
            metrics.set("length_recall_lower_ratio", quality["recall_lower"], signal)
            metrics.set("length_rank_correlation", quality["rank_correlation"], signal)
        metrics.set("ranker_ready", ranker.state == "ready")
        metrics.set("ranker_waiting_prompts", ranker.waiting)
        metrics.set("ranker_pairs", ranker.pairs)
        metrics.set("ranker_cpu_seconds", ranker.cpu_s)
        metrics.total("ranker_deaths", ranker.deaths)
        metrics.total("ranker_scored_prompts", ranker.scored)
        metrics.total("ranker_dropped_prompts", ranker.dropped)
        metrics.total("ranker_rounds", ranker.rounds)

    def render(self) -> bytes:
        """`/metrics`"""
        return self._metrics.render()
