"""What the tables of `streamrl status` say of objects as the API server has them."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from yaml import safe_load as read_yaml_1_1

from streamrl import names
from streamrl_cli.cluster.jobs import describe, progress, row, state, why
from streamrl_cli.cluster.logs import sources
from streamrl_cli.cluster.output import age, columns, dump, duration, text
from streamrl_operator.kube.answers import split_lines

NOW = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)
CONDITIONS = {
    "Running": [("Ready", True, "Running")],
    "WaitingForTrainer": [("Ready", False, "WaitingForTrainer"), ("Succeeded", False, "InProgress")],
    "Succeeded": [("Ready", False, "Ended"), ("Succeeded", True, "Done"), ("Failed", False, "InProgress")],
    "Failed": [("Ready", False, "Ended"), ("Succeeded", False, "InProgress"), ("Failed", True, "Deadline")],
    "Queued": [("Ready", False, "Queued"), ("Suspended", True, "Queued")],
    "NotSeen": [],
}


def job(conditions: list[tuple[str, bool, str]], *, suspend: bool = False, **status: Any) -> dict[str, Any]:
    found = [
        {"type": kind, "status": str(holds), "reason": reason, "message": f"said {reason}"}
        for kind, holds, reason in conditions
    ]
    return {
        "metadata": {"name": "sum", "namespace": "ml", "creationTimestamp": "2026-01-02T11:50:00Z"},
        "spec": {"suspend": suspend, "pipeline": {"steps": 100}},
        "status": status | {"conditions": found},
    }


def test_columns_are_as_wide_as_what_is_in_them() -> None:
    assert columns(("A", "LONG"), [("abc", "d"), ("", "e")]) == ["A    LONG", "abc  d", "     e"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-5, "0s"), (0, "0s"), (179, "179s"), (180, "3m"), (10_799, "179m"), (10_800, "3h"), (1e6, "11d")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_ages_take_every_timestamp_of_an_api_server() -> None:
    assert age("2026-01-02T11:59:00Z", now=NOW) == "60s"
    assert age("2026-01-02T11:59:00.250000Z", now=NOW) == "59s"
    assert age(None, now=NOW) == "-"
    assert text(0) == "0"


@pytest.mark.parametrize("expected", CONDITIONS)
def test_the_state_is_what_the_conditions_say(expected: str) -> None:
    found = job(CONDITIONS[expected])
    assert state(found) == expected
    assert why(found)


def test_suspend_and_deletion_go_before_what_is_ready_but_not_before_the_end() -> None:
    assert state(job(CONDITIONS["Running"], suspend=True)) == "Suspended"
    assert state(job(CONDITIONS["Succeeded"], suspend=True)) == "Succeeded"
    deleted = job(CONDITIONS["Running"])
    deleted["metadata"]["deletionTimestamp"] = "2026-01-02T11:59:00Z"
    assert state(deleted) == "Deleting"


def test_a_row_has_a_dash_for_what_is_not_known() -> None:
    assert row(job([]), now=NOW) == ("sum", "NotSeen", "-/100", "-", "-", "-", "-", "10m")
    assert progress(job([])) == "NotSeen: step -/100, reward -, queue -, generators -, bubbles -"


def test_a_pool_called_trainer_hides_no_trainer_in_a_member() -> None:
    far = job([])
    far["spec"] |= {"trainer": {"clusterName": "east"}, "generators": [{"name": "trainer", "clusterName": "west"}]}
    lines = list(describe(far, pools=(), pods=(), events=(), now=NOW))
    found = [line.split()[:3] for line in lines if "--member-context" in line]
    assert found == [["east", "-", "trainer"], ["west", "-", "trainer"]]


def test_a_job_without_anything_is_described() -> None:
    assert list(describe(job([]), pools=(), pods=(), events=(), now=NOW)) == [
        "ml/sum: NotSeen - no operator has looked at it yet",
        "  step -/100, made 10m ago",
        "  reward -, queue -, - tokens/s",
        "  bubbles -",
        "  attempt -, restarts 0 of -, not counted 0",
    ]


def pod(name: str, *containers: tuple[str, dict[str, Any], int], ready: bool = False, **meta: Any) -> dict[str, Any]:
    statuses = [{"name": one, "state": state, "restartCount": restarts} for one, state, restarts in containers]
    return {
        "metadata": {"name": name, "uid": f"u-{name}", "labels": {names.LABEL_ROLE: "trainer"}} | meta,
        "spec": {
            "initContainers": [{"name": one} for one, *_ in containers[:-1]],
            "containers": [{"name": containers[-1][0]}],
        },
        "status": {
            "phase": "Running",
            "initContainerStatuses": statuses[:-1],
            "containerStatuses": statuses[-1:],
            "conditions": [{"type": "Ready", "status": str(ready)}],
        },
    }


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (pod("a", ("trainer", {"running": {}}, 0), ready=True), "Ready"),
        (pod("a", ("trainer", {"running": {}}, 2)), "Running"),
        (pod("a", ("trainer", {"waiting": {"reason": "ImagePullBackOff"}}, 0)), "ImagePullBackOff"),
        (pod("a", ("trainer", {"waiting": {"reason": "PodInitializing"}}, 0)), "Running"),
        (pod("a", ("trainer", {"running": {}}, 0), deletionTimestamp="2026-01-02T11:59:00Z"), "Terminating"),
    ],
)
def test_a_pod_says_what_it_waits_for(found: dict[str, Any], shown: str) -> None:
    lines = list(describe(job([]), pools=(), pods=[found], events=(), now=NOW))
    assert lines[-1].split()[2] == shown


def test_the_newest_events_and_changes_are_shown_oldest_first() -> None:
    changes = [
        {"time": f"2026-01-02T11:{minute}:00Z", "fromReplicas": minute, "toReplicas": minute + 1, "reason": "queue"}
        for minute in range(10, 20)
    ]
    pool = {"spec": {"poolName": "local", "scaling": "auto"}, "status": {"scalingHistory": changes}}
    events = [
        {"metadata": {}, "eventTime": f"2026-01-02T11:{minute}:00.000000Z", "message": f"event\n{minute}"}
        for minute in range(10, 40)
    ]
    lines = list(describe(job([]), pools=[pool], pods=(), events=events, now=NOW))
    begin = lines.index("SCALING")
    assert [line.split()[2] for line in lines[begin + 2 : begin + 7]] == ["15", "16", "17", "18", "19"]
    assert [line.split()[-2:] for line in lines[-2:]] == [["event", "38"], ["event", "39"]]


def test_logs_are_of_the_containers_asked_for() -> None:
    trainer = pod(
        "sum-trainer-0",
        ("prepare", {"terminated": {}}, 0),
        ("scheduler", {"running": {}}, 1),
        ("trainer", {"waiting": {}}, 0),
    )
    generator = pod("sum-local-0", ("generator", {"running": {}}, 0))
    found = {
        source.prefix: source.has_log
        for source in sources([trainer, generator], ["prepare", "scheduler", "trainer", "generator"])
    }
    assert found == {
        "sum-local-0": True,
        "sum-trainer-0/prepare": True,
        "sum-trainer-0/scheduler": True,
        "sum-trainer-0/trainer": False,
    }
    assert [source.prefix for source in sources([trainer, generator], ["scheduler"])] == ["sum-trainer-0/scheduler"]


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a", b"b\n\nc"], [b"ab", b"", b"c"]),
        ([b"x" * 300_000, b"\n", b""], [b"x" * 300_000]),
        ([], []),
    ],
)
async def test_lines_of_a_log_may_come_in_any_pieces(chunks: list[bytes], lines: list[bytes]) -> None:
    async def come() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    assert [line async for line in split_lines(come())] == lines


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(st.characters(codec="ascii"), max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abyn", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(deadline=None)  # other processes take the processor away
@given(st.lists(st.fixed_dictionaries({"spec": PLAIN}), min_size=2, max_size=3))
def test_yaml_is_read_alike_by_readers_of_both_versions(objects: list[dict[str, Any]]) -> None:
    written = dump(objects, form="yaml")
    documents = list(YAML(typ="safe", pure=True).load_all(written))
    assert documents == objects
    assert [read_yaml_1_1(part) for part in written.removeprefix("---").split("\n---")] == objects


@pytest.mark.parametrize(
    "word",
    [
        *("yes", "No", "on", "OFF", "y", "1e-6", "012", "0o7", "null"),
        *("~", "", "1:30", "1_0", "0b1", "2026-01-01", "a: b", "# x"),
    ],
)
def test_words_that_look_like_something_else_stay_strings(word: str) -> None:
    written = dump({"value": word, word or "key": "a\nb\n"}, form="yaml")
    assert read_yaml_1_1(written)["value"] == word
    assert YAML(typ="safe", pure=True).load(written)["value"] == word
