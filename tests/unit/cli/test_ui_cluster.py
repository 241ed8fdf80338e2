"""`streamrl ui --cluster` without a browser: what pages show of jobs as an API server gives them, and how often it is asked."""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamrl import names
from streamrl.errors import UserError
from streamrl_cli.cluster import api
from streamrl_cli.cluster.members import members_by_name
from streamrl_cli.main import main
from streamrl_cli.ui import cluster_jobs
from streamrl_cli.ui.cluster_jobs import ClusterJobs
from streamrl_cli.ui.job_pages import JobPages
from streamrl_operator.kube import kubeconfig as written
from streamrl_pages.website import Asked
from support.api_answers import CURVES, HOSTILE, PAGE, ApiAnswers, job
from support.command import streamrl

JOB_PATH = "/jobs/{namespace}/{name}"
LIST = Asked(parts={}, query={})


def asked(name: str, namespace: str = "ml") -> Asked:
    return Asked(parts={"namespace": namespace, "name": name}, query={})


class Shown:
    """The pages about it, and a clock that stands."""

    def __init__(self, served: ApiAnswers, cluster: api.ApiClient, **members: api.ApiClient) -> None:
        self.now_s = 100.0
        self.served = served
        self.jobs = ClusterJobs(cluster, namespaces=["ml"], members=members, clock=lambda: self.now_s)
        self.pages = JobPages(self.jobs, clock=lambda: 1767312000.0)  # 2026-01-02

    async def html(self, path: str = "/", where: Asked = LIST) -> str:
        return await asyncio.to_thread(self.pages.html, path, where, state="s")


@pytest.fixture
async def served() -> AsyncIterator[ApiAnswers]:
    made = ApiAnswers()
    await made.server.start_server()
    yield made
    await made.server.close()


@pytest.fixture
def kubeconfig(served: ApiAnswers, tmp_path: Path) -> Path:
    return served.kubeconfig(tmp_path)


@pytest.fixture
async def shown(served: ApiAnswers, kubeconfig: Path) -> AsyncIterator[Shown]:
    args = argparse.Namespace(kubeconfig=kubeconfig, context=None, namespace=None)
    async with api.connect(args) as cluster:
        made = Shown(served, cluster)
        yield made
        await made.jobs.close()


async def test_jobs_stand_side_by_side_newest_first(shown: Shown) -> None:
    page = await shown.html()
    for text in ("5/20", "0.25", "True: Running", "sim 1/2", "12 % pipeline, 3 % skew", "12.35", "24h"):
        assert f"<td>{text}</td>" in page
    assert page.index('href="/jobs/ml/second"') < page.index('href="/jobs/ml/first"')


async def test_a_job_shows_what_its_scheduler_says(shown: Shown) -> None:
    page = await shown.html(JOB_PATH, asked("first"))
    for text in ("6/20", "all is well", "long ones first", "held-out reward at step 4: 0.750 (8 prompts)", "1.50"):
        assert text in page
    rewards, speed, course, bars = shown_figures(page)
    assert {one["name"]: one["x"] for one in rewards["data"]} == {
        "train": [1, 2, 3, 4, 5, 6],
        "train, smoothed": [1, 2, 3, 4, 5, 6],
        "held-out, greedy": [4],
    }
    assert [one["y"] for one in speed["data"]] == [[100.0] * 6]
    assert {one["name"]: one["y"][0] for one in course["data"] if one["y"][0]} == {"busy": 0.75, "pipeline": 0.25}
    assert {one["name"]: one["y"] for one in bars["data"]}["busy"] == [0.75, 0.75]
    assert bars["data"][0]["x"] == ["sim", "trainer"]


@pytest.mark.parametrize(
    "curves",
    [
        None,
        [],
        {"steps": [], "evaluations": []},
        {"steps": [{"step": 0, "reward_mean": None, "tokens_per_s": None}], "evaluations": []},
        CURVES | {"steps": [{"step": HOSTILE, "reward_mean": 0.0}]},
        CURVES | {"steps": [{"step": 0, "reward_mean": 0.0, "bubbles": {HOSTILE: {}}}]},
    ],
)
async def test_a_scheduler_without_curves_shows_the_rest(shown: Shown, curves: Any) -> None:
    shown.served.curves = curves
    page = await shown.html(JOB_PATH, asked("first"))
    assert "long ones first" in page and "Bubbles by role" in page and "<script>alert" not in page


def shown_figures(page: str) -> Any:
    return json.loads(page.partition('id="figures">')[2].partition("</script>")[0])


async def test_pools_have_their_cluster_and_say_where_that_is_not_reached(shown: Shown) -> None:
    served = shown.served
    pools = [{"name": name, "desired": 2, "ready": 1} for name in ("near", "far", "west")]
    lost = {"type": "ClusterUnreachable", "status": "True", "reason": "ClusterUnreachable"}
    there = job("first", pools=pools)
    there["status"]["conditions"].append(lost | {"message": "cluster east: no answer; it is said twice"})
    engine = there["spec"]["generators"][0]["engine"]
    there["spec"]["generators"] = [
        {"name": "near", "engine": engine},
        {"name": "far", "engine": engine, "clusterName": "east"},
        {"name": "west", "engine": engine, "clusterName": "west"},
    ]
    about = {"name": "first-far", "namespace": "ml", "uid": "e", "resourceVersion": "1"}
    served.jobs = [there]
    served.pools = [{"metadata": about, "spec": {"poolName": "far", "scaling": "static", "replicas": 2}, "status": {}}]
    page = await shown.html()
    assert "near 1/2 in home, far 1/2 in east (not reached), west 1/2 in west<" in page
    page = await shown.html(JOB_PATH, asked("first"))
    assert "<th>cluster</th>" in page
    assert "<td>east (not reached)</td>" in page
    assert "not reached: cluster east: no answer; it is said twice" in page


async def test_a_scheduler_in_a_member_is_asked_there(shown: Shown, tmp_path: Path) -> None:
    far = job("first", clusters=[{"name": "east", "namespace": "pools"}])
    far["spec"]["trainer"]["clusterName"] = "east"
    shown.served.jobs = [far]
    assert "it is in cluster east" in await shown.html(JOB_PATH, asked("first"))
    there = ApiAnswers()
    async with there.server:
        args = argparse.Namespace(kubeconfig=there.kubeconfig(tmp_path), member_context=["east=here"])
        async with members_by_name(args) as members:
            both = Shown(shown.served, shown.jobs._cluster, **members)
            page = await both.html(JOB_PATH, asked("first"))
            await both.jobs.close()
    assert "Dispatch, and why" in page
    assert there.requests[f"/api/v1/namespaces/pools/pods/first-trainer-0:{names.PORT_SIGNALS}/proxy/status"] == 1
    assert not any("/proxy/" in path for path in shown.served.requests)


async def test_a_member_has_its_name_before_its_context(kubeconfig: Path) -> None:
    with pytest.raises(UserError, match="needs the name of the cluster"):
        async with members_by_name(argparse.Namespace(kubeconfig=kubeconfig, member_context=["here"])):
            pass


async def test_names_and_messages_of_strangers_are_text(shown: Shown) -> None:
    served = shown.served
    served.jobs = [
        job("first", message=HOSTILE, checkpointPath=HOSTILE, pools=[{"name": HOSTILE, "desired": 1, "ready": 1}])
    ]
    about = {"name": "e", "namespace": "ml", "uid": "e", "resourceVersion": "1", "creationTimestamp": HOSTILE}
    served.events = [{"metadata": about, "type": HOSTILE, "reason": HOSTILE, "message": HOSTILE}]
    served.pools = [
        {
            "metadata": about,
            "spec": {"poolName": HOSTILE, "scaling": "auto", "replicas": 1},
            "status": {"reason": HOSTILE},
        }
    ]
    for path, where in (("/", LIST), (JOB_PATH, asked("first"))):
        page = await shown.html(path, where)
        assert "&lt;script&gt;alert(1)" in page
        assert "<script>alert" not in page
        assert "\x1b" not in page
        assert "\u202e" not in page


@pytest.mark.parametrize("page", [None, [], {}, PAGE | {"step": "many"}, PAGE | {"generators": [{"id": 5}]}])
async def test_a_job_without_a_scheduler_shows_its_object(shown: Shown, page: Any) -> None:
    shown.served.page = page
    html = await shown.html(JOB_PATH, asked("first"))
    assert "The scheduler is not reached" in html
    for text in ("5/20", "all is well", "12.35"):
        assert text in html


async def test_who_may_not_ask_pods_or_see_events_sees_the_rest(shown: Shown) -> None:
    shown.served.refused = {"proxy", "events"}
    page = await shown.html(JOB_PATH, asked("first"))
    assert "The scheduler is not reached" in page
    assert "user page may not list events in namespace ml" in page
    assert "5/20" in page


async def test_a_namespace_that_is_refused_is_a_line_beside_the_others(shown: Shown) -> None:
    shown.served.refused = {"namespaces/other/"}
    jobs = ClusterJobs(shown.jobs._cluster, namespaces=["ml", "other", "ml"])
    found = await asyncio.to_thread(jobs.jobs)
    assert [one["metadata"]["name"] for one in found.jobs] == ["second", "first"]
    assert len(found.faults) == 1


async def test_all_namespaces_are_one_request(shown: Shown) -> None:
    jobs = ClusterJobs(shown.jobs._cluster, namespaces=[""])
    assert len((await asyncio.to_thread(jobs.jobs)).jobs) == 2
    assert shown.served.requests == {"/apis/streamrl.io/v1alpha1/rljobs": 1}


async def test_many_browsers_are_one_request_and_nothing_is_written(shown: Shown) -> None:
    pages = [shown.html(), shown.html(JOB_PATH, asked("first"))] * 10
    await asyncio.gather(*pages)
    assert set(shown.served.requests.values()) == {1}
    shown.now_s += cluster_jobs._FRESH_S
    await shown.html()
    assert max(shown.served.requests.values()) == 2
    assert shown.served.methods == {"GET"}


async def test_a_job_that_is_not_listed_is_not_asked_for(shown: Shown) -> None:
    for name, namespace in (("none", "ml"), ("first", "kube-system"), ("..", "ml")):
        with pytest.raises(UserError, match="is not a job of the namespaces"):
            await shown.html(JOB_PATH, asked(name, namespace))
    assert list(shown.served.requests) == ["/apis/streamrl.io/v1alpha1/namespaces/ml/rljobs"]


async def test_a_page_says_when_its_job_has_changed(shown: Shown) -> None:
    assert shown.pages.stamp(JOB_PATH, asked("first")) == "gone"
    await shown.html()
    before = {path: shown.pages.stamp(path, where) for path, where in (("/", LIST), (JOB_PATH, asked("first")))}
    assert {path: shown.pages.stamp(path, where) for path, where in (("/", LIST), (JOB_PATH, asked("first")))} == before
    shown.served.jobs[0]["metadata"]["resourceVersion"] = "8"
    shown.now_s += cluster_jobs._FRESH_S
    await shown.html()
    assert shown.pages.stamp("/", LIST) != before["/"]
    assert shown.pages.stamp(JOB_PATH, asked("first")) != before[JOB_PATH]


@pytest.fixture
def held(served: ApiAnswers) -> Iterator[asyncio.Event]:
    """Set `served.held` to it; it is set at the end."""
    event = asyncio.Event()
    yield event
    event.set()


async def test_a_silent_api_server_ends_in_a_line(
    shown: Shown, held: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_jobs, "_ANSWER_S", 0.05)
    shown.served.held = held
    assert "the API server gave no whole answer" in await shown.html()


async def test_what_is_late_is_shown_as_it_was_while_that_is_young(
    shown: Shown, held: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_jobs, "_PATIENCE_S", 0.01)
    await shown.html()
    shown.served.held = held
    shown.now_s += cluster_jobs._FRESH_S
    assert "5/20" in await shown.html()


async def test_what_is_old_is_not_shown(shown: Shown, held: asyncio.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    await shown.html()
    monkeypatch.setattr(cluster_jobs, "_ANSWER_S", 0.05)
    shown.served.held = held
    shown.now_s += cluster_jobs._OLD_S
    assert "the API server gave no whole answer" in await shown.html()


async def test_of_very_many_jobs_some_are_left_out_and_that_is_said(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "more jobs than are shown" not in await shown.html()
    monkeypatch.setattr(cluster_jobs, "_MOST_OBJECTS", 1)
    shown.now_s += cluster_jobs._FRESH_S
    page = await shown.html()
    assert page.count("<tr><td>") == 1
    assert "more jobs than are shown" in page


async def test_a_specification_is_not_kept(shown: Shown) -> None:
    (one, _) = (await asyncio.to_thread(shown.jobs.jobs)).jobs
    assert set(one["spec"]) == {"suspend", "pipeline", "failurePolicy", "generators", "trainer"}
    assert set(one["spec"]["trainer"]) <= {"clusterName"}
    assert all(set(pool) <= {"name", "clusterName"} for pool in one["spec"]["generators"])
    assert "seenFailures" not in one["status"]


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "needs a folder of runs, or --cluster, and not both"),
        (["runs", "--cluster"], "needs a folder of runs, or --cluster, and not both"),
        (["runs", "-n", "ml"], "--namespace: goes with --cluster"),
        (["runs", "-A"], "--all-namespaces: goes with --cluster"),
        (["runs", "--member-context", "east=there"], "--member-context: goes with --cluster"),
        (["--cluster", "-A", "-n", "ml"], "goes without --all-namespaces"),
        (["--cluster", "--kubeconfig", "absent"], "there is none at absent"),
    ],
)
def test_what_is_refused(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = streamrl(capsys, "ui", *arguments)
    assert outcome.code == 2
    assert line in outcome.err[0]


def test_help_names_the_namespaces(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["ui", "--help"])
    assert "may be given again" in " ".join(capsys.readouterr().out.split())


async def test_in_a_pod_the_service_account_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("of the pod")
    (tmp_path / "namespace").write_text("home")
    monkeypatch.setattr(written, "SERVICE_ACCOUNT_DIR", tmp_path)
    monkeypatch.setattr(written.ssl, "create_default_context", lambda cafile: None)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    async with api.connect(argparse.Namespace(kubeconfig=None, context=None, namespace=None)) as cluster:
        assert (cluster.access.server, cluster.namespace, cluster.context) == (
            "https://127.0.0.1:1",
            "home",
            api.IN_POD,
        )
        assert await cluster.access.headers() == {"Authorization": "Bearer of the pod"}
    with pytest.raises(UserError, match="there is none at"):
        async with api.connect(argparse.Namespace(kubeconfig=tmp_path / "x", context=None, namespace=None)):
            pass
