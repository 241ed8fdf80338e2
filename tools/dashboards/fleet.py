"""*Jobs*: all jobs at a glance: who is starved, and what it costs."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.parts import BUBBLE, WALL, idle_share
from dashboards.shared import JOB, JOBS, NAMESPACE, RANGE, Advice, Panel, Query, board, curves, number, rows, stacked

UID = "streamrl-jobs"
_BY = "namespace, rljob"
_NAME = "{{namespace}}/{{rljob}}"
_TRAINER, _GENERATORS = f'{JOB},role="trainer"', f'{JOB},role="generator"'
_LOST_RATE = (
    f"sum by ({_BY}) (sum by ({_BY}, pool) (streamrl_cost_per_hour{{{JOB}}}) * ({idle_share(f'{_BY}, pool', JOB)}))"
)


def build() -> Dashboard:
    """Make it."""
    return board(
        UID,
        "StreamRL / Jobs",
        says="All jobs of the chosen namespaces: who is starved, and what it costs.",
        choices=(NAMESPACE, JOBS),
        sections={
            "All": _totals(),
            "Waiting and failed": _held_up(),
            "Jobs": [_table()],
            "Who is starved": _starved(),
            "What it costs": _cost(),
        },
    )


def _totals() -> list[Panel]:
    return [
        number(
            "Jobs",
            Query(expr=f"count(count by ({_BY}) (streamrl_step{{{JOB}}}))"),
            says=Advice(
                good="as many as you have started.", otherwise="look at the conditions in the dashboard Operator."
            ),
        ),
        number(
            "Generators",
            Query(expr=f"sum(streamrl_generators{{{JOB}}})"),
            says=Advice(good="what the pools ask for.", otherwise="look at pods that are Pending in Pools and links."),
        ),
        number(
            "Trainers idle",
            Query(expr=idle_share("role", _TRAINER)),
            unit="percentunit",
            says=Advice(good="below 10 %.", otherwise="find the job in the table, and its cause in Bubbles."),
        ),
        number(
            "Generators idle",
            Query(expr=idle_share("role", _GENERATORS)),
            unit="percentunit",
            says=Advice(good="below 10 %.", otherwise="find the job in the table, and its cause in Bubbles."),
        ),
        number(
            "Cost per hour",
            Query(expr=f"sum(streamrl_cost_per_hour{{{JOB}}})"),
            says=Advice(
                good="within your budget; a process counts 1 where its job gives no costPerHour.",
                otherwise="suspend the job that is worth least.",
            ),
        ),
        number(
            "Lost to idle, per hour",
            Query(expr=f"sum({_LOST_RATE})"),
            says=Advice(
                good="below a tenth of the cost per hour.", otherwise="begin with the job that loses most, below."
            ),
        ),
    ]


def _held_up() -> list[Panel]:
    """By what the operator says: a job without pods has no scheduler."""
    return [
        number(
            "Waiting jobs",
            Query(expr=f'sum(max by ({_BY}) (streamrl_job_waiting{{{JOB},pool=""}})) or vector(0)'),
            says=Advice(
                good="0, or jobs that wait in a queue as they should.",
                otherwise="beside it is what they wait for.",
            ),
        ),
        number(
            "Failed jobs",
            Query(expr=f'sum(max by ({_BY}) (streamrl_job_condition{{{JOB},type="Failed"}}))'),
            says=Advice(good="0.", otherwise="the condition Failed of each says why; delete those that you have read."),
        ),
        curves(
            "What jobs wait for",
            Query(
                expr=f'sum by (reason) (max by ({_BY}, reason) (streamrl_job_waiting{{{JOB},pool=""}}))',
                legend="{{reason}}",
            ),
            width=16,
            says=Advice(
                good="nothing for long, but Queued and Suspended.",
                otherwise="`kubectl describe rljob` has the message; Unschedulable and ImagePullBackOff hold GPUs that others have.",
            ),
        ),
    ]


def _table() -> Panel:
    columns = {
        "Step": f"streamrl_step{{{JOB}}}",
        "of": f"streamrl_planned_steps{{{JOB}}}",
        "Reward": f"streamrl_reward_mean{{{JOB}}}",
        "Held-out reward": f"streamrl_evaluation_reward_mean{{{JOB}}}",
        "Trained tokens/s": f"rate(streamrl_trained_tokens_total{{{JOB}}}[{RANGE}])",
        "Trainer idle": idle_share(_BY, _TRAINER),
        "Generators idle": idle_share(_BY, _GENERATORS),
        "Staleness": f"streamrl_staleness_max_steps{{{JOB}}}",
        "Cost per hour": f"streamrl_cost_per_hour{{{JOB}}}",
        "Warnings": f"streamrl_warning{{{JOB}}}",
    }
    queries = [
        Query(expr=expr if "sum by" in expr else f"sum by ({_BY}) ({expr})", legend=name)
        for name, expr in columns.items()
    ]
    return rows(
        "All jobs",
        *queries,
        units={"Step": "none", "of": "none", "Trainer idle": "percentunit", "Generators idle": "percentunit"},
        opens="streamrl-job",
        says=Advice(
            good="both idle shares are small, and no job warns.",
            otherwise="a click on the job's name opens its dashboard.",
        ),
    )


def _starved() -> list[Panel]:
    return [
        curves(
            "Trainer idle, by job",
            Query(expr=idle_share(_BY, _TRAINER), legend=_NAME),
            unit="percentunit",
            says=Advice(
                good="near 0: the trainer is the dearest device, and has always a group to train.",
                otherwise="give the job more generators, or a larger maxStalenessSteps.",
            ),
        ),
        curves(
            "Generators idle, by job",
            Query(expr=idle_share(_BY, _GENERATORS), legend=_NAME),
            unit="percentunit",
            says=Advice(
                good="small and steady.",
                otherwise="the trainer is the bottleneck: take generators away, or let scaling.auto do it.",
            ),
        ),
        curves(
            "Trained tokens/s, by job",
            Query(expr=f"sum by ({_BY}) (rate(streamrl_trained_tokens_total{{{JOB}}}[{RANGE}]))", legend=_NAME),
            says=Advice(
                good="steady.", otherwise="a fall beside an idle trainer is a lack of samples: see Pools and links."
            ),
        ),
        curves(
            "Processes idle, by job",
            Query(
                expr=f"sum by ({_BY}) (rate({WALL}{{{JOB}}}[{RANGE}])) - "
                f'sum by ({_BY}) (rate({BUBBLE}{{{JOB},part="busy"}}[{RANGE}]))',
                legend=_NAME,
            ),
            says=Advice(
                good="below one process for each ten.",
                otherwise="the job at the top wastes the most devices: open Bubbles for it.",
            ),
        ),
    ]


def _cost() -> list[Panel]:
    return [
        stacked(
            "Cost per hour, by job",
            Query(expr=f"sum by ({_BY}) (streamrl_cost_per_hour{{{JOB}}})", legend=_NAME),
            unit="short",
            says=Advice(good="follows the replicas.", otherwise="look whether a pool at its maximum brings tokens/s."),
        ),
        stacked(
            "Lost to idle per hour, by job",
            Query(expr=_LOST_RATE, legend=_NAME),
            unit="short",
            says=Advice(
                good="small beside the cost per hour.", otherwise="open Bubbles for the job with the widest area."
            ),
        ),
        curves(
            "Cost per million trained tokens, by job",
            Query(expr=f"sum by ({_BY}) (streamrl_cost_per_million_tokens{{{JOB}}})", legend=_NAME),
            says=Advice(good="flat or falling.", otherwise="a rise is idle time, or longer answers: compare with Job."),
        ),
        curves(
            "Cost per reward point, by job",
            Query(expr=f"sum by ({_BY}) (streamrl_cost_per_reward_point{{{JOB}}})", legend=_NAME),
            says=Advice(
                good="still low: each .01 of held-out reward is worth it.",
                otherwise="a steep rise says that the job has learned what it can: end it.",
            ),
        ),
    ]
