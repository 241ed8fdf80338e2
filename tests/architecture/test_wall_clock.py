"""Who reads the wall clock, and what for: it can jump, so nothing waits, ends or is numbered by it. Decisions take monotonic time."""

import re

from support.tree import PACKAGES, ROOT, sources

READERS = {
    "cli/streamrl_cli/cluster/jobs.py": "Kubernetes' own stamps of events are compared with it, to show new ones",
    "cli/streamrl_cli/cluster/members.py": "ages that are shown",
    "cli/streamrl_cli/cluster/status.py": "ages that are shown",
    "cli/streamrl_cli/runner/folder.py": "when a run began, in its file",
    "cli/streamrl_cli/runner/scaling.py": "stamps of lines in the run folder",
    "cli/streamrl_cli/top.py": "ages that are shown",
    "cli/streamrl_cli/ui/job_pages.py": "ages that are shown",
    "cli/streamrl_cli/ui/pages.py": "how often a page that is open asks",
    "operator/streamrl_operator/clock.py": "what the operator writes down, compares with stamps of the API server, and holds certificates against",
    "operator/streamrl_operator/kube/oidc.py": "the end of an ID token is a date",
    "operator/streamrl_operator/planning/objects/containers.py": "a probe's: the age of a heartbeat file; a jump is over at the next beat, long before the last failure in a row",
    "pages/streamrl_pages/http_fetch.py": "Retry-After may be a date; what is waited has a bound",
    "workers/streamrl_workers/agents/endpoint.py": "`created` of OpenAI's answers",
    "workers/streamrl_workers/agents/responses.py": "`created_at` of OpenAI's answers",
    "workers/streamrl_workers/metrics/bubbles.py": "stamps of lines in the run folder",
    "workers/streamrl_workers/process/heartbeat.py": "since when a process is silent, in a line for people",
    "workers/streamrl_workers/scheduler/main.py": "when a sample ended, for people",
    "workers/streamrl_workers/scheduler/server/status_endpoint.py": "stamps of lines in the run folder",
    "workers/streamrl_workers/trackers/tensorboard.py": "stamps of events",
    "workers/streamrl_workers/trackers/trackio.py": "stamps of tables",
    "workers/streamrl_workers/tracing/spans.py": "stamps of spans, from one reading at the start",
}
_READS = re.compile(
    r"\btime\.time(_ns)?\b|\b(datetime|date)\.(now|utcnow|today)\b|^from time import .*\btime(_ns)?\b", re.MULTILINE
)


def test_the_wall_clock_is_read_to_be_shown_or_compared_with_dates_alone() -> None:
    readers = {str(path.relative_to(ROOT)) for path in sources(*PACKAGES) if _READS.search(path.read_text())}
    assert readers == set(READERS)
