"""The pages of `streamrl ui --cluster`: the jobs of a cluster.

    /                       jobs side by side
    /jobs/NAMESPACE/NAME    conditions, pools, events; of the scheduler where it is reached: dispatch and why, versions, bubbles

A job whose scheduler is not reached shows what its object says. Names and messages are data, as in `pages.py`.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from streamrl_cli.cluster.api import Object
from streamrl_cli.cluster.jobs import (
    ENDED,
    bubbles,
    change_rows,
    condition_rows,
    conditions,
    event_rows,
    lost_members,
    placed,
    pool_places,
    pool_rows,
    state,
    steps,
    why,
)
from streamrl_cli.cluster.output import age, text
from streamrl_cli.reporting.page import (
    CHART_HEIGHT_PX,
    REWARD_BY_TASK,
    Chart,
    Figure,
    drawn,
    label,
    lines_by_step,
    reward,
    reward_tasks,
    stacked,
)
from streamrl_cli.runner.progress import PARTS, bubble_shares, format_count, format_number, warning_texts
from streamrl_cli.ui.base import TemplatePages, assets
from streamrl_cli.ui.cluster_jobs import ClusterJobs, JobDetail, key_of
from streamrl_cli.ui.state import MOST_ROWS, Row, RunCurves, RunStatus, cut, evaluation_text, status_tables
from streamrl_operator.planning.values import trainer_cluster
from streamrl_pages.website import Asked, website

_JOB = "/jobs/{namespace}/{name}"
_POOL_HEAD = ("pool", "scaling", "asked", "desired", "ready", "reason")


def jobs_application(jobs: ClusterJobs, *, token: str, names: frozenset[str]) -> Any:  # noqa: ANN401 - an ASGI application
    """The pages about the jobs of a cluster."""
    pages = JobPages(jobs)
    return website(pages, paths=tuple(pages.shown), assets=assets(), token=token, names=names)


class JobPages(TemplatePages):
    """Pages about jobs of a cluster."""

    home = "Jobs"
    keys = "r: jobs."

    def __init__(self, jobs: ClusterJobs, *, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch."""
        super().__init__(clock=clock)
        self._source = jobs
        self.shown: dict[str, Callable[[Asked, str], str]] = {"/": self._jobs, _JOB: self._job}

    def stamp(self, path: str, asked: Asked) -> str:
        """Versions of the objects, and the time where ages grow. Waits for nothing."""
        beat = self.beat()
        if path == _JOB:
            job = self._source.latest_job(_key(asked))
            if job is None:
                return "gone"
            return f"{_version(job)} {'' if state(job) in ENDED else beat}"
        found = self._source.latest()
        return beat if found is None else " ".join((beat, *found.faults, *map(_version, found.jobs)))

    def _jobs(self, _asked: Asked, page_state: str) -> str:
        found, now = self._source.jobs(), self._now()
        return self.page(
            "jobs.html",
            title=self.home,
            state=page_state,
            rows=[(*key_of(job), _row(job, now=now)) for job in found.jobs],
            faults=found.faults,
            is_cut=found.is_cut,
        )

    def _job(self, asked: Asked, page_state: str) -> str:
        key, now = _key(asked), self._now()
        job, detail = self._source.job(key), self._source.detail(key)
        title = "/".join(key)
        head, rows = placed(_POOL_HEAD, pool_rows(detail.pools), job, title="cluster")
        return self.page(
            "job.html",
            title=title,
            state=page_state,
            tabs=[(title, f"/jobs/{title}")],
            tab=title,
            word=state(job),
            why=why(job),
            cards=_cards(job, detail=detail, now=now),
            conditions=condition_rows(job, now=now),
            pool_head=head,
            pools=cut(rows),
            lost=lost_members(job),
            far=trainer_cluster(job),
            changes=cut(change_rows(detail.pools, now=now)),
            events=cut(event_rows(detail.events, now=now)),
            faults=detail.faults,
            **_said(detail, has_ended=state(job) in ENDED),
        )

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self.clock(), UTC)


def _key(asked: Asked) -> tuple[str, str]:
    return asked.parts["namespace"], asked.parts["name"]


def _version(job: Object) -> str:
    return f"{job['metadata']['uid']}.{job['metadata']['resourceVersion']}"


def _row(job: Object, *, now: datetime) -> Row:
    status = job["status"]
    ready, places = conditions(job).get("Ready"), pool_places(job)
    return (
        state(job),
        steps(job),
        text(status.get("reward")),
        text(status.get("queue")),
        "–" if ready is None else f"{ready['status']}: {ready['reason']}",
        ", ".join(_pool(pool, places.get(pool["name"])) for pool in status.get("pools", ())) or "–",
        bubbles(status),
        format_number(status.get("cost"), digits=2),
        age(job["metadata"].get("creationTimestamp"), now=now),
    )


def _pool(pool: Object, place: str | None) -> str:
    return f"{pool['name']} {pool['ready']}/{pool['desired']}{f' in {place}' if place else ''}"


def _cards(job: Object, *, detail: JobDetail, now: datetime) -> dict[str, str]:
    """What the scheduler says counts more than what the operator has read of it last."""
    status: dict[str, Any] = job["status"]
    live: dict[str, Any] = dict(detail.status or {})
    restarts, most = status.get("restarts", 0), job["spec"]["failurePolicy"]["maxRestarts"]
    return {
        "step": f"{live['step']}/{live['steps']}" if live else steps(job),
        "reward": text(status.get("reward")),
        "queue": text(live.get("queue", status.get("queue"))),
        "tokens/s": format_count(status.get("tokensPerSecond")),
        "bubbles": bubbles(status),
        "cost": format_number(live.get("cost", status.get("cost")), digits=2),
        "attempt": text(live.get("attempt", status.get("attempt"))),
        "restarts": f"{restarts} of {text(most)}, not counted {status.get('ignoredRestarts', 0)}",
        "checkpoint": text(status.get("checkpointPath")),
        "age": age(job["metadata"].get("creationTimestamp"), now=now),
    }


def _said(detail: JobDetail, *, has_ended: bool) -> dict[str, Any]:
    """By the scheduler."""
    if (status := detail.status) is None:
        return {"is_reached": False, "has_ended": has_ended, "warnings": []}
    evaluation = status.get("last_evaluation")
    return {
        "is_reached": True,
        "has_ended": has_ended,
        **status_tables(status),
        "warnings": warning_texts(dict(status), silent=None)[:MOST_ROWS],
        "evaluation": evaluation_text(evaluation) if evaluation else "",
        **drawn(
            [
                *_course(detail.curves),
                ("Bubbles by role", "Shares of the wall of all processes of a role.", _by_role(status)),
            ]
        ),
    }


def _course(curves: RunCurves | None) -> Iterator[Chart]:
    """Of the run so far."""
    if curves is None or not curves["steps"]:
        return
    points = curves["steps"]
    steps = [point["step"] for point in points]
    yield (
        "Reward",
        "Mean reward of the step's samples, and of answers to held-out prompts.",
        reward(points, curves["evaluations"]),
    )
    if any(point.get("tasks") for point in points):
        yield "Reward by task", REWARD_BY_TASK, reward_tasks(points, curves["evaluations"])
    yield (
        "Speed",
        "Tokens trained a second.",
        lines_by_step(steps, {"tokens/s": [point.get("tokens_per_s") for point in points]}),
    )
    for role in ("generators", "trainer"):
        walls = [((point.get("bubbles") or {}).get(role) or {}) for point in points]
        if any(walls):
            shares = [bubble_shares({str(part): share for part, share in wall.items()}, wall_s=1.0) for wall in walls]
            parts = {part: [one[part] for one in shares] for part in PARTS}
            found = stacked([step + 1 for step in steps], parts, x_title="step", height_px=CHART_HEIGHT_PX)
            found["layout"] |= {"bargap": 0}
            yield f"Bubbles of the {role}", "Shares of the wall at each step.", found


def _by_role(status: RunStatus) -> Figure:
    """A bar for each pool, and one for the trainer."""
    walls: defaultdict[str, float] = defaultdict(float)
    spent: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    trainer = status["trainer"]
    named = [(one.get("pool", "generators"), one) for one in status["generators"]] + (
        [("trainer", trainer)] if trainer else []
    )
    for role, one in named:
        walls[role] += one["wall_s"]
        for part, seconds in one["bubbles"].items():
            spent[role][part] += seconds
    roles = list(islice(walls, MOST_ROWS))
    shares = [bubble_shares(spent[role], wall_s=walls[role]) for role in roles]
    parts = {part: [one[part] for one in shares] for part in PARTS}
    found = stacked([label(role) for role in roles], parts, x_title="", height_px=CHART_HEIGHT_PX)
    found["layout"]["xaxis"] |= {"type": "category", "automargin": True}
    return found
