"""Every metric that a process of StreamRL exports: name, type, unit, labels, one sentence, and who writes it.

The processes make their metrics from these tables (`streamrl_pages/metrics.py`), `docs/reference/metrics.md` is generated from them, and the
dashboards' and alerts' queries are held against them. What a table does not have cannot be written.

Names follow Prometheus: `streamrl_` first, base units (seconds, bytes, tokens, ratio), `_total` behind counters. All values of labels are bounded.
A counter is there with zeros from the start. A gauge of something measured is NaN until it was measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from streamrl.spec.rljob import Metadata

MetricType = Literal["counter", "gauge", "histogram"]
Unit = Literal["", "seconds", "bytes", "tokens", "ratio", "steps", "nats", "samples", "groups", "cost"]
"""`cost`: whatever `costPerHour` of the job is in. Empty: a plain count, a flag or a number without a unit."""

WORKER_LABELS = ("namespace", "rljob", "pool", "role", "process")
"""On every series of a worker: where it belongs. `pool` is empty where it is no generator's; `namespace` is `local` where the job has none."""
JOB_LABELS = ("namespace", "rljob")
"""On every series of the operator that is about one job."""
LOCAL_NAMESPACE = "local"


def worker_labels(metadata: Metadata, *, role: str, process: str, pool: str = "") -> dict[str, str]:
    """The values of `WORKER_LABELS`."""
    values = (metadata.namespace or LOCAL_NAMESPACE, metadata.name, pool, role, process)
    return dict(zip(WORKER_LABELS, values, strict=True))


_SHORT_S = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0)
"""Of rewards: from a function to a judge on the network."""
_LONG_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Of steps and weights."""
_REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
_STALENESS = (0, 1, 2, 3, 4, 6, 8, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric."""

    name: str
    """As it is exported, `_total` of a counter included."""
    type: MetricType
    unit: Unit
    text: str
    by: tuple[str, ...]
    """Labels of its own."""
    labels: tuple[str, ...]
    """All of them."""
    buckets: tuple[float, ...]
    """Upper bounds; of a histogram alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricTable:
    """The metrics of one kind of process."""

    writer: str
    """Which process, for people."""
    source: str
    """Whose code sets them."""
    specs: Mapping[str, MetricSpec]
    """By the name without `streamrl_` and `_total`, as the code calls it."""


_Named = tuple[str, MetricSpec]


def _spec(
    kind: MetricType,
    name: str,
    text: str,
    *,
    unit: Unit = "",
    common: tuple[str, ...] = (),
    by: str = "",
    buckets: tuple[float, ...] = (),
) -> _Named:
    whole = f"streamrl_{name}_total" if kind == "counter" else f"streamrl_{name}"
    own = tuple(by.split())
    labels = tuple(dict.fromkeys((*common, *own)))  # a `pool` of its own stands in the place of the process's
    return name, MetricSpec(name=whole, type=kind, unit=unit, text=text, by=own, labels=labels, buckets=buckets)


def _counter(name: str, text: str, *, unit: Unit = "", by: str = "") -> _Named:
    return _spec("counter", name, text, unit=unit, common=WORKER_LABELS, by=by)


def _gauge(name: str, text: str, *, unit: Unit = "", by: str = "") -> _Named:
    return _spec("gauge", name, text, unit=unit, common=WORKER_LABELS, by=by)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *, unit: Unit = "seconds", by: str = "") -> _Named:
    return _spec("histogram", name, text, unit=unit, common=WORKER_LABELS, by=by, buckets=buckets)


def _operator(kind: MetricType, name: str, text: str, *, unit: Unit = "", by: str = "") -> _Named:
    buckets = _REQUEST_S if kind == "histogram" else ()
    return _spec(kind, f"operator_{name}", text, unit=unit, by=by, buckets=buckets)


def _of_job(kind: MetricType, name: str, text: str, *, unit: Unit = "", by: str = "") -> _Named:
    return _spec(kind, name, text, unit=unit, common=JOB_LABELS, by=by)


_WALL = (
    _counter(
        "bubble_seconds",
        "Wall time by what it was spent on: part busy, pipeline (with its cause), weights, skew, other.",
        unit="seconds",
        by="part cause",
    ),
    _counter(
        "wall_seconds",
        "Wall time of the process; the parts of streamrl_bubble_seconds_total add up to it.",
        unit="seconds",
    ),
)

SCHEDULER = MetricTable(
    writer="scheduler",
    source="scheduler/server/",
    specs=dict(
        (
            # ---- progress
            _gauge(
                "step", "Training steps done; it falls when a trainer goes on from an older checkpoint.", unit="steps"
            ),
            _gauge("planned_steps", "Training steps of the whole run.", unit="steps"),
            _gauge("checkpoint_step", "Step of the newest checkpoint; NaN before the first.", unit="steps"),
            _gauge("attempt", "Lives of the trainer, the present one included."),
            _histogram("step_duration_seconds", "A training step, from its first group to the update.", _LONG_S),
            _counter("trained_samples", "Samples of recorded steps; steps taken again count again.", unit="samples"),
            _counter(
                "trained_tokens", "Completion tokens of recorded steps; steps taken again count again.", unit="tokens"
            ),
            _histogram("sample_tokens", "Completion tokens of each trained sample.", _TOKENS, unit="tokens"),
            # ---- flow
            _gauge("queue_samples", "Samples that wait for a slot.", unit="samples"),
            _gauge("running_samples", "Samples that are being generated.", unit="samples"),
            _gauge("buffered_bytes", "Samples that run or wait for the trainer.", unit="bytes"),
            _gauge("groups", "Groups in memory by state of life.", unit="groups", by="state"),
            _counter("reissued_samples", "Samples issued again, since their generator was lost.", unit="samples"),
            _counter("moved_samples", "Samples that went on at an emptier generator.", unit="samples"),
            _counter("sent_spans", "Spans of traces that the endpoint has taken."),
            _counter("lost_spans", "Spans of traces that it has not taken, or not in time."),
            _counter("dropped_groups", "Groups that will never be trained, by reason.", unit="groups", by="reason"),
            _counter("task_dropped_groups", "The same by task of task.mixture.", unit="groups", by="task"),
            _counter(
                "task_trained_groups", "Groups of recorded steps, by task of task.mixture.", unit="groups", by="task"
            ),
            _counter(
                "left_out_versions",
                "Versions that another cluster was not told of: they would not have come before the next. With weights.http.uplinkBytesPerSecond.",
                by="cluster",
            ),
            _gauge("staleness_bound_steps", "maxStalenessSteps of the job, 0 in synchronous modes.", unit="steps"),
            _gauge("staleness_max_steps", "Largest staleness of the last step's groups.", unit="steps"),
            _histogram("group_staleness_steps", "Staleness of each trained group.", _STALENESS, unit="steps"),
            # ---- pools
            _gauge("generators", "Generators that are connected.", by="pool"),
            _gauge("generators_leaving", "Generators that finish what they hold and take nothing more.", by="pool"),
            _gauge("generators_silent", "Generators that were not heard for a lease.", by="pool"),
            _gauge("slots", "Slots of generators that do not leave.", by="pool"),
            _gauge("free_slots", "Slots without a sample at generators that take one.", by="pool"),
            _gauge(
                "decode_step_seconds",
                "Measured time of a decoding step by batch, of the pool's generator with the most slots.",
                unit="seconds",
                by="pool batch",
            ),
            # ---- links
            _counter(
                "link_received_bytes",
                "Messages of generators by pool (samples, mostly), and of the trainer (pool empty).",
                unit="bytes",
                by="pool",
            ),
            _counter(
                "link_sent_bytes",
                "Messages to generators by pool (requests), and to the trainer (samples; pool empty).",
                unit="bytes",
                by="pool",
            ),
            _gauge(
                "announced_weights_step",
                "Weight version that generators are told to use; NaN before the first.",
                unit="steps",
            ),
            _gauge(
                "weights_lag_steps",
                "Versions that the pool's slowest generator is behind the announced one; NaN before one has weights.",
                unit="steps",
                by="pool",
            ),
            # ---- rewards
            _gauge("reward_mean", "Mean reward of the last step."),
            _gauge("task_reward_mean", "Mean reward of the last step, by task of task.mixture.", by="task"),
            _gauge("task_length_mean_tokens", "Mean tokens of its samples.", unit="tokens", by="task"),
            _gauge("reward_std", "Standard deviation of the rewards of the last step."),
            _gauge(
                "zero_variance_groups_ratio",
                "Share of the last step's groups whose rewards are all equal: nothing to learn.",
                unit="ratio",
            ),
            _histogram("reward_duration_seconds", "Time that one reward took for one sample.", _SHORT_S, by="reward"),
            _counter(
                "score_failures",
                "Samples that got no reward, held-out ones too, by kind; of kind verifier_raised 0, as the data set's verifier raised on the answer.",
                unit="samples",
                by="kind",
            ),
            _gauge("evaluation_reward_mean", "Mean reward of the last evaluation's greedy answers."),
            _gauge("evaluation_sampled_reward_mean", "Mean reward of its sampled answers."),
            _gauge(
                "task_evaluation_reward_mean", "Mean reward of its greedy answers, by task of task.mixture.", by="task"
            ),
            # ---- agents in a pool of their own
            _gauge("agent_hosts", "Agent hosts that are connected; 0 without a pool of agents, as all that follow."),
            _gauge("agent_sessions", "Samples whose programs they play."),
            _gauge(
                "agent_requests",
                "Requests by state: asked (with a host), waiting (turns), waiting_prompts.",
                by="state",
            ),
            _counter("agent_waits", "Requests that got a place with a host."),
            _counter("agent_wait_seconds", "Time that they waited for it.", unit="seconds"),
            _counter("agent_hosts_ended", "Hosts that are no more: left (they said so) or lost.", by="kind"),
            _counter("agent_requests_again", "Requests of such hosts, which others were asked."),
            # ---- training
            _gauge("loss", "Loss of the last step, mean over its updates."),
            _gauge("value_loss", "Loss of the critic in the last step; 0 without one."),
            _gauge("entropy_nats", "Mean entropy of the policy at the last step's tokens.", unit="nats"),
            _gauge(
                "behaviour_kl_nats",
                "KL divergence of the policy from the one that drew the tokens, in the last step.",
                unit="nats",
            ),
            _gauge(
                "reference_kl_nats",
                "KL divergence of the policy from the reference, in the last step; 0 without one.",
                unit="nats",
            ),
            _gauge(
                "clip_ratio", "Share of the last step's tokens that the clip left without a gradient.", unit="ratio"
            ),
            _gauge("masked_ratio", "Share of the last step's tokens that the correction masked.", unit="ratio"),
            _gauge("gradient_norm", "Norm of the gradient in the last step, before clipping; mean over its updates."),
            _gauge("learning_rate", "Learning rate of the last update."),
            _gauge(
                "mfu_ratio",
                "Model FLOPs utilisation of the trainer's devices in the last step; NaN where their peak is not known.",
                unit="ratio",
            ),
            _gauge("trainer_tokens_per_second", "Tokens of the last step's passes a second in which they ran."),
            _gauge("padding_ratio", "Share of padding in the last step's passes.", unit="ratio"),
            _gauge(
                "pass_seconds",
                "Time of the last step by part: data, forward, backward, collectives (within these two), optimiser; mean of the ranks.",
                unit="seconds",
                by="part",
            ),
            _counter("skipped_nonfinite_updates", "Updates that were left out, since the gradient was no number."),
            _gauge(
                "train_infer_logprob_diff_mean_nats",
                "Mean of |trainer's - generator's log-prob| over the last step's tokens.",
                unit="nats",
                by="pool lag",
            ),
            _gauge(
                "train_infer_logprob_diff_max_nats",
                "Largest |trainer's - generator's log-prob| of the last step.",
                unit="nats",
                by="pool lag",
            ),
            _gauge(
                "train_infer_logprob_diff_kl_nats",
                "KL divergence of the generator's from the trainer's policy (K3) in the last step.",
                unit="nats",
                by="pool lag",
            ),
            _gauge(
                "train_infer_logprob_diff_tokens",
                "Tokens of the last step that were compared.",
                unit="tokens",
                by="pool lag",
            ),
            _gauge(
                "pool_clip_ratio",
                "As streamrl_clip_ratio, by the pool that drew the sample and its lag.",
                unit="ratio",
                by="pool lag",
            ),
            _gauge(
                "pool_sequence_clip_ratio",
                "Share of the last step's sequences whose ratio is outside the clip at every token.",
                unit="ratio",
                by="pool lag",
            ),
            _gauge("warning", "1 while the warning holds, else 0.", by="type"),
            # ---- cost
            _counter(
                "cost",
                "Cost of connected generators by pool, and of the trainer (pool empty), by the job's costPerHour.",
                unit="cost",
                by="pool",
            ),
            _gauge(
                "cost_per_hour",
                "What the connected generators of a pool, and the trainer (pool empty), cost an hour.",
                unit="cost",
                by="pool",
            ),
            _gauge("cost_per_step", "Cost of the last step.", unit="cost"),
            _gauge(
                "cost_per_million_tokens", "Cost of the last step, of a million of its completion tokens.", unit="cost"
            ),
            _gauge(
                "cost_per_reward_point",
                "Cost since the first evaluation, of each .01 of held-out reward won since; NaN while nothing is won.",
                unit="cost",
            ),
            # ---- lengths and the ranker
            _gauge("length_trusted", "1 if dispatch may use predicted lengths, else 0."),
            _counter(
                "length_predictions", "Groups that began, by what predicted their length.", unit="groups", by="source"
            ),
            _gauge("length_signal_trusted", "1 if the signal's predictions may be used, else 0.", by="signal"),
            _gauge("length_pairs", "Predictions in the window that are judged.", by="signal"),
            _gauge(
                "length_recall_ratio",
                "Share of the longest 20 % that were predicted to be so.",
                unit="ratio",
                by="signal",
            ),
            _gauge("length_recall_lower_ratio", "Lower 95 % limit of that recall.", unit="ratio", by="signal"),
            _gauge("length_rank_correlation", "Spearman's, of predicted places and lengths.", by="signal"),
            _gauge("ranker_ready", "1 if the ranker's process answers, else 0; 0 where there is none."),
            _gauge("ranker_waiting_prompts", "Prompts that the ranker's process has not scored yet."),
            _gauge("ranker_pairs", "Prompts with their lengths that the ranker's process remembers."),
            _gauge("ranker_cpu_seconds", "CPU time of the ranker's process that lives.", unit="seconds"),
            _counter("ranker_deaths", "Ends of the ranker's process that nobody asked for."),
            _counter("ranker_scored_prompts", "Prompts that the ranker's process has scored."),
            _counter("ranker_dropped_prompts", "Prompts that waited for a score until newer ones took their place."),
            _counter("ranker_rounds", "Rounds of tuning that are done."),
        )
    ),
)

GENERATOR = MetricTable(
    writer="generator",
    source="generator/status.py",
    specs=dict(
        (
            *_WALL,
            _gauge("generator_slots", "Requests that can be active at once."),
            _gauge("generator_active", "Requests in a slot."),
            _gauge("generator_waiting", "Requests accepted, not yet in a slot."),
            _counter("generator_tokens", "Tokens generated.", unit="tokens"),
            _gauge(
                "kv_capacity_tokens", "Tokens whose keys and values fit; NaN: the engine has no bound.", unit="tokens"
            ),
            _gauge("kv_used_tokens", "Of these, taken now; NaN: the engine has no bound.", unit="tokens"),
            _gauge("generator_weights_step", "Weight version in the engine; NaN before the first.", unit="steps"),
            _counter(
                "weights_pulled_bytes",
                "Bytes of weights that have arrived, by source: trainer (or the folder that it writes to), peer (a generator of the same cluster), cache (of the pool).",
                unit="bytes",
                by="source",
            ),
            _counter("weights_served_bytes", "Bytes of weights that were sent to other generators.", unit="bytes"),
            _counter(
                "weights_pull_part_seconds",
                "Time of pulls by part: manifest, fetch, cache, deltas (applying them), verify. Parts overlap.",
                unit="seconds",
                by="part",
            ),
            _counter("weights_pulled_versions", "Weight versions that the engine has taken."),
            _counter(
                "weights_delta_saved_bytes",
                "Bytes of weights that were not fetched, since deltas led to them from the version before.",
                unit="bytes",
            ),
            _counter("weights_delta_failures", "Tensors that were fetched, since a delta to them could not be used."),
            _counter("weights_failures", "Pulls that failed, and versions that the engine refused."),
            _histogram(
                "weights_pull_duration_seconds",
                "From the announcement of a version until it has arrived and is verified.",
                _LONG_S,
            ),
            _histogram(
                "weights_load_duration_seconds",
                "Until the engine has taken a version that has arrived; nothing is generated meanwhile.",
                _LONG_S,
            ),
            _counter(
                "weights_load_part_seconds",
                "Seconds of loads by part: copy (beside generation), pause (until no token of the old weights is on its way), load, cache (keys and values computed again).",
                unit="seconds",
                by="part",
            ),
        )
    ),
)

TRAINER_RANK = MetricTable(
    writer="trainer, every rank",
    source="trainer/status.py",
    specs=dict(
        (
            *_WALL,
            _counter(
                "weights_served_bytes",
                "Bytes of weights that this rank holds and that were sent to generators, also through rank 0.",
                unit="bytes",
            ),
            _counter("weights_delta_made_bytes", "Bytes of deltas between versions that were made.", unit="bytes"),
            _counter(
                "weights_delta_seconds",
                "Time in which deltas were made, before the versions were announced.",
                unit="seconds",
            ),
        )
    ),
)

TRAINER = MetricTable(
    writer="trainer, rank 0",
    source="trainer/status.py",
    specs={
        **TRAINER_RANK.specs,
        **dict(
            (
                _gauge("trainer_step", "Steps that the weights have taken.", unit="steps"),
                _gauge("trainer_attempt", "Number of this trainer's attempt; before the first welcome: 0."),
                _gauge(
                    "trainer_checkpoint_timestamp_seconds",
                    "When the newest checkpoint was written to the trainer's disk, since 1970; NaN before the first.",
                    unit="seconds",
                ),
                _gauge("trainer_waiting_groups", "Groups received, not yet taken by the step loop.", unit="groups"),
                _counter("weights_published_versions", "Weight versions that were published."),
                _counter(
                    "weights_copy_seconds",
                    "Time in which the trainer stood still while its weights were copied.",
                    unit="seconds",
                ),
                _counter(
                    "weights_wait_seconds",
                    "Time in which it stood still after a step, until the version before was announced.",
                    unit="seconds",
                ),
            )
        ),
    },
)


OPERATOR = MetricTable(
    writer="operator",
    source="streamrl_operator/metrics.py",
    specs=dict(
        (
            _operator("counter", "reconciles", "Reconciles of jobs."),
            _operator("histogram", "reconcile_seconds", "Time of a reconcile.", unit="seconds"),
            _operator("counter", "reconcile_errors", "Reconciles that failed, by reason.", by="reason"),
            _operator("counter", "api_requests", "Requests to the API server.", by="verb resource code"),
            _operator(
                "histogram", "api_request_seconds", "Time of a request that is no watch.", unit="seconds", by="verb"
            ),
            _operator("gauge", "cluster_connected", "1 for a member cluster that answers.", by="cluster"),
            _operator("counter", "kopf_restarts", "Times that kopf's watch of jobs had to be begun again."),
            _operator("gauge", "leader", "1 while this process acts."),
            _operator(
                "gauge",
                "namespace_seen",
                "1 for a namespace that this process follows, 0 for one that the API server refuses to show. Empty name: all.",
                by="watched",
            ),
            _operator("gauge", "objects", "Objects in the caches."),
            _operator(
                "gauge",
                "cache_stale_seconds",
                "For how long the API server has refused or failed to list or watch a kind, in the namespace where that is longest; else 0.",
                unit="seconds",
                by="resource",
            ),
            _operator("gauge", "queue_depth", "Jobs that are due and wait for a worker."),
            _operator("gauge", "unreachable_jobs", "Jobs whose scheduler's numbers cannot be read for minutes."),
            _of_job("gauge", "job_condition", "1 if the condition of the RLJob is True, else 0.", by="type"),
            _of_job(
                "gauge",
                "job_waiting",
                "1 for what the job, or one of its pools, waits for: the reason of its condition Ready; Other: a reason that Kubernetes gives.",
                by="pool reason",
            ),
            _of_job(
                "gauge",
                "job_start_timestamp_seconds",
                "When the job's pods were first made, or made again after suspend, since 1970; absent without pods.",
                unit="seconds",
            ),
            _of_job("gauge", "job_trainer_attempts", "Lives of the trainer, as the scheduler last said; 0: none yet."),
            _of_job("gauge", "job_restarts", "Restarts that count towards maxRestarts."),
            _of_job(
                "gauge",
                "job_certificate_expiry_timestamp_seconds",
                "When the certificate of a role, or the job's authority (role ca), ends; since 1970.",
                unit="seconds",
                by="role",
            ),
            _of_job(
                "gauge",
                "job_certificate_life_seconds",
                "How long that certificate is valid, from its beginning to its end.",
                unit="seconds",
                by="role",
            ),
            _of_job("gauge", "pool_desired_replicas", "Generators that the pool should have.", by="pool cluster"),
            _of_job("gauge", "pool_ready_replicas", "Generators of the pool whose pods are ready.", by="pool cluster"),
            _of_job(
                "counter",
                "pool_scale_events",
                "Changes of the pool's desired replicas, by direction (up, down).",
                by="pool direction",
            ),
        )
    ),
)

TABLES = (SCHEDULER, GENERATOR, TRAINER_RANK, TRAINER, OPERATOR)
