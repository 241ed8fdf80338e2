"""*Pools and links*: replicas, speed, caches, bytes and versions of each pool of generators."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.parts import by_pool, quantiles
from dashboards.shared import JOB, NAMESPACE, ONE_JOB, POOL, POOLS, RANGE, Advice, Panel, Query, board, curves

UID = "streamrl-pools"


def build() -> Dashboard:
    """Make it."""
    return board(
        UID,
        "StreamRL / Pools and links",
        says="Each pool of generators: how many, how fast, how full, and what goes over its links. Below, the pool of agents.",
        choices=(NAMESPACE, ONE_JOB, POOLS),
        sections={
            "Replicas": _replicas(),
            "Speed": _speed(),
            "Links": _links(),
            "Weights": _weights(),
            "Agents": _agents(),
        },
    )


def _by_pool(name: str, legend: str = "{{pool}}") -> Query:
    return Query(expr=f"sum by (pool) ({name}{{{POOL}}})", legend=legend)


def _rate(name: str, legend: str = "{{pool}}") -> Query:
    return Query(expr=f"sum by (pool) (rate({name}{{{POOL}}}[{RANGE}]))", legend=legend)


def _replicas() -> list[Panel]:
    return [
        curves(
            "Generators",
            _by_pool("streamrl_generators", "{{pool}} connected"),
            _by_pool("streamrl_generators_leaving", "{{pool}} leaving"),
            _by_pool("streamrl_generators_silent", "{{pool}} silent"),
            says=Advice(
                good="none is silent.",
                otherwise="a silent one is lost soon, and its samples go to others: see its log.",
            ),
        ),
        curves(
            "Desired and ready replicas",
            _by_pool("streamrl_pool_desired_replicas", "{{pool}} desired"),
            _by_pool("streamrl_pool_ready_replicas", "{{pool}} ready"),
            says=Advice(
                good="both are equal.", otherwise="pods are Pending or fail: look at their events, quota and GPUs."
            ),
        ),
        curves(
            "Changes of size per hour",
            Query(
                expr=f"sum by (pool, direction) (increase(streamrl_pool_scale_events_total{{{POOL}}}[1h]))",
                legend="{{pool}} {{direction}}",
            ),
            says=Advice(
                good="few.",
                otherwise="up and down in turn: raise cooldownSeconds, or narrow minReplicas and maxReplicas.",
            ),
        ),
        curves(
            "Slots in use",
            Query(
                expr=f"1 - sum by (pool) (streamrl_free_slots{{{POOL}}}) / sum by (pool) (streamrl_slots{{{POOL}}})",
                legend="{{pool}}",
            ),
            unit="percentunit",
            says=Advice(
                good="near 100 %.", otherwise="nothing waits for the slots: fewer generators, or a larger batch."
            ),
        ),
    ]


def _speed() -> list[Panel]:
    return [
        curves(
            "Tokens/s",
            _rate("streamrl_generator_tokens_total"),
            says=Advice(good="grows with the replicas.", otherwise="if it does not, the last replicas bring nothing."),
        ),
        curves(
            "Tokens/s of a generator",
            Query(
                expr=f"sum by (pool) (rate(streamrl_generator_tokens_total{{{POOL}}}[{RANGE}])) / "
                f"sum by (pool) (streamrl_generators{{{POOL}}})",
                legend="{{pool}}",
            ),
            says=Advice(good="steady.", otherwise="a fall is emptier slots, longer answers or a slower device."),
        ),
        curves(
            "Time of a decoding step by batch",
            Query(
                expr=f"avg by (pool, batch) (streamrl_decode_step_seconds{{{POOL}}})", legend="{{pool}} at {{batch}}"
            ),
            unit="s",
            says=Advice(
                good="it grows slower than the batch: fuller batches pay.",
                otherwise="where it grows as fast as the batch, more slots bring nothing.",
            ),
        ),
        curves(
            "KV cache in use",
            Query(
                expr=f"sum by (pool) (streamrl_kv_used_tokens{{{POOL}}}) / sum by (pool) (streamrl_kv_capacity_tokens{{{POOL}}})",
                legend="{{pool}}",
            ),
            Query(
                expr=f"max by (pool) (streamrl_kv_used_tokens{{{POOL}}} / streamrl_kv_capacity_tokens{{{POOL}}})",
                legend="{{pool}}, fullest",
            ),
            unit="percentunit",
            says=Advice(
                good="below 90 %.",
                otherwise="samples wait for room, and vLLM computes preempted ones again: fewer slots, or a smaller maxTokens.",
            ),
        ),
        curves(
            "Requests at the engine",
            _by_pool("streamrl_generator_active", "{{pool}} in a slot"),
            _by_pool("streamrl_generator_waiting", "{{pool}} waiting"),
            says=Advice(
                good="few wait at the engine.", otherwise="the engine takes fewer than its slots: look at its KV cache."
            ),
        ),
        curves(
            "Samples issued again or moved",
            Query(expr=f"sum(rate(streamrl_reissued_samples_total{{{JOB}}}[{RANGE}]))", legend="again, generator lost"),
            Query(expr=f"sum(rate(streamrl_moved_samples_total{{{JOB}}}[{RANGE}]))", legend="moved to an emptier one"),
            unit="ops",
            says=Advice(
                good="none is issued again.", otherwise="generators are lost: see their pods, and leaseSeconds."
            ),
        ),
    ]


def _links() -> list[Panel]:
    return [
        curves(
            "Bytes/s to the scheduler",
            by_pool(f"sum by (pool) (rate(streamrl_link_received_bytes_total{{{POOL}}}[{RANGE}]))"),
            unit="Bps",
            says=Advice(good="follows tokens/s.", otherwise="a pool at 0 while it has generators is cut off."),
        ),
        curves(
            "Bytes/s from the scheduler",
            by_pool(f"sum by (pool) (rate(streamrl_link_sent_bytes_total{{{POOL}}}[{RANGE}]))"),
            unit="Bps",
            says=Advice(
                good="small beside the weights.",
                otherwise="long prompts are sent again and again: see samples issued again.",
            ),
        ),
        curves(
            "Weights, bytes/s",
            Query(
                expr=f"sum(rate(streamrl_weights_served_bytes_total{{{JOB}}}[{RANGE}]))", legend="sent by the trainer"
            ),
            _rate("streamrl_weights_pulled_bytes_total", "{{pool}} received"),
            unit="Bps",
            says=Advice(
                good="a peak at each version.", otherwise="never falling: the link is full, and versions come late."
            ),
        ),
        curves(
            "Bytes of weights for a version",
            Query(
                expr=f"sum by (pool) (increase(streamrl_weights_pulled_bytes_total{{{POOL}}}[$__range])) / "
                f"sum by (pool) (increase(streamrl_weights_pulled_versions_total{{{POOL}}}[$__range]))",
                legend="{{pool}}",
            ),
            unit="bytes",
            says=Advice(good="the size of the model.", otherwise="more: pulls fail half-way and begin again."),
        ),
    ]


def _weights() -> list[Panel]:
    return [
        curves(
            "Versions behind the announced one",
            _by_pool("streamrl_weights_lag_steps"),
            says=Advice(
                good="0 or 1.", otherwise="the pool's link or load is slower than a step: see the times below."
            ),
        ),
        curves(
            "Versions",
            Query(expr=f"max(streamrl_announced_weights_step{{{JOB}}})", legend="announced"),
            Query(expr=f"min by (pool) (streamrl_generator_weights_step{{{POOL}}})", legend="{{pool}}, slowest"),
            says=Advice(
                good="all lines together.", otherwise="a line that stays is a generator that cannot pull: see its log."
            ),
        ),
        curves(
            "Time to pull a version",
            *quantiles("streamrl_weights_pull_duration_seconds", POOL, by="pool"),
            unit="s",
            says=Advice(good="below a step's time.", otherwise="put the pool nearer, or widen its link."),
        ),
        curves(
            "Pulls that failed, per hour",
            Query(expr=f"sum by (pool) (increase(streamrl_weights_failures_total{{{POOL}}}[1h]))", legend="{{pool}}"),
            says=Advice(good="0.", otherwise="the generator's log has the reason: a hash, a connection, a full disk."),
        ),
    ]


def _agents() -> list[Panel]:
    return [
        curves(
            "Agents",
            Query(expr=f"sum(streamrl_agent_hosts{{{JOB}}})", legend="hosts"),
            Query(expr=f"sum(streamrl_agent_sessions{{{JOB}}})", legend="sessions"),
            Query(expr=f'sum(streamrl_agent_requests{{{JOB},state="waiting"}})', legend="turns that wait for a place"),
            says=Advice(
                good="no turn waits.",
                otherwise="generators wait with it: raise maxReplicas of the agents, or `sessions`.",
            ),
        ),
        curves(
            "Wait for a place with an agent host",
            Query(
                expr=f"sum(rate(streamrl_agent_wait_seconds_total{{{JOB}}}[{RANGE}])) / "
                f"clamp_min(sum(rate(streamrl_agent_waits_total{{{JOB}}}[{RANGE}])), 0.001)",
                legend="mean",
            ),
            unit="s",
            says=Advice(good="far below a turn's time.", otherwise="more hosts, or more `sessions` in each."),
        ),
        curves(
            "Agent hosts that ended, per hour",
            Query(expr=f"sum by (kind) (increase(streamrl_agent_hosts_ended_total{{{JOB}}}[1h]))", legend="{{kind}}"),
            Query(
                expr=f"sum(increase(streamrl_agent_requests_again_total{{{JOB}}}[1h]))", legend="requests asked again"
            ),
            says=Advice(good="none is lost.", otherwise="programs fill the pod's memory, or nodes go: see its events."),
        ),
    ]
